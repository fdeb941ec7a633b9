"""Jobs of several ranks that train a small model and save or resume it, for the tests of checkpoints in training scripts."""

import warnings

import torch
from torch import nn

import smpc.v1 as smp

SAMPLES, MB, LENGTH, VOCABULARY = 16, 2, 6, 18
TOPOLOGIES = [(1, 1, 1), (2, 1, 1), (4, 1, 1), (1, 2, 1), (2, 2, 1), (1, 1, 4), (2, 1, 2)]  # pp, tp, rdp


class Model(nn.Module):
    """Plain modules, a tied head and a buffer around a transformer that is always distributed."""

    def __init__(self, dropout):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.before = nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Dropout(dropout), nn.Linear(24, 16))
        self.transformer = smp.nn.DistributedTransformer(
            num_layers=3,
            num_attention_heads=4,
            attention_head_size=4,
            hidden_size=16,
            intermediate_size=32,
            attention_dropout_prob=dropout,
            hidden_dropout_prob=dropout,
            causal_mask_size=LENGTH,
        )
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, VOCABULARY, bias=False)
        self.register_buffer("scale", torch.tensor([0.5]))

    def forward(self, ids):
        hidden = self.embedding(ids)
        hidden = hidden + self.scale * self.before(hidden)
        return self.head(self.norm(self.transformer((hidden, None))[0]))


@smp.step
def train_step(model, ids):
    logits = model(ids)
    loss = nn.functional.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), ids[:, 1:].reshape(-1))
    model.backward(loss)
    return loss


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, VOCABULARY, (SAMPLES, LENGTH), generator=generator)


class Job:
    """One rank of a job, after smp.init. `seed`: of the weights; `half`: in fp16, with optimizer state sharded over replicas."""

    def __init__(self, topology, dropout=0.0, seed=1, half=False, **config):
        pp, tp, rdp = topology
        degrees = {"pipeline_parallel_degree": pp, "tensor_parallel_degree": tp}
        ddp = {"ddp": True, "shard_optimizer_state": half} if tp * rdp > 1 else {}
        ddp |= {"fp16": half}
        scaling = {"dynamic_loss_scale": True, "init_scale": 2.0**18, "scale_window": 2} if half else {}
        smp.init({**degrees, "microbatches": MB, "checkpoint_timeout": 40.0, **ddp, **config})
        torch.manual_seed(seed)
        with smp.tensor_parallelism():
            model = Model(dropout)
        self.model = smp.DistributedModel(model)
        inner = torch.optim.AdamW(self.model.parameters(), lr=1e-2, eps=1e-6)
        self.optimizer = smp.DistributedOptimizer(inner, **scaling)

    def step(self, number):
        """The mean loss over all ranks."""
        self.optimizer.zero_grad()
        own = batch(number).view(smp.dp_size(), -1, LENGTH)[smp.dp_rank()]
        loss = train_step(self.model, own).reduce_mean()
        self.optimizer.step()
        return torch.stack(smp.allgather(loss, smp.WORLD)).mean()

    def steps(self, *numbers):
        return [self.step(number) for number in numbers]

    def save(self, path, tag, **options):
        smp.save_checkpoint(str(path), tag, model=self.model, optimizer=self.optimizer, **options)

    def state(self):
        """Everything that a checkpoint must bring back, whole; copies."""
        optimizer = self.optimizer.state_dict()
        tensors = {
            f"{name}::{key}": v.clone() for name, items in optimizer["state"].items() for key, v in items.items()
        }
        model = {key: value.clone() for key, value in self.model.state_dict().items()}
        groups = {"groups": optimizer["param_groups"], "scaler": optimizer.get("loss_scaler")}
        return {"model": model, "optimizer": tensors, "groups": groups}


def same(found, expected):
    """The places at which two states differ in a bit."""
    wrong = [kind for kind in expected if kind == "groups" and found[kind] != expected[kind]]
    for kind in ("model", "optimizer"):
        wrong += [f"{kind} {key}" for key in found[kind].keys() ^ expected[kind].keys()]
        for key in found[kind].keys() & expected[kind].keys():
            if not torch.equal(found[kind][key], expected[kind][key]):
                wrong.append(f"{kind} {key}")
    return wrong


def size(topology):
    pp, tp, rdp = topology
    return pp * tp * rdp


def resume(path, **options):
    """Resume, and what was warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = smp.resume_from_checkpoint(str(path), **options)
    return found, [str(warning.message) for warning in caught]
