"""The Trainer's replicas, of which DistributedDataParallel averages what trained when it was made: callbacks may change that."""

import os
import warnings

import pytest
import torch
from support.executor_harness import run_workers
from torch import distributed, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from smpc.composer import ComposerModel, Trainer
from smpc.errors import ConfigUnsupportedError, StepError

STEPS = 4


class Model(ComposerModel):
    """Has a layer that `uses` switches on."""

    def __init__(self, uses=True):
        super().__init__()
        torch.manual_seed(0)
        self.model, self.more, self.uses = (
            nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)),
            nn.Linear(4, 3),
            uses,
        )

    def forward(self, batch):
        return self.model(batch[0]) + (self.more(batch[0]) if self.uses else 0)

    def loss(self, outputs, batch):
        return nn.functional.cross_entropy(outputs, batch[1])


def batch(step, rank):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(4, 4, generator=generator), torch.randint(0, 3, (4,), generator=generator)


def freeze(model, step):
    """The first layer trains from the third step on; the last one not in the fourth."""
    model.model[0].requires_grad_(step >= 2)
    model.model[2].requires_grad_(step != 3)


def trained(model, rank, after=lambda state: None, kind=torch.optim.SGD, **options):
    made = Trainer(
        model=model,
        optimizers=kind(model.parameters(), lr=0.5),
        train_dataloader=[batch(step, rank) for step in range(STEPS)],
        max_duration=f"{STEPS}ba",
        callbacks=after,
        device="cpu",
        **options,
    )
    made.fit()


def place(rank):
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(distributed.get_world_size()), "NODE_RANK": "0"}
    warnings.simplefilter("ignore")


def thaws(rank, folder):
    place(rank)
    model = Model()
    freeze(model, 0)
    trained(model, rank, lambda state: freeze(model, state.timestamp.batch))
    return [parameter.tolist() for parameter in model.parameters()]


def test_layers_that_callbacks_freeze_and_unfreeze(tmp_path):
    """Ranks had kept their own gradients of what was unfrozen, and trained different models, without a word."""
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(STEPS):
        freeze(model, step)
        optimizer.zero_grad()
        for rank in range(2):
            (model.loss(model(batch(step, rank)), batch(step, rank)) / 2).backward()
        optimizer.step()
    for found in run_workers(thaws, 2, tmp_path):
        for values, parameter in zip(found, model.parameters(), strict=True):
            torch.testing.assert_close(torch.tensor(values), parameter.detach())


def leaves_out(rank, folder):
    place(rank)
    model = Model(uses=False)
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(StepError, match=r"found more\.weight, more\.bias without a gradient.*'multi_auto_sync'"):
        trained(model, rank)
    return all(map(torch.equal, before, model.parameters()))


def test_parameters_that_nothing_uses_are_told_before_the_update(tmp_path):
    """torch tells in the next batch, once gradients that were not averaged have been used; after the last batch it never did."""
    assert all(run_workers(leaves_out, 2, tmp_path))


class Unheard(torch.optim.SGD):
    """Does what torch says of Adafactor's operations, up to 2.13."""

    def step(self, closure=None):
        raise RuntimeError("aten.pow_.Scalar: no strategy.\n\nSharding propagation failed for aten.pow_.Scalar")


class KeepsRows(torch.optim.SGD):
    """Keeps an average of each row of the gradient in an ordinary tensor, as Adafactor of transformers does."""

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            torch.zeros(parameter.shape[:-1]).add_(parameter.grad.mean(-1))


def updates_parts(rank, folder):
    place(rank)
    model = Model()
    with pytest.raises(
        ConfigUnsupportedError,
        match=r"Unheard: expected an optimizer whose operations torch .* aten.pow_.Scalar: no strategy. .*AdamW",
    ):
        trained(model, rank, kind=Unheard, fsdp_config={})
    with pytest.raises(
        ConfigUnsupportedError, match=r"KeepsRows: expected an optimizer whose .*mixed torch.Tensor and DTensor"
    ):
        trained(Model(), rank, kind=KeepsRows, fsdp_config={})
    with pytest.raises(ConfigUnsupportedError, match="expected one whose step needs no closure, found LBFGS"):
        trained(Model(), rank, kind=torch.optim.LBFGS)
    sliced = {
        "tp": {"tensor_parallel_degree": 2, "layer_plan": {"model.0": ColwiseParallel(), "model.2": RowwiseParallel()}}
    }
    for options in ({"fsdp_config": {}}, {"parallelism_config": sliced}):
        model = Model()
        model.model[0].weight.register_hook(lambda grad: grad * 2)
        with pytest.raises(ConfigUnsupportedError, match=r"0\.weight has a hook on its gradient"):
            trained(model, 0, **options)
    return True


def test_optimizers_and_hooks_that_cannot_be_used_are_named(tmp_path):
    assert all(run_workers(updates_parts, 2, tmp_path))
