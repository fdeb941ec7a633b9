"""Random numbers of pipelines whose ranks are seeded alike, as scripts do it: stages draw others than each other, and the same when a
backward computes them again."""

import itertools

import pytest
import torch
from executor_harness import run_workers
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import smpc.v1 as smp

WIDTH, LAYERS, MB, STEPS, SEED = 32, 4, 2, 2, 3


class Drops(nn.Module):
    """Linear in its weight: the loss is the gradient times the weight, if a backward has the forward's mask."""

    def __init__(self, recomputes):
        super().__init__()
        self.weight, self.recomputes = nn.Parameter(torch.full((WIDTH,), 0.5)), recomputes

    def _masked(self, x):
        return F.dropout(torch.ones_like(x) * self.weight, 0.5, self.training)

    def forward(self, x):
        return checkpoint(self._masked, x, use_reentrant=False) if self.recomputes else self._masked(x)


class Layers(nn.Module):
    """Gives what each layer has dropped, and the sum of all."""

    def __init__(self, draws=range(LAYERS), recomputes=False):
        super().__init__()
        self.first = nn.Parameter(torch.ones(WIDTH))
        self.layers = nn.ModuleList(Drops(recomputes) for _ in range(LAYERS))
        for number, layer in enumerate(self.layers):
            layer.train(number in draws)

    def forward(self, x):
        x, found = x * self.first, []
        for layer in self.layers:
            found.append(layer(x))
            x = x + found[-1]
        return x, torch.stack(found, 1)


@smp.step
def masks_of(model, x, has_own):
    _, found = model(x)
    model.backward(found.sum())
    own = F.dropout(torch.ones(1, WIDTH), 0.5 if has_own else 0.0) != 0
    return found.sum(), found.detach() != 0, own


def seen(rank, folder, config, draws, recomputes):
    smp.init(
        {"pipeline_parallel_degree": 2, "microbatches": MB, "auto_partition": False, "default_partition": 0, **config}
    )
    module = Layers(draws, recomputes)
    for layer in module.layers[LAYERS // 2 :]:
        smp.set_partition(layer, 1)
    model = smp.DistributedModel(module)
    torch.manual_seed(SEED)
    found = []
    for _ in range(STEPS):
        model.zero_grad()
        loss, masks, own = masks_of(model, torch.ones(MB, WIDTH), len(draws) > 1)
        weights = {name: p for name, p in model.local_named_parameters() if name.endswith("weight")}
        products = [(p.grad * p).sum() for p in weights.values()]
        found.append((masks.concat(), own.concat(), loss.reduce_mean(), sum(products)))
    smp.shutdown()
    return found


def in_one_process(draws):
    module = Layers(draws)
    torch.manual_seed(SEED)
    return [[torch.cat([module(torch.ones(1, WIDTH))[1] != 0 for _ in range(MB)])] for _ in range(STEPS)]


@pytest.mark.parametrize(("config", "recomputes"), [({}, False), ({"schedule": "zb-h1"}, True)])
def test_no_two_layers_drop_the_same_elements(tmp_path, config, recomputes):
    """The second stage's layers had the masks of the first stage's: both ranks began from one seed."""
    first, last = run_workers(seen, 2, tmp_path, config, range(LAYERS), recomputes)
    masks = [mask for step, *_ in first for sample in step for mask in sample]
    inside = [mask[1:-1] for mask in masks]
    own = [mask for (step,) in in_one_process(range(LAYERS)) for sample in step for mask in sample]
    assert len(masks) == len(own) == STEPS * MB * LAYERS
    for those in (masks, own):
        assert not any(torch.equal(a, b) for a, b in itertools.combinations(those, 2))
    for step in (
        own[sample] for _, own, *_ in last for sample in range(MB)
    ):  # what the step function has drawn after the model
        windows = step.unfold(0, WIDTH - 2, 1)
        assert not any(torch.equal(window, mask) for window in windows for mask in inside)
    for (*_, loss, one), (*_, other) in zip(first, last, strict=True):
        torch.testing.assert_close(one + other, loss.detach())


@pytest.mark.parametrize("layer", [0, LAYERS - 1])
def test_one_stage_that_draws_draws_as_one_process(tmp_path, layer):
    for found in run_workers(seen, 2, tmp_path, {}, (layer,), False):
        for (masks, *_), (expected,) in zip(found, in_one_process((layer,)), strict=True):
            assert torch.equal(masks, expected)
