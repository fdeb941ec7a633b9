"""Forwards that write into parameters, on ranks that have samples of their own: what one process has, or an error on all of them."""

import pytest
import torch
import torch.nn.functional as F
from executor_harness import run_workers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import smpc.v1 as smp
from smpc.composer import ComposerModel, Trainer
from smpc.errors import PeerError, StepError
from smpc.sharding import Keep, ShardingOptions, shard
from smpc.sharding.dtensors import whole

ROWS, STEPS, MB = 12, 3, 2


class Table(nn.Module):
    """Looks ids up by a table whose rows have norms of 1 at most, in three ways; `kind` is one of them, or what forward writes."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        limit = 1.0 if kind in ("module", "bag") else None
        make = nn.EmbeddingBag if kind == "bag" else nn.Embedding
        self.embed, self.mid, self.head = make(ROWS, 6, max_norm=limit), nn.Linear(6, 6), nn.Linear(6, 4)
        self.code = nn.Parameter(torch.ones(5, 6), requires_grad=False)
        self.calls = 0

    def forward(self, ids):
        limits = self.kind == "function"
        x = F.embedding(ids, self.embed.weight, max_norm=1.0, norm_type=1.0) if limits else self.embed(ids)
        if self.kind in WRITES:
            WRITES[self.kind](self, x)
        y = self.head(torch.tanh(self.mid(x)) + self.code.clone().sum(0))
        return y.square().mean()


@torch.no_grad()
def follow_samples(model, x):
    model.code.mul_(0.9).add_(x.mean((0, 1)), alpha=0.1)


def follow_samples_unseen(model, x):
    model.code.data.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)


@torch.no_grad()
def follow_weights(model, x):
    model.code[:, 0].lerp_(model.mid.weight[:5, 0], 0.5)


@torch.no_grad()
def write_later(model, x):
    model.calls += 1
    if model.calls > MB:
        model.code.mul_(0.9)


@torch.no_grad()
def clamp(model, x):
    model.mid.weight.clamp_(-0.2, 0.2)


WRITES = {
    "clamp": clamp,
    "samples": follow_samples,
    "samples, unseen": follow_samples_unseen,
    "weights": follow_weights,
    "later": write_later,
}


def data(step, replica):
    return torch.randint(ROWS, (4, 4), generator=torch.Generator().manual_seed(10 * step + replica))


def plain(kind, replicas=2, evaluated=()):
    """The parameters of one process that has all samples."""
    model = Table(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        for parts in zip(*(data(step, replica).chunk(MB) for replica in range(replicas)), strict=True):
            (model(torch.cat(parts)) / MB).backward()
        optimizer.step()
        if step == 0:
            with torch.no_grad():
                [model(ids) for ids in evaluated]
    return dict(model.named_parameters())


def check(found, kind, evaluated=()):
    for name, value in plain(kind, evaluated=evaluated).items():
        torch.testing.assert_close(whole(found[name].detach()), value.detach(), rtol=1e-5, atol=1e-6)


@smp.step
def train_step(model, ids):
    loss = model(ids)
    model.backward(loss)
    return loss


@smp.step
def evaluate(model, ids):
    return model(ids)


def train_v1(kind, config, evaluated=()):
    """Evaluation is after the first step, of ids that this replica alone evaluates."""
    smp.init({"microbatches": MB, "ddp": True, **config})
    try:
        model = smp.DistributedModel(Table(kind))
        rate = 0.002 if config.get("bf16") else 0.1
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=rate))
        replica = smp.dp_rank() if config.get("tensor_parallel_degree") else smp.rdp_rank()
        for step in range(STEPS):
            optimizer.zero_grad()
            train_step(model, data(step, replica))
            optimizer.step()
            if step == 0 and evaluated:
                evaluate(model, evaluated[replica])
        state = model.state_dict()
    finally:
        smp.shutdown()
    return state


def v1(rank, folder, kind, config, evaluated=()):
    if state := train_v1(kind, config, evaluated):
        check(state, kind, evaluated)


def refused(rank, folder, kind, config):
    try:
        train_v1(kind, config)
    except (StepError, PeerError) as error:  # of a rank that was still waiting for the other
        return str(error)


SHARDS = {"fully_shard": True}
PARTS = {"sharded_data_parallel_degree": 2, "sdp_gradient_clipping": 0.0, "sdp_param_persistence_threshold": 0}
CASES = [
    ("module", 2, {}),
    ("function", 2, {}),
    ("bag", 2, SHARDS),
    ("module", 2, PARTS),
    ("weights", 2, PARTS),
    ("bag", 2, {"tensor_parallel_degree": 2}),
    ("module", 4, {"pipeline_parallel_degree": 2}),
    ("weights", 4, {"pipeline_parallel_degree": 2, **SHARDS}),
]


@pytest.mark.parametrize(("kind", "world", "config"), CASES)
def test_a_forward_that_writes_trains_as_in_one_process(tmp_path, kind, world, config):
    """Rows that other ranks had looked up were not scaled down. In the last case the copy of a weight that a second stage uses without a
    gradient had none, and stayed behind."""
    assert run_workers(v1, world, tmp_path, kind, config) == [None] * world


def test_rows_that_an_evaluation_looks_up_are_those_of_all_replicas(tmp_path):
    """Of the next step."""
    evaluated = [torch.full((4, 4), 11 - replica) for replica in range(2)]
    assert run_workers(v1, 2, tmp_path, "module", {}, evaluated) == [None] * 2


def in_half_precision(rank, folder, kind):
    whole_ones, parts = (train_v1(kind, {"bf16": True, **config}) for config in ({}, SHARDS))
    for name, value in whole_ones.items():
        torch.testing.assert_close(parts[name], value, rtol=0, atol=0)
    if kind == "module":
        return float(whole_ones["embed.weight"].norm(dim=1).max())
    return float(whole_ones["mid.weight"].abs().max())


@pytest.mark.parametrize(("kind", "limit"), [("module", 1.1), ("clamp", 0.3)])
def test_masters_of_parts_have_what_forward_writes(tmp_path, kind, limit):
    """They overwrote it in the update."""
    for found in run_workers(in_half_precision, 2, tmp_path, kind):
        assert found < limit


@pytest.mark.parametrize("config", [{}, SHARDS, PARTS], ids=["replicas", "shards", "parts"])
@pytest.mark.parametrize("kind", ["samples", "samples, unseen"])
def test_what_depends_on_a_ranks_samples_is_refused(tmp_path, kind, config):
    """Replicas had other models, and parts were those of other wholes."""
    for text in run_workers(refused, 2, tmp_path, kind, config):
        assert "code" in text
        assert "own samples" in text


def test_replicas_agree_on_what_they_compare_in_their_first_step(tmp_path):
    for text in run_workers(refused, 2, tmp_path, "later", {}):
        assert "forward writes into code, and did not in the first training step" in text


class Tied(Table):
    """The table is the head's, too: by a second name, or by a call of it."""

    def __init__(self, kind):
        super().__init__("module")
        self.embed = nn.Embedding(60, 6, max_norm=1.0)
        self.by_call = kind == "call"
        self.head = nn.Linear(6, 60, bias=False)
        if not self.by_call:
            self.head.weight = self.embed.weight

    def forward(self, ids):
        x = torch.tanh(self.mid(self.embed(ids)))
        return (F.linear(x, self.embed.weight) if self.by_call else self.head(x)).square().mean()


def refused_tied(rank, folder, kind, config):
    smp.init({"microbatches": MB, "ddp": True, **config})
    model = smp.DistributedModel(Tied(kind))
    try:
        train_step(model, data(0, rank))
    except (StepError, PeerError) as error:
        return str(error)
    finally:
        smp.shutdown()


@pytest.mark.parametrize(("kind", "config"), [("name", {}), ("name", SHARDS), ("call", {}), ("call", SHARDS)])
def test_a_table_that_is_used_otherwise_is_refused(tmp_path, kind, config):
    """Each rank used rows in the head that others had scaled down before theirs."""
    for text in run_workers(refused_tied, 2, tmp_path, kind, config):
        assert "embed.weight: expected a table with max_norm to be used for lookups alone" in text


def divided(rank, folder, kind):
    """`smpc.sharding` without a script's steps."""
    model, mesh = Table(kind), init_device_mesh("cpu", (2,))
    shard(model, ["embed", "head", ""], mesh, ShardingOptions(Keep.NEVER))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        for ids in data(step, rank).chunk(MB):
            (model(ids) / MB).backward()
        if kind == "samples":
            with pytest.raises(StepError, match="expected forward to write the same into code on all ranks"):
                optimizer.step()
            return
        optimizer.step()
    check(dict(model.named_parameters()), kind)


@pytest.mark.parametrize("kind", ["module", "weights", "samples"])
def test_parts_keep_what_forward_writes(tmp_path, kind):
    """It was written into whole parameters, which were dropped."""
    assert run_workers(divided, 2, tmp_path, kind) == [None] * 2


class Composed(ComposerModel):
    def __init__(self, kind):
        super().__init__()
        self.net = Table(kind)

    def forward(self, batch):
        return self.net(batch)

    def loss(self, outputs, batch):
        return outputs


def composed(rank, folder, kind, options):
    model = Composed(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [data(step, rank) for step in range(STEPS)]
    trainer = Trainer(model=model, train_dataloader=batches, max_duration=f"{STEPS}ba", optimizers=optimizer, **options)
    if kind == "samples":
        with pytest.raises(StepError, match="own samples"):
            trainer.fit()
    else:
        trainer.fit()
        check(dict(model.net.named_parameters()), kind)


BY_TWO = {"device_train_microbatch_size": 2}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("module", BY_TWO),
        ("samples", BY_TWO),
        ("module", BY_TWO | {"fsdp_config": {"sharding_strategy": "FULL_SHARD"}}),
    ],
)
def test_the_trainer_keeps_what_forward_writes(tmp_path, kind, options):
    assert run_workers(composed, 2, tmp_path, kind, options) == [None] * 2
