"""A rank of `smpc compile --verify` where ranks share operations: `python -m smpc.cli.verify.rank FOLDER`, started by a launcher.

It trains one step of the target as a script does, with `smpc.v1`, and rank 0 writes what came of it. Before the optimizer, which is SGD
at a rate of 1, parameters become zeros: afterwards they are their gradients, with the other sign, wherever their parts are.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

import smpc.v1 as smp
from smpc.cli.model_target import load_target, parse_inputs
from smpc.errors import ConfigError
from smpc.sample_inputs import Inputs, as_inputs
from smpc.tracer import flatten
from smpc.verification.paired_runs import objective


def run_rank(folder: Path) -> None:
    """One step with what `smpc.cli.verify.ranks` has written to the folder."""
    job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    values = torch.load(folder / "values.pt", weights_only=True)
    smp.init(job["config"])
    module, sample = load_target(job["target"], parse_inputs(job["inputs"]), real=True)
    if job["dtype"]:
        module.to(getattr(torch, job["dtype"]))
    _take_verified_values(module, values["state"])
    args, kwargs = _moved_on(as_inputs(sample), values["inputs"], smp.data_rank(), job["config"]["microbatches"])
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))

    @smp.step
    def step(model: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = objective(model(*args, **kwargs))
        model.backward(loss)
        return loss.detach()

    loss = step(model, *args, **kwargs).reduce_mean()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.zero_()
    optimizer.step()
    state = model.state_dict()
    if smp.rank() == 0:
        torch.save({"state": dict(state), "loss": loss}, folder / "found.pt")
    smp.shutdown()


def verified_state_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and buffer by its first name."""
    return {name: tensor.detach() for name, tensor in (*module.named_parameters(), *module.named_buffers())}


def _take_verified_values(module: nn.Module, values: Mapping[str, torch.Tensor]) -> None:
    """Give a module these parameters and buffers. Raises ConfigError for a module that has others."""
    own = verified_state_of(module)
    found, wanted = ({name: tuple(tensor.shape) for name, tensor in state.items()} for state in (own, values))
    name = next((name for name in {**wanted, **found} if found.get(name) != wanted.get(name)), None)
    if name is not None:
        raise ConfigError(
            f"--verify: expected a factory that makes the same model in every process, found that {name} is "
            f"{found.get(name, 'missing')} on a rank and {wanted.get(name, 'missing')} in the command"
        )
    for key, tensor in own.items():
        tensor.copy_(values[key])


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
