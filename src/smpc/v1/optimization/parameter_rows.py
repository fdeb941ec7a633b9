"""Parts of parameters, which replace parameters in the optimizer's groups if a rank updates only some of their rows.

    parts.adopt(optimizer, range_of)     in the optimizer's groups, parts take the parameters' places; their state is cut to size
    parts.refresh()                      parts lie in the parameters' memory, and have their gradients' rows
    parts.drop_gradients()

A part is an nn.Parameter that shares the memory of its rows with the parameter: updating it updates the parameter, and an fp32 master of it
is a master of these rows. Its gradient is a view of the parameter's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from smpc.nn.parallel import Shard


@dataclass(frozen=True, slots=True)
class Range:
    """`length` rows of a parameter along `dim`, from `start` on."""

    dim: int
    start: int
    length: int

    def of(self, tensor: Tensor) -> Tensor:
        """These rows; a view of a dense tensor."""
        if tensor.layout is torch.sparse_coo:
            return tensor.narrow_copy(self.dim, self.start, self.length)
        return tensor.narrow(self.dim, self.start, self.length)

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the rows, if `whole` is the parameter's."""
        return tuple(self.length if dim == self.dim else size for dim, size in enumerate(whole))

    def within(self, shard: Shard | None, size: int) -> Shard:
        """The rows as a slice of the whole model's parameter, if this rank's parameter, with `size` rows, is the slice `shard`."""
        if shard is None:
            return Shard(self.dim, size, self.start)
        runs = []
        for own, start, length in shard.runs_of(size):
            low, high = max(own, self.start), min(own + length, self.start + self.length)
            if low < high:
                runs.append((start + low - own, high - low))
        return Shard(self.dim, shard.size, runs[0][0], tuple(runs) if len(runs) > 1 else ())


@dataclass(slots=True)
class _Part:
    parameter: Tensor
    part: nn.Parameter
    range: Range
    seen: int

    def refresh(self) -> None:
        rows = self.range.of(self.parameter.detach())
        if rows.data_ptr() != self.part.data_ptr() or rows.device != self.part.device:
            self.part.data = rows  # somebody has given the parameter other memory
        if self.parameter._version != self.seen and self.part._version != self.parameter._version:
            torch.autograd.graph.increment_version(self.part)  # after that they no longer count together
        self.seen = self.parameter._version
        if self.part.requires_grad != self.parameter.requires_grad:
            self.part.requires_grad_(self.parameter.requires_grad)


class Parts:
    """The parts that this rank updates."""

    def __init__(self) -> None:
        self._parts: dict[int, _Part] = {}  # by id of the parameter
        self._parameters: dict[int, Tensor] = {}  # by id of the part

    def adopt(self, optimizer: Optimizer, range_of: Callable[[Tensor], Range | None]) -> None:
        """Put parts in the optimizer's groups, for every parameter of which there is a range, and that has none yet."""
        for group in optimizer.param_groups:
            # In place: some optimizers keep the list.
            group["params"][:] = [self._place(optimizer, entry, range_of(entry)) for entry in group["params"]]

    def _place(self, optimizer: Optimizer, parameter: Tensor, own: Range | None) -> Tensor:
        if own is None or id(parameter) in self._parts or id(parameter) in self._parameters:
            return parameter
        part = nn.Parameter(own.of(parameter.detach()), requires_grad=parameter.requires_grad)
        part.grad_dtype = parameter.grad_dtype  # gradients may be wider
        self._parts[id(parameter)] = _Part(parameter, part, own, parameter._version)
        self._parameters[id(part)] = parameter
        if parameter in optimizer.state:
            optimizer.state[part] = {
                key: own.of(value).clone() if isinstance(value, Tensor) and value.shape == parameter.shape else value
                for key, value in optimizer.state.pop(parameter).items()
            }
        return part

    def parameter_of(self, entry: Tensor) -> Tensor:
        """The parameter that a part belongs to; other entries unchanged."""
        return self._parameters.get(id(entry), entry)

    def entry_of(self, parameter: Tensor) -> Tensor:
        """The tensor that this rank updates for a parameter: a part, or all of it."""
        found = self._parts.get(id(parameter))
        return parameter if found is None else found.part

    def range_of(self, parameter: Tensor) -> Range | None:
        """The rows of a parameter that this rank updates; None if it is not in parts here."""
        found = self._parts.get(id(parameter))
        return None if found is None else found.range

    @torch.no_grad()
    def refresh(self) -> None:
        """Update the parts' memory and gradients from the parameters."""
        for each in self._parts.values():
            each.refresh()
            grad = each.parameter.grad
            each.part.grad = None if grad is None else each.range.of(grad)

    def drop_gradients(self) -> None:
        """Free the parameters' gradients."""
        for each in self._parts.values():
            each.part.grad = None
