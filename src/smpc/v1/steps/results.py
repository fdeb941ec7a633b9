"""Return values of a step function: from one for each microbatch to one for the step, and from the last rank to all.

    returned in microbatches 0, 1     {"loss": tensor, "n": 3, "extra": None}, {"loss": tensor, "n": 4, "extra": None}
    returned by the step              {"loss": StepOutput of both, "n": [3, 4], "extra": None}

Terms
    form      structure of the return value, specs of its tensors in every microbatch, pickles of its other leaves: all but the tensors.
              Equal forms stand for equal values: an object that the step function has changed since has another pickle
    payload   the tensors' bytes one after another, larger elements first, so that each begins where its dtype allows
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from smpc.errors import StepError
from smpc.tracer.ir import TensorSpec
from smpc.tracer.structure import Structure, flatten
from smpc.v1.steps.step_output import StepOutput

_SETS = ("set", "frozenset")


@dataclass(frozen=True, slots=True)
class ResultForm:
    """Everything about a step's results but the tensors. `leaves[i]`: specs or pickles of leaf i in every microbatch."""

    structure: Structure
    leaves: tuple[tuple[TensorSpec | bytes, ...], ...]

    def build(self, tensors: Sequence[Tensor]) -> Any:
        """The step's return value; tensors in order of leaves, then microbatches."""
        remaining = iter(tensors)
        columns = [
            [next(remaining) if isinstance(leaf, TensorSpec) else pickle.loads(leaf) for leaf in column]
            for column in self.leaves
        ]
        return _join(self.structure, columns)

    @property
    def specs(self) -> list[TensorSpec]:
        """Specs of all tensors, in the order of `build`."""
        return [leaf for column in self.leaves for leaf in column if isinstance(leaf, TensorSpec)]

    @property
    def num_bytes(self) -> int:
        """Size of the payload."""
        return sum(spec.num_bytes for spec in self.specs)


@dataclass(frozen=True)
class Results:
    """What the microbatches returned. `columns[i]`: leaf i in every microbatch, tensors in all of them or in none."""

    step_name: str
    structure: Structure
    columns: list[tuple[Any, ...]]

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors, in order of leaves, then microbatches."""
        return [leaf for column in self.columns for leaf in column if isinstance(leaf, Tensor)]

    def join(self, detach: bool) -> Any:
        """The step's return value; `detach`: its tensors lose their history. Raises StepError for a class that does not allow it."""
        columns = [
            [leaf.detach() for leaf in column] if detach and isinstance(column[0], Tensor) else column
            for column in self.columns
        ]
        try:
            return _join(self.structure, columns)
        except Exception as error:  # of the user's classes
            classes = [
                f"{_place(path)} {part.class_name}" for path, part in self.structure.containers() if part.class_name
            ]
            raise StepError(
                f"step function {self.step_name} returned what cannot be put together again from its microbatches, among "
                f"[{', '.join(classes)}] ({type(error).__name__}: {error}); return tensors and values in lists, tuples and dicts, or in "
                "named tuples and dataclasses that a module defines outside of functions, under their own names"
            ) from error

    def form(self) -> ResultForm:
        """What other ranks need to build the return value. Raises StepError for leaves that cannot be sent."""
        wrong: list[str] = []
        leaves = [
            tuple(_describe(leaf, path, wrong) for leaf in column)
            for column, path in zip(self.columns, self.structure.paths(), strict=True)
        ]
        if wrong:
            raise StepError(
                f"step function {self.step_name} returned what cannot be sent to the other pipeline ranks, "
                f"{'; '.join(dict.fromkeys(wrong))}; return tensors and plain values"
            )
        return ResultForm(self.structure, tuple(leaves))


def read_results(values: Sequence[Any], step_name: str) -> Results:
    """What the microbatches returned, leaf by leaf.

    Raises StepError unless all of them returned the same structure, without sets: members of those have no place to be known by.
    """
    flat = [flatten(value) for value in values]
    structure = flat[0][1]
    sets = [f"{_place(path)} a {part.kind}" for path, part in structure.containers() if part.kind in _SETS]
    if sets:
        raise StepError(
            f"step function {step_name}: expected tensors and values in containers with an order, found {', '.join(sets)}; members of a "
            "set in one microbatch cannot be told from those in another: return a list, a tuple or a dict in its place"
        )
    kinds = [[isinstance(leaf, Tensor) for leaf in leaves] for leaves, _ in flat]
    for index, (_, other) in enumerate(flat):
        if other != structure or kinds[index] != kinds[0]:
            raise StepError(
                f"step function {step_name} must return the same structure in every microbatch, found "
                f"{_tensor_paths(structure, kinds[0])} in microbatch 0 and {_tensor_paths(other, kinds[index])} in {index}"
            )
    return Results(step_name, structure, list(zip(*(leaves for leaves, _ in flat), strict=True)))


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


def _join(structure: Structure, columns: Sequence[Sequence[Any]]) -> Any:
    """The step's return value out of its leaves in every microbatch."""
    leaves: list[Any] = []
    for column in columns:
        if isinstance(column[0], Tensor):
            leaves.append(StepOutput(column))
        else:
            leaves.append(None if all(value is None for value in column) else list(column))
    return structure.unflatten(leaves)


def _describe(leaf: Any, path: str, wrong: list[str]) -> TensorSpec | bytes:
    """A leaf as a form has it; what keeps it from being sent is added to `wrong`."""
    if isinstance(leaf, Tensor):
        return TensorSpec.of(leaf.detach())
    try:
        return pickle.dumps(leaf)
    except Exception as error:  # of the user's classes
        wrong.append(f"{_place(path)} a {type(leaf).__qualname__} ({type(error).__name__}: {error})")
        return b""


def _place(path: str) -> str:
    return f"as {path}" if path else "as the whole value"


def _tensor_paths(structure: Structure, kinds: Sequence[bool]) -> str:
    paths = [
        f"{'tensor' if is_tensor else 'value'} {path or 'itself'}"
        for path, is_tensor in zip(structure.paths(), kinds, strict=True)
    ]
    return f"{structure.kind} of [{', '.join(paths)}]"
