"""The Trainer with layers sliced over groups of ranks beside FSDP, beside one process of plain PyTorch; and what it refuses."""

import os
import warnings

import pytest
import torch
from support.executor_harness import run_workers
from support.trainer_cases import Classifier, FullMemory, classifier, dataset, eager, everything
from torch import distributed, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInputOutput, RowwiseParallel
from torch.utils.data import DataLoader

from smpc import dist
from smpc.composer import Trainer
from smpc.errors import ConfigError, ConfigUnsupportedError, StepError

PLAN = {"model.blocks.*.up": ColwiseParallel(), "model.blocks.*.down": RowwiseParallel()}
STRATEGIES = {
    "FULL_SHARD": {},
    "SHARD_GRAD_OP": {"sharding_strategy": "SHARD_GRAD_OP"},
    "HYBRID_SHARD": {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 1},
    "NO_SHARD": {"sharding_strategy": "NO_SHARD"},
    "recomputed": {"activation_checkpointing": True},
    "parts in CPU memory": {"cpu_offload": True},
}


def _place(rank):
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(distributed.get_world_size()), "NODE_RANK": "0"}
    warnings.simplefilter("ignore")


def _tensor(degree=2, plan=PLAN):
    return {"tensor_parallel_degree": degree, "layer_plan": plan}


def _trainer(batch_size, parallelism, model=None, degree=2, **options):
    model, data = model or classifier(), dataset()
    replica = {"num_replicas": dist.get_world_size() // degree, "rank": dist.get_global_rank() // degree}
    loader = DataLoader(data, batch_size=batch_size, sampler=dist.get_sampler(data, **replica))
    options = {"max_duration": "4ba", "device": "cpu", "train_dataloader": loader, **options}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return Trainer(model=model, optimizers=optimizer, parallelism_config=parallelism, **options)


def strategies(rank, folder, names):
    _place(rank)
    found = {}
    for name in names:
        made = _trainer(4, {"fsdp": STRATEGIES[name], "tp": _tensor()})
        made.fit()
        found[name] = everything(made)
        assert made.state.model.model.blocks[0].up.weight.to_local().shape[0] in (4, 8), "of 16 rows"
    uneven = _trainer(4, {"fsdp": {}, "tp": _tensor()}, device_train_microbatch_size=3, eval_dataloader=[dataset()[:6]])
    uneven.fit()
    found["microbatches"] = everything(uneven)
    found["counts"] = uneven.state.timestamp.fields()
    found["losses"] = uneven.state.loss, uneven.eval()
    alone = _trainer(4, {"tp": _tensor()})
    alone.fit()
    found["tp alone"] = everything(alone)
    return found


@pytest.mark.long
@pytest.mark.parametrize(
    "names",
    [("FULL_SHARD", "HYBRID_SHARD", "recomputed"), pytest.param(tuple(STRATEGIES), marks=pytest.mark.slow)],
    ids=["three", "all"],
)
def test_slices_beside_fsdp(tmp_path, names):
    """Two replicas of two slices train as two ranks do."""
    expected = eager(2, 4)
    for found in run_workers(strategies, 4, tmp_path, names):
        counts, (loss, evaluated) = found.pop("counts"), found.pop("losses")
        assert counts == {"epoch": 2, "batch": 4, "sample": 32, "token": 0, "batch_in_epoch": 0}
        assert 0 < loss < 2
        assert 0 < evaluated < 2
        for name, values in found.items():
            torch.testing.assert_close(values, expected, rtol=1e-4, atol=2e-6, msg=name)


class Dropped(Classifier):
    """Odd sizes, a frozen layer, and dropout on what is whole."""

    def __init__(self):
        super().__init__()
        for block in self.model.blocks:
            block.up, block.down = nn.Linear(8, 10), nn.Linear(10, 8)
        self.model.head.requires_grad_(False)
        self.dropout = nn.Dropout(0.5)

    def forward(self, batch):
        return self.model(self.dropout(batch[0]))


def _dropped():
    torch.manual_seed(0)
    return Dropped()


def saving(rank, folder, kind):
    _place(rank)
    fsdp = {"state_dict_type": kind}
    options = {"save_folder": str(folder / "run"), "save_interval": "2ba", "seed": 1}
    made = _trainer(4, {"fsdp": fsdp, "tp": _tensor()}, _dropped(), max_duration="2ba", **options)
    made.fit()
    halfway = everything(made)
    made.fit("2ba")
    path = str(folder / "run" / ("ep1-ba2" if kind == "sharded" else "ep1-ba2-rank0.pt"))
    other = _trainer(4, {"fsdp": fsdp, "tp": _tensor()}, _dropped(), load_path=path, seed=2)
    loaded = everything(other)
    other.fit()
    plain = Trainer(
        model=(model := _dropped()), optimizers=torch.optim.AdamW(model.parameters()), device="cpu", load_path=path
    )
    return halfway, loaded, everything(plain), everything(made), everything(other)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["full", pytest.param("sharded", marks=pytest.mark.slow)])
def test_checkpoints_of_slices(tmp_path, kind):
    """They resume with and without slices; dropout is drawn alike on ranks that slice together, or these would part."""
    for halfway, loaded, plain, end, again in run_workers(saving, 4, tmp_path, kind):
        assert torch.equal(loaded, halfway)
        assert torch.equal(plain, halfway)
        assert torch.equal(again, end)


def clipping(rank, folder):
    _place(rank)
    made = _trainer(4, {"fsdp": {}, "tp": _tensor()})
    norms = []
    prepared = made._stepper.prepared
    step = made.state.optimizer.step
    made.state.optimizer.step = lambda: (norms.append(float(prepared.clip(0.5))), step())
    made.fit("1ba")
    return norms


def test_the_norm_of_slices_and_of_what_is_whole(tmp_path):
    model, data = classifier(), dataset()
    rows = [0, 2, 4, 6, 1, 3, 5, 7]  # of two replicas
    model.loss(model((data.tensors[0][rows],)), (None, data.tensors[1][rows])).backward()
    expected = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    for (norm,) in run_workers(clipping, 4, tmp_path):
        assert norm == pytest.approx(float(expected), rel=1e-5)


def _full(where):
    """A model that fails on rank 1, where more than one sample runs."""
    model = classifier()
    block = model.model.blocks[1]
    (block.up if where == "inside of slices" else block).register_forward_hook(
        FullMemory("backward" if where == "backward" else "forward", 1, 1)
    )
    return model


def automatic(rank, folder, where, names):
    _place(rank)
    found = {}
    for name in names:
        fsdp, values = STRATEGIES[name], []
        for model, size in ((_full(where), "auto"), (classifier(), 1)):
            made = _trainer(
                4, {"fsdp": fsdp, "tp": _tensor()}, model, device_train_microbatch_size=size, max_duration="1ba"
            )
            made.fit()
            values.append(everything(made))
            assert made.state.device_train_microbatch_size == 1
        found[name] = torch.equal(*values)
    return found


@pytest.mark.long
@pytest.mark.matrix(1)
@pytest.mark.parametrize("where", ["forward", "backward", "inside of slices"])
def test_out_of_memory_on_one_rank_of_slices(tmp_path, where):
    """The ranks that wait for its slices take the smaller size with it, and all have the bits of one that was given from the start."""
    assert run_workers(automatic, 4, tmp_path, where, ("recomputed",)) == [{"recomputed": True}] * 4


@pytest.mark.slow
@pytest.mark.parametrize("where", ["forward", "backward", "inside of slices"])
def test_out_of_memory_on_one_rank_of_slices_in_every_strategy(tmp_path, where):
    assert run_workers(automatic, 4, tmp_path, where, tuple(STRATEGIES)) == [dict.fromkeys(STRATEGIES, True)] * 4


def _dropped_on(device):
    torch.manual_seed(0)
    with torch.device(device):
        return Dropped()


def values_of_rank_0(rank, folder, names):
    _place(rank)
    found, elsewhere = [], "meta" if rank else "cpu"
    for name in names:
        for device in ("cpu", elsewhere):
            model = _dropped_on(device)
            given = STRATEGIES[name] | {"sync_module_states": True, "ignored_modules": [model.model.head]}
            made = _trainer(4, {"fsdp": given, "tp": _tensor()}, model, max_duration="2ba", seed=1)
            assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
            made.fit()
            found.append(everything(made))
    made.save_checkpoint(str(folder / "whole.pt"))
    made.fit("2ba")
    alone = {"sync_module_states": True, "load_monolith_rank0_only": True}
    path = {"load_path": str(folder / "whole.pt")}
    other = _trainer(4, {"fsdp": alone, "tp": _tensor()}, _dropped_on(elsewhere), **path)
    other.fit()
    return found, everything(made), everything(other)


@pytest.mark.long
@pytest.mark.parametrize(
    "names",
    [("HYBRID_SHARD",), pytest.param(tuple(STRATEGIES), marks=pytest.mark.slow)],
    ids=["one", "all"],
)
def test_slices_of_values_that_rank_0_alone_has(tmp_path, names):
    """As if every rank had had them; and resumed from a file that rank 0 alone reads."""
    for found, end, resumed in run_workers(values_of_rank_0, 4, tmp_path, names):
        for wanted, values in zip(found[::2], found[1::2], strict=True):
            assert torch.equal(values, wanted)
        torch.testing.assert_close(resumed, end)


def refusals(rank, folder):
    _place(rank)
    tied = classifier()
    tied.model.blocks[1].up.weight = tied.model.blocks[0].up.weight
    others = [tuple(tensor[rank : rank + 4] for tensor in dataset().tensors)]
    scattered = PrepareModuleInputOutput(
        input_layouts=Replicate(),
        desired_input_layouts=Shard(0),
        use_local_input=True,
        output_layouts=Shard(0),
        desired_output_layouts=Replicate(),
    )
    stranger = _tensor(2, {"model.block.up": ColwiseParallel()})
    parting = _tensor(2, {"model.blocks.0.up": ColwiseParallel(), "model.blocks.0.down": RowwiseParallel()})
    sharded_already = {"auto_wrap": False}
    cases = (
        (ConfigError, "expected a divisor of the 2 processes", {}, {"tp": _tensor(3)}),
        (ConfigError, "layer_plan: expected names of modules, found 'model.block.up'", {}, {"tp": stranger}),
        (ConfigUnsupportedError, "blocks.0.up.weight and model.blocks.1.up.weight are one parameter", {"model": tied}, {"tp": parting}),
        (ConfigUnsupportedError, "auto_wrap: False is not supported", {}, {"tp": _tensor(), "fsdp": sharded_already}),
        (ConfigError, "batch: expected the same one on ranks 0, 1", {"train_dataloader": others}, {"tp": _tensor()}),
        (ConfigError, "expected a sampler of replica 0 of 1", {"degree": 1}, {"tp": _tensor()}),
        (StepError, "expected equal gradients on all ranks", {}, {"tp": _tensor(2, {"model.blocks.1": scattered})}),
    )  # fmt: skip
    found = []
    for error, says, options, parallelism in cases:
        try:
            _trainer(4, parallelism, **options).fit()
        except error as caught:
            found.append(says in str(caught) or str(caught))
    return found


def test_what_is_refused_beside_slices(tmp_path):
    assert run_workers(refusals, 2, tmp_path) == [[True] * 7] * 2
