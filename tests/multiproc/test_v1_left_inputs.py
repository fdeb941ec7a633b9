"""Forwards that change the model's inputs, tensors or containers: losses, later steps and the script's own batches see what one process
sees.
"""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from executor_harness import run_workers
from torch import nn

import smpc.tensor_parallel
import smpc.v1 as smp
from smpc.errors import SmpcError
from smpc.nn.parallel import TensorGroup

WIDTH, ROWS, MB, RATE = 8, 8, 2, 0.1
PIPELINE = {"pipeline_parallel_degree": 2, "microbatches": MB}
TENSORS = {
    "tensor_parallel_degree": 2,
    "tensor_parallel_plan": "auto",
    "prescaled_batch": True,
    "ddp": True,
    "microbatches": MB,
}
SEQUENCES = {"context_parallel_degree": 2, "ddp": True, "microbatches": MB}


class Writes(nn.Module):
    """Attends over (batch, sequence, width). `kind`: what forward writes into, and how."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.qkv, self.out, self.head = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.shift = nn.Parameter(torch.linspace(0, 1, WIDTH))

    def forward(self, x, weights):
        if self.kind == "all":
            x.mul_(2)
        elif self.kind in ("a view", "a view, returned"):
            x[..., 1:3].add_(1)
        elif self.kind == "history":
            x.add_(self.shift)
        elif self.kind == "data":
            x.data.clamp_(-0.5, 0.5)
        elif self.kind == "a mask":
            x[x < 0] = 0.25
        elif self.kind == "weights":
            weights.mul_(weights > 0.2)
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
        y = self.head(torch.tanh(self.out(y)))
        return (y, x) if self.kind.endswith("returned") else y


def loss_of(model, batch):
    out = model(batch["x"], weights=batch["weights"])
    out, seen = out if isinstance(out, tuple) else (out, 0 * out)
    return ((out - batch["x"]).square() * batch["weights"]).mean() + (seen * out.detach()).mean()


@smp.step
def train(model, batch):
    loss = loss_of(model, batch)
    model.backward(loss)
    return loss


def data():
    make = torch.Generator().manual_seed(1)
    return tuple(torch.rand(2 * ROWS, 4, WIDTH, generator=make, dtype=torch.float64) - least for least in (0.5, 0.0))


def batches(inputs, weights):
    """Two epochs over a dataset in memory: the second sees what the first has written."""
    for _ in range(2):
        for first in range(0, len(inputs), ROWS):
            part = slice(first, first + ROWS)
            yield {"x": inputs[part], "weights": weights[part]}


def plain(kind):
    model, held = Writes(kind).double(), data()
    optimizer, losses = torch.optim.SGD(model.parameters(), RATE), []
    for batch in batches(*held):
        pieces = []
        for index in range(MB):
            own = {name: each.chunk(MB)[index].clone() for name, each in batch.items()}
            piece = loss_of(model, own)
            (piece / MB).backward()
            pieces.append(piece.item())
            with torch.no_grad():
                for name, each in batch.items():
                    each.chunk(MB)[index].copy_(own[name])
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(pieces) / MB)
    return losses, model.state_dict(), held


def parallel(rank, folder, config, kinds):
    for kind in kinds:
        expected, weights, written = plain(kind)
        smp.init(config)
        held = data()
        model = smp.DistributedModel(Writes(kind).double())
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), RATE))
        losses = []
        for batch in batches(*held):
            losses.append(train(model, batch).item())
            optimizer.step()
            optimizer.zero_grad()
        assert losses == pytest.approx(expected, rel=1e-12), kind
        for name, value in model.state_dict().items():
            torch.testing.assert_close(value, weights[name], rtol=1e-10, atol=1e-12, msg=f"{kind}: {name}")
        for mine, theirs in zip(held, written, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12, msg=kind)
            assert not mine.requires_grad
        smp.shutdown()


KINDS = ("all", "a view", "a view, returned", "history", "data", "a mask", "weights")


@pytest.mark.long
@pytest.mark.parametrize(
    ("config", "ranks"),
    [
        (PIPELINE, 2),
        (TENSORS, 2),
        (SEQUENCES, 2),
        pytest.param({**PIPELINE, **TENSORS, "placement_strategy": "cluster"}, 4, marks=pytest.mark.slow),
        pytest.param({**PIPELINE, "pipeline_parallel_degree": 3}, 3, marks=pytest.mark.slow),
    ],
)
def test_losses_and_batches_are_those_of_one_process(tmp_path, config, ranks):
    run_workers(parallel, ranks, tmp_path, config, KINDS)


class Aux:
    """Holds a tensor, and what forward adds."""

    def __init__(self, x):
        self.x, self.more = x, {}


class Collects(nn.Module):
    """Puts what its loss needs into a container of its inputs."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, into):
        h = torch.tanh(self.first(x))
        if self.kind == "a list":
            into.append(h.square().mean())
            into.append(0.5)
        elif self.kind == "an entry":
            into["x"] = into["x"] * 2 + h
        elif self.kind == "a new entry":
            into["seen"] = {"h": [h], "n": into.pop("n") + 1}
        elif self.kind == "an entry less":
            into.pop("x")
        elif self.kind == "an attribute":
            into.more["h"], into.x = h, into.x + 1
        return self.last(h)


def given(kind, x):
    if kind == "a list":
        return []
    return Aux(x * 1) if kind == "an attribute" else {"x": x * 1, "n": 1, "rest": [3]}


def used(kind, into):
    if kind == "a list":
        return sum(into)
    if kind == "an entry":
        return into["x"].square().mean() + into["rest"][0]
    if kind == "a new entry":
        return into["seen"]["h"][0].square().mean() * into["seen"]["n"] + len(into)
    return len(into) if kind == "an entry less" else (into.more["h"] * into.x).mean()


def collecting_loss(model, x, kind):
    into = given(kind, x)
    alias = into
    loss = (model(x, into) - x).square().mean()
    return loss + used(kind, alias)


@smp.step
def train_collecting(model, x, kind):
    loss = collecting_loss(model, x, kind)
    model.backward(loss)
    return loss


@smp.step
def train_into(model, x, into):
    loss = model(x, into).square().mean()
    model.backward(loss)
    return loss


def collecting(rank, folder, config, kinds):
    x = data()[0][:ROWS]
    for kind in kinds:
        plain_model = Collects(kind).double()
        optimizer = torch.optim.SGD(plain_model.parameters(), RATE)
        smp.init(config)
        model = smp.DistributedModel(Collects(kind).double())
        own = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), RATE))
        for _ in range(3):
            losses = [collecting_loss(plain_model, part, kind) for part in x.chunk(MB)]
            (sum(losses) / MB).backward()
            assert train_collecting(model, x, kind).item() == pytest.approx(sum(losses).item() / MB, rel=1e-12), kind
            for each in (optimizer, own):
                each.step()
                each.zero_grad()
        for name, value in model.state_dict().items():
            expected = plain_model.state_dict()[name]
            torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-12, msg=f"{kind}: {name}")
        smp.shutdown()
    smp.init(config)
    model = smp.DistributedModel(Collects("a list").double())
    with pytest.raises(SmpcError, match="make it in the step function, and return what it holds"):
        train_into(
            model, x, []
        )  # of both microbatches, and of scripts that would not see what the last rank has put there
    smp.shutdown()
    smp.init(config)
    batch = {"x": x, "n": 1, "rest": []}
    train_into(
        smp.DistributedModel(Collects("an entry less").double()), x, batch
    )  # microbatches have dicts of their own
    assert list(batch) == ["x", "n", "rest"]
    smp.shutdown()


@pytest.mark.long
@pytest.mark.parametrize("config", [PIPELINE, TENSORS, SEQUENCES])
def test_what_forward_puts_into_containers_is_there(tmp_path, config):
    kinds = ("a list", "an entry", "a new entry", "an entry less", "an attribute")
    run_workers(collecting, 2, tmp_path, config, kinds)


def sharded(rank, folder):
    """The same of a model whose forward runs rewritten, in place."""
    x = data()[0][:ROWS]
    group = TensorGroup.of(dist.group.WORLD)
    for kind in ("a list", "an entry", "a new entry"):
        whole = Collects(kind).double()
        part = smpc.tensor_parallel.shard(Collects(kind).double(), ((x, given(kind, x)), {}), group)
        expected, found = (collecting_loss(model, x, kind) for model in (whole, part))
        assert found.item() == pytest.approx(expected.item(), rel=1e-12)
        expected.backward()
        found.backward()
        torch.testing.assert_close(part.whole_gradients(), {n: p.grad for n, p in whole.named_parameters()})


@pytest.mark.long
def test_a_sharded_model_puts_it_there_too(tmp_path):
    run_workers(sharded, 2, tmp_path)


@smp.step(non_split_inputs=["weights"])
def train_with_one(model, x, weights):
    loss = model(x, weights=weights).square().mean()
    model.backward(loss)
    return loss


@smp.step
def evaluate(model, batch):
    return loss_of(model, batch)


def evaluated(rank, folder):
    """Under inference mode, and with inputs side by side in one tensor."""
    smp.init(PIPELINE)
    model = smp.DistributedModel(Writes("weights").double())
    x, weights = (each[:ROWS] for each in data())
    with torch.inference_mode():
        batch = {"x": x.clone(), "weights": weights.clone()}
        once = evaluate(model, copy.deepcopy(batch)).item()
        assert evaluate(model, batch).item() == once
        assert torch.equal(batch["weights"], weights * (weights > 0.2))
    both = torch.cat([x, weights], -1)
    assert evaluate(model, {"x": both[..., :WIDTH], "weights": both[..., WIDTH:]}).item() == pytest.approx(
        once, rel=1e-12
    )
    smp.shutdown()


@pytest.mark.long
def test_evaluations_write(tmp_path):
    run_workers(evaluated, 2, tmp_path)


def refused(rank, folder, case):
    smp.init(PIPELINE)
    model = smp.DistributedModel(Writes("weights").double())
    x, weights = (each[:ROWS] for each in data())
    before, wide = weights.clone(), torch.cat([x, x], -1)
    if case == "each microbatch":  # would be written into by one after another
        with pytest.raises(SmpcError, match="model input weights: expected a tensor of its own for each microbatch"):
            train_with_one(model, x, weights[: ROWS // MB])
    else:
        other = wide[..., :WIDTH] if case == "the same" else wide[..., 1 : WIDTH + 1]
        with pytest.raises(SmpcError, match="model input weights: expected a tensor with memory of its own"):
            evaluate(model, {"x": wide[..., :WIDTH], "weights": other})
    assert torch.equal(before, weights)
    assert torch.equal(wide, torch.cat([x, x], -1))


@pytest.mark.long
@pytest.mark.parametrize("case", ["each microbatch", "the same", "a part of the same"])
def test_what_is_written_may_not_be_read_elsewhere(tmp_path, case):
    run_workers(refused, 2, tmp_path, case)
