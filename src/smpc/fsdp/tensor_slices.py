"""Tensor parallelism beside FSDP: layers that a plan names are sliced over groups of ranks, by torch's `parallelize_module`.

    {"tensor_parallel_degree": 2, "layer_plan": {"model.blocks.*.up": ColwiseParallel(), "model.blocks.*.down": RowwiseParallel()}}

    rank                       0  1  2  3
    the slices of a group      0  1  0  1      ranks that follow one another; they train on the same samples
    data parallel              0  0  1  1      what FSDP shards over, and gradients are averaged over

Parameters that the plan leaves alone are whole in the group, and must have equal gradients on its ranks: a plan that slices what they
compute on, and does not name them, is an error in the first step (`check_gradients`).
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from smpc import dist
from smpc.dist.rank_and_size import known_local_size
from smpc.errors import ConfigError, ConfigTypeError, ConfigUnsupportedError, StepError
from smpc.fsdp.config import FSDPConfig
from smpc.sharding.dtensors import local

AXIS = "tensor"
_TOLERANCE = 1e-3  # of norms: what other orders of summation may change, and parts of a sum do not fall below


@dataclass(frozen=True, slots=True)
class TensorConfig:
    """The fields of `parallelism_config["tp"]`; `read` makes one from a dictionary.

    `tensor_parallel_degree`: ranks in a group. `layer_plan`: by name or pattern of a module, a style of
    torch.distributed.tensor.parallel.
    """

    tensor_parallel_degree: int = 1
    layer_plan: Any = None

    @classmethod
    def read(cls, given: object) -> TensorConfig:
        """Check a dictionary. Raises ConfigError or ConfigTypeError."""
        if not isinstance(given, Mapping):
            raise ConfigTypeError(f"tp: expected a dict, found {given!r}")
        unknown = [name for name in given if name not in ("tensor_parallel_degree", "layer_plan")]
        if unknown:
            raise ConfigError(
                f"tp: expected tensor_parallel_degree and layer_plan, found {', '.join(map(repr, unknown))}"
            )
        degree, plan = given.get("tensor_parallel_degree", 1), given.get("layer_plan")
        if isinstance(degree, bool) or not isinstance(degree, int):
            raise ConfigTypeError(f"tp: tensor_parallel_degree: expected a whole number, found {degree!r}")
        if degree < 1:
            raise ConfigError(f"tp: tensor_parallel_degree: expected at least 1, found {degree}")
        if plan is not None and not isinstance(plan, Mapping):
            raise ConfigTypeError(f"tp: layer_plan: expected a dict of names and styles, found {plan!r}")
        for name, style in (plan or {}).items():
            if not isinstance(name, str) or not isinstance(style, ParallelStyle):
                raise ConfigTypeError(
                    f"tp: layer_plan[{name!r}]: expected a style of torch.distributed.tensor.parallel, found {style!r}"
                )
        if degree > 1 and not plan:
            raise ConfigError(
                f"tp: layer_plan: expected layers to slice beside tensor_parallel_degree {degree}, found none"
            )
        return cls(degree, plan)


def data_sizes(slices: int) -> tuple[int, int]:
    """How many ranks FSDP is over, in all and on a node, where so many slice layers together. Raises ConfigError if it does not divide."""
    world_size, local_size = dist.get_world_size(), known_local_size()
    if world_size % slices or (local_size % slices and slices % local_size):
        raise ConfigError(
            f"tp: tensor_parallel_degree: expected a divisor of the {world_size} processes, and of the {local_size} on a node, found "
            f"{slices}"
        )
    return world_size // slices, max(local_size // slices, 1)


def check_beside(config: FSDPConfig) -> None:
    """Raise ConfigUnsupportedError for settings that do not combine with slices."""
    if not config.auto_wrap:
        raise ConfigUnsupportedError(
            "fsdp_config: auto_wrap: False is not supported beside tp; slice and shard the model in the script"
        )


def slice_layers(model: nn.Module, config: TensorConfig, mesh: DeviceMesh) -> None:
    """Slice the layers of a plan over the axis `tensor` of a mesh, in place. All ranks must have equal parameters. Collective.

    Raises ConfigError for names of the plan that no module has; ConfigUnsupportedError for a parameter of several modules of which the
    plan names some: they would not share it any more.
    """
    names = [name for name, _ in model.named_modules()]
    strangers = [
        pattern for pattern in config.layer_plan if not any(_fits_sliced_layer(name, pattern) for name in names)
    ]
    if strangers:
        raise ConfigError(
            f"tp: layer_plan: expected names of modules, found {', '.join(map(repr, strangers))}, which none has"
        )
    shared: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        shared.setdefault(parameter, []).append(name)
    parallelize_module(model, mesh[AXIS], dict(config.layer_plan))
    after = dict(model.named_parameters(remove_duplicate=False))
    parted = [" and ".join(each) for each in shared.values() if len({id(after[name]) for name in each}) > 1]
    if parted:
        raise ConfigUnsupportedError(
            f"tp: layer_plan: {'; '.join(parted)} are one parameter, which the plan would part; leave them out of it"
        )


def _fits_sliced_layer(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatch.fnmatch, parts, wanted))


@torch.no_grad()
def check_gradients(model: nn.Module, mesh: DeviceMesh) -> None:
    """Raise StepError unless what is whole in a group has equal gradients on all of its ranks. Collective."""
    found = [(name, p.grad) for name, p in model.named_parameters() if p.grad is not None and not _is_sliced(p)]
    if not found:
        return
    own = torch.stack([local(grad).double().norm() for _, grad in found])
    norms = torch.stack(dist.all_gather(own, mesh[AXIS].get_group()))
    apart = (norms.amax(0) - norms.amin(0)) > _TOLERANCE * norms.amax(0)
    wrong = [name for (name, _), is_wrong in zip(found, apart.tolist(), strict=True) if is_wrong]
    if wrong:
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise StepError(
            f"tp: expected equal gradients on all ranks that slice layers together, found different ones of {', '.join(wrong[:5])}{more}: "
            "the layer_plan slices what these parameters compute on; name their modules in it, as SequenceParallel(), say"
        )


def _is_sliced(parameter: Tensor) -> bool:
    return isinstance(parameter, DTensor) and AXIS in (parameter.device_mesh.mesh_dim_names or ())
