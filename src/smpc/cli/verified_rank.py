"""A rank of `smpc compile --verify` where ranks share operations: `python -m smpc.cli.verified_rank FOLDER`, started by a launcher.

It trains one step of the target as a script does, with `smpc.v1`, and rank 0 writes what came of it. The optimizer is SGD at a rate beside
which the old values vanish: what a parameter has moved, over the rate, is its gradient, wherever its parts are.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import smpc.v1 as smp
from smpc.cli.target import load_target, parse_inputs
from smpc.sample_inputs import Inputs, as_inputs
from smpc.tracer import flatten
from smpc.verification.runs import objective

RATE = 2.0**20


def run_rank(folder: Path) -> None:
    """One step with what `smpc.cli.verify_ranks` has written to the folder."""
    job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    values = torch.load(folder / "values.pt", weights_only=True)
    smp.init(job["config"])
    module, sample = load_target(job["target"], parse_inputs(job["inputs"]), real=True)
    if job["dtype"]:
        module.to(getattr(torch, job["dtype"]))
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        tensor.data.copy_(values["state"][name])
    args, kwargs = _moved_on(as_inputs(sample), values["inputs"], smp.data_rank(), job["config"]["microbatches"])
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=RATE))

    @smp.step
    def step(model: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = objective(model(*args, **kwargs))
        model.backward(loss)
        return loss.detach()

    loss = step(model, *args, **kwargs).reduce_mean()
    optimizer.step()
    state = model.state_dict()
    if smp.rank() == 0:
        torch.save({"state": dict(state), "loss": loss}, folder / "found.pt")
    smp.shutdown()


def state_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and buffer by its first name."""
    return {name: tensor.detach() for name, tensor in (*module.named_parameters(), *module.named_buffers())}


def _moved_on(sample: Inputs, tensors: list[torch.Tensor], number: int, num_microbatches: int) -> Inputs:
    """The inputs with these tensors, their rows moved on by `number` microbatches: replicas have other samples at the same time."""
    leaves, structure = flatten(sample)
    given = iter(tensors)
    moved = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            leaf = next(given)
            leaf = leaf.roll(-number * (len(leaf) // num_microbatches), 0) if leaf.dim() else leaf
        moved.append(leaf)
    args, kwargs = structure.unflatten(moved)
    return args, kwargs


if __name__ == "__main__":
    run_rank(Path(sys.argv[1]))
