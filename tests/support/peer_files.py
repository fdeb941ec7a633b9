"""Run on two ranks where mosaicml is installed: each Trainer goes on from what the other has saved. Prints a line for each comparison."""

import sys
import types
import warnings

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

library = torch.library.Library("torchvision", "DEF")  # what the peer imports without needing it
library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
for absent in ("mcli", "torch_optimizer"):
    sys.modules[absent] = types.ModuleType(absent)

import composer as peer  # noqa: E402
from composer.utils.parallelism import FSDP2Config  # noqa: E402

from smpc import composer as own  # noqa: E402
from smpc import dist  # noqa: E402
from smpc.sharding.dtensors import whole  # noqa: E402

FOLDER = sys.argv[1]
NAMES = {"whole": "ep0-ba2-rank0.pt", "sharded": "ep0-ba2"}


def model_of(base, seed):
    class Model(base):
        def __init__(self):
            super().__init__()
            torch.manual_seed(seed)
            self.model = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4))

        def forward(self, batch):
            return self.model(batch[0])

        def loss(self, outputs, batch):
            return nn.functional.cross_entropy(outputs, batch[1])

        def eval_forward(self, batch, outputs=None):
            return self(batch) if outputs is None else outputs

    return Model()


def loader():
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(32, 8, generator=generator), torch.randint(0, 4, (32,), generator=generator))
    return DataLoader(data, batch_size=4, sampler=dist.get_sampler(data))


def trainer(who, kind, seed=0, **options):
    model = model_of(who.ComposerModel, seed)
    if kind == "sharded" and who is peer:
        options["parallelism_config"] = {"fsdp": FSDP2Config(state_dict_type="sharded")}
    elif kind == "sharded":
        options["fsdp_config"] = {"state_dict_type": "sharded"}
    if who is peer:
        options |= {"progress_bar": False, "auto_log_hparams": False}
    return who.Trainer(
        model=model, optimizers=torch.optim.AdamW(model.parameters(), lr=0.01), train_dataloader=loader(), device="cpu", precision="fp32",
        max_duration="2ba", save_interval="2ba", **options,
    )  # fmt: skip


def values(made, weights_only=False):
    parameters = list(made.state.model.parameters())
    optimizer = getattr(made.state, "optimizer", None) or made.state.optimizers[0]
    moments = [value for p in parameters for _, value in sorted(optimizer.state[p].items())] if not weights_only else []
    return torch.cat([whole(tensor).detach().reshape(-1).float() for tensor in (*parameters, *moments)])


def told(text, *pairs):
    if dist.get_global_rank() == 0:
        print(f"{text}: {all(torch.equal(one, other) for one, other in pairs)}", flush=True)


def main():
    warnings.simplefilter("ignore")
    dist.initialize_dist("cpu")
    for kind, name in NAMES.items():
        theirs = trainer(peer, kind, save_folder=f"{FOLDER}/peer-{kind}")
        theirs.fit()
        halfway = values(theirs)
        ours = trainer(own, kind, seed=1, load_path=f"{FOLDER}/peer-{kind}/{name}")
        told(f"{kind}: ours has what the peer saved", (values(ours), halfway))
        assert ours.state.timestamp.fields() == {"epoch": 0, "batch": 2, "sample": 16, "token": 0, "batch_in_epoch": 2}
        assert ours.state.optimizer.param_groups[0]["weight_decay"] == 0.01
        theirs.fit(duration="2ba")
        ours.fit("2ba")
        told(f"{kind}: both go on alike", (values(ours), values(theirs)))
        saved = trainer(own, kind, save_folder=f"{FOLDER}/own-{kind}")
        saved.fit()
        loaded = trainer(peer, kind, seed=1, load_path=f"{FOLDER}/own-{kind}/{name}", load_weights_only=True)
        told(f"{kind}: the peer has the weights that ours saved", (values(loaded, True), values(saved, True)))


if __name__ == "__main__":
    main()
