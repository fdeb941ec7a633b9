"""torch.compile in a pipeline: what was compiled runs compiled, on every rank, and gives one process's bits.

A recording met the compiled module under a mode, and torch never compiled it again: stages called it, and it ran uncompiled.
"""

import warnings

import pytest
import torch
from executor_harness import run_workers
from torch import nn

import smpc.v1 as smp
from smpc.errors import UsageError

MB, STEPS, WIDTH = 2, 2, 8
runs = []  # one entry for each run of a compiled graph


def counting(graph, _inputs):
    """A backend of torch.compile that changes no bit, and counts."""

    def run(*args):
        runs.append(len(args))
        return graph(*args)

    return run


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Sequential(Block(), Block()), nn.Linear(WIDTH, 1)
        self.trunk = nn.Sequential(Block(), Block(), Block(), Block())

    def forward(self, x):
        return self.head(self.trunk(self.first(x)))


def make(kind):
    torch.manual_seed(0)
    net = Net()
    for blocks in (net.first, net.trunk) if kind.startswith("blocks") else ():
        for i in range(len(blocks)):
            if kind == "blocks in place":
                blocks[i].compile(backend=counting)
            else:
                blocks[i] = torch.compile(blocks[i], backend=counting)
    if kind == "model":
        return torch.compile(net, backend=counting)
    if kind == "model in place":
        net.compile(backend=counting)
    if kind == "cut":
        net.trunk.compile(backend=counting)
    return net


@smp.step
def train_step(model, x):
    loss = model(x).square().mean()
    model.backward(loss)
    return loss


def data(step):
    return torch.randn(2 * MB, WIDTH, generator=torch.Generator().manual_seed(step))


def train(rank, folder, kind, config):
    smp.init({"pipeline_parallel_degree": 2, "microbatches": MB, **config})
    model = smp.DistributedModel(make(kind))
    if kind == "distributed model":
        model.compile(backend=counting)
    losses = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(STEPS):
            losses.append(train_step(model, data(step)).outputs)
    texts = [str(w.message) for w in caught if "torch.compile" in str(w.message)]
    grads = {name.replace("_orig_mod.", ""): p.grad for name, p in model.local_named_parameters()}
    if smp.pp_size() > 1:
        with pytest.raises(UsageError, match=r"model\.compile: the stages are made in the first step"):
            model.compile()
    return losses, grads, len(runs), texts


def reference(kind):
    """Losses and gradients in plain PyTorch, compiled in the same way."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch.compile itself
        return _reference(kind)


def _reference(kind):
    net = make(kind)
    losses = []
    for step in range(STEPS):
        losses.append([])
        for part in data(step).chunk(MB):
            loss = net(part).square().mean()
            (loss / MB).backward()
            losses[-1].append(loss.detach())
    return losses, {name.replace("_orig_mod.", ""): p.grad for name, p in net.named_parameters()}


CASES = [  # kind, configuration, runs of compiled graphs by rank
    ("blocks in place", {}, "blocks"),
    ("blocks", {}, "blocks"),
    ("model", {}, "stages"),
    ("model in place", {"schedule": "gpipe"}, "stages"),
    ("distributed model", {}, "stages"),
    ("cut", {}, "none"),
    ("blocks", {"schedule": "zb-h1"}, "later"),  # splitting these small backwards is given up after a step
    ("model", {"schedule": "zb-h1"}, "none"),
]


@pytest.mark.long
@pytest.mark.matrix(2)
@pytest.mark.parametrize(("kind", "config", "compiled"), CASES)
def test_compiled_modules_run_compiled(tmp_path, kind, config, compiled):
    expected, grads = reference(kind)
    results = run_workers(train, 2, tmp_path, kind, config)
    for losses, found, _, _ in results:
        assert losses == expected
        assert all(torch.equal(found[name], grads[name]) for name in found)
    counts = [count for _, _, count, _ in results]
    assert (
        sum(counts)
        == {
            "blocks": 6 * MB * STEPS,
            "stages": 2 * MB * STEPS,
            "later": 6 * MB * (STEPS - 1),
            "none": 0,
        }[compiled]
    )
    assert compiled == "none" or all(counts)
    texts = [text for *_, found in results for text in found]
    if compiled in ("blocks", "stages"):
        assert not texts
    elif kind == "cut":
        assert any(
            "torch.compile has no effect on 'trunk': the cut separates what is inside, so stage" in text
            for text in texts
        )
    else:
        assert all("the schedule splits backwards, which compiled code does not" in text for text in texts)
        assert len(texts) == 2


@smp.step
def whole_step(model, x):
    loss = model(x).square().mean()
    model.backward(loss)
    return loss


def alone(rank, folder):
    smp.init({"pipeline_parallel_degree": 1, "microbatches": MB})
    model = smp.DistributedModel(make("none"))
    wrapped = torch.compile(model, backend=counting)
    with pytest.raises(UsageError, match=r"torch.compile\(DistributedModel\) would compile nothing"):
        whole_step(wrapped, data(0))
    model.compile(backend=counting)
    whole_step(model, data(0))
    assert len(runs) == MB


def test_without_a_pipeline(tmp_path):
    assert run_workers(alone, 1, tmp_path) == [None] * 1
