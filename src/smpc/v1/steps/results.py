"""Return values of a step function: from one for each microbatch to one for the step, and from the last rank to all.

    returned in microbatches 0, 1     {"loss": tensor, "n": 3, "extra": None}, {"loss": tensor, "n": 4, "extra": None}
    returned by the step              {"loss": StepOutput of both, "n": [3, 4], "extra": None}

Terms
    form      structure of the return value, specs of its tensors in every microbatch, other leaves as they are: all but the tensors
    payload   the tensors' bytes one after another, larger elements first, so that each begins where its dtype allows
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from smpc.errors import StepError
from smpc.tracer.ir import TensorSpec
from smpc.tracer.structure import Structure, flatten
from smpc.v1.steps.step_output import StepOutput


@dataclass(frozen=True, slots=True)
class ResultForm:
    """Everything about a step's results but the tensors. `leaves[i]`: specs or values of leaf i in every microbatch."""

    structure: Structure
    leaves: tuple[tuple[Any, ...], ...]
    is_tensor: tuple[bool, ...]

    def build(self, tensors: Sequence[Tensor]) -> Any:
        """The step's return value; tensors in order of leaves, then microbatches."""
        remaining = iter(tensors)
        leaves: list[Any] = []
        for values, is_tensor in zip(self.leaves, self.is_tensor, strict=True):
            if is_tensor:
                leaves.append(StepOutput([next(remaining) for _ in values]))
            else:
                leaves.append(None if all(value is None for value in values) else list(values))
        return self.structure.unflatten(leaves)

    @property
    def specs(self) -> list[TensorSpec]:
        """Specs of all tensors, in the order of `build`."""
        return [
            spec for values, is_tensor in zip(self.leaves, self.is_tensor, strict=True) if is_tensor for spec in values
        ]

    @property
    def num_bytes(self) -> int:
        """Size of the payload."""
        return sum(spec.num_bytes for spec in self.specs)


def read_results(values: Sequence[Any], step_name: str) -> tuple[ResultForm, list[Tensor]]:
    """The form and the tensors of what the microbatches returned.

    Raises StepError unless all of them returned the same structure.
    """
    flat = [flatten(value) for value in values]
    structure = flat[0][1]
    kinds = [[isinstance(leaf, Tensor) for leaf in leaves] for leaves, _ in flat]
    for index, (_, other) in enumerate(flat):
        if other != structure or kinds[index] != kinds[0]:
            raise StepError(
                f"step function {step_name} must return the same structure in every microbatch, found "
                f"{_tensor_paths(structure, kinds[0])} in microbatch 0 and {_tensor_paths(other, kinds[index])} in {index}"
            )
    columns = list(zip(*(leaves for leaves, _ in flat), strict=True))
    tensors = [leaf for column, is_tensor in zip(columns, kinds[0], strict=True) if is_tensor for leaf in column]
    leaves = tuple(
        tuple(TensorSpec.of(leaf.detach()) for leaf in column) if is_tensor else column
        for column, is_tensor in zip(columns, kinds[0], strict=True)
    )
    return ResultForm(structure, leaves, tuple(kinds[0])), tensors


def pack(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """The payload of tensors: flat uint8."""
    order = _order([tensor.dtype for tensor in tensors])
    parts = [tensors[i].detach().reshape(-1).to(device).view(torch.uint8) for i in order if tensors[i].numel()]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8, device=device)


def unpack(payload: Tensor, specs: Sequence[TensorSpec]) -> list[Tensor]:
    """The tensors in a payload, contiguous."""
    found: dict[int, Tensor] = {}
    position = 0
    for i in _order([spec.torch_dtype for spec in specs]):
        spec = specs[i]
        part = payload[position : position + spec.num_bytes]
        found[i] = part.view(spec.torch_dtype).view(spec.shape)
        position += spec.num_bytes
    return [found[i] for i in range(len(specs))]


def _order(dtypes: Sequence[torch.dtype]) -> list[int]:
    return sorted(range(len(dtypes)), key=lambda i: -dtypes[i].itemsize)


def _tensor_paths(structure: Structure, kinds: Sequence[bool]) -> str:
    paths = [
        f"{'tensor' if is_tensor else 'value'} {path or 'itself'}"
        for path, is_tensor in zip(structure.paths(), kinds, strict=True)
    ]
    return f"{structure.kind} of [{', '.join(paths)}]"
