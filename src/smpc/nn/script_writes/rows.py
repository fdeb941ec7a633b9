"""Slices of parameters as what they are: which views of one, and which functions of one, have the same of each row.

Terms
    root        the slice, or a tensor of its layout that was computed of it: `weight.data.abs()`
    even        a view of a root that has the same of each row (for slices of rows): all of it, or some columns
    partial     computed of this rank's rows together, where one process would look at all: `weight.data.norm()`
    twin        a tensor without memory in a root's place, on which views are made once more: of one row it has two, so that row 0 is
                not all of it, and it has strides where ranks have parts of the slice (DTensors)

    weight of 4 rows, [4, 2]       mark of weight[:, 1]    0 1 0 1 0 1 0 1     even
                                   mark of weight[3]       0 0 0 0 0 0 1 1     not even

Whether a function looks at rows together is tried: it is called with all rows, and with each half of them. Elementwise functions say so.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map

_OF_OBJECT = ("requires_grad_", "retain_grad", "detach_", "backward", "set_data", "is_leaf", "output_nr", "rename_")
_INDEPENDENT = (
    "copy_", "fill_", "zero_", "masked_fill_", "masked_fill", "clone", "to", "contiguous", "zeros_like", "ones_like", "full_like",
    "empty_like", "type", "float", "double", "half", "bfloat16", "cpu", "cuda", "where",
)  # fmt: skip
OPERATORS = (
    "add", "sub", "mul", "truediv", "div", "floordiv", "mod", "pow", "and", "or", "xor", "neg", "abs", "invert", "lt", "le", "gt", "ge",
    "eq", "ne",
)  # fmt: skip
_CANNOT = (RuntimeError, IndexError, ValueError, TypeError)
Ranks = tuple[int, ...]
SLICE = "_smpc_slice"  # of a value: what is known of it


@dataclass(frozen=True, slots=True)
class OfSlice:
    """Of which parameter, along which dimension it is sliced, and the root's layout in memory. `is_partial`: see above; it has no root.
    `dims`: none for what is computed of even views elementwise, and has another shape: only all of it is even; several if ranks have slices
    of slices, whose rows are rows of each. `parameter()`: the slice.
    `groups`: of ranks that have the other slices; of a partial value, those among which it may still differ. `twin`: a view of the root's
    twin, if there is one."""

    name: str
    parameter: Callable[[], Tensor | None]
    dims: tuple[int, ...]
    groups: tuple[Ranks, ...]
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    is_partial: bool = False
    twin: Tensor | None = field(default=None, compare=False)

    @classmethod
    def of(
        cls,
        name: str,
        parameter: Callable[[], Tensor | None],
        dims: tuple[int, ...],
        groups: tuple[Ranks, ...],
        root: Tensor,
    ) -> OfSlice:
        """A root."""
        found = cls(name, parameter, dims, groups, tuple(root.shape), root.stride(), int(root.storage_offset()))
        if not isinstance(root, DTensor) and not found.has_one_row:
            return found
        return replace(found, twin=torch.empty_strided(*found.layout, device="meta"))

    @property
    def has_one_row(self) -> bool:
        """Whether a row of it is all of it."""
        return any(self.size[dim] == 1 for dim in self.dims)

    @property
    def layout(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The sizes and strides of what views are compared in: of the root, or of two rows."""
        if not self.has_one_row:
            return self.size, self.stride
        size = tuple(2 if dim in self.dims and each == 1 else each for dim, each in enumerate(self.size))
        return size, torch.empty(size, device="meta").stride()

    def like(self, root: Tensor, dims: tuple[int, ...]) -> OfSlice:
        """Another root, of the same parameter."""
        return OfSlice.of(self.name, self.parameter, dims, self.groups, root)

    def drawn_as(self, tensor: Tensor) -> Tensor:
        """Of which tensor it is known what one process draws for one like this: the parameter, for all of a root of its shape."""
        own = self.parameter()
        is_root = tensor.shape == self.size and tensor.stride() == self.stride and not self.is_partial
        return own if own is not None and is_root and self.dims and own.shape == self.size else tensor


def known(value: Any) -> OfSlice | None:
    """What is known of a value."""
    return vars(value).get(SLICE) if isinstance(value, Tensor) else None


def plain(tensor: Tensor) -> Tensor:
    """An alias without knowledge."""
    with torch._C.DisableTorchFunctionSubclass():
        alias = tensor.detach()
        return alias if isinstance(alias, DTensor) else alias.as_subclass(Tensor)


# -- views ---------------------------------------------------------------------------------------------------------------------------------


def is_even(view: Tensor, of: OfSlice) -> bool:
    """See above."""
    if of.twin is None and view.numel() == _numel(of.size):
        return True
    mark = _mark(of, view.device)
    _view_of(mark, view, of).fill_(True)
    return _is_alike(mark, of.dims)


def has_even_index(target: Tensor, index: Any, of: OfSlice) -> bool:
    """Whether `target[index]` is even."""
    if isinstance(index, Tensor) and index.dtype is torch.bool and index.shape == target.shape:
        return is_even(target, of)
    mark = _mark(of, target.device)
    try:
        _view_of(mark, target, of)[tree_map(_whole, index)] = True
    except _CANNOT:
        return False
    return _is_alike(mark, of.dims)


def seen_on_twin(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], of: OfSlice
) -> list[Tensor] | None:
    """The views of the twin that a function makes where it makes views of a tensor; None if it makes none, or others."""
    assert of.twin is not None
    try:
        leaves = tree_leaves(func(of.twin, *args[1:], **kwargs))
    except _CANNOT:
        return None
    memory = of.twin.untyped_storage()._cdata
    are_views = all(isinstance(each, Tensor) and each.untyped_storage()._cdata == memory for each in leaves)
    return leaves if are_views and leaves else None


def unknown_view(of: OfSlice) -> OfSlice:
    """What is known of a view that the twin does not have: it is not even."""
    return of if of.twin is None or not _numel(of.size) else replace(of, twin=of.twin.as_strided((1,), (1,), 0))


def _mark(of: OfSlice, device: torch.device) -> Tensor:
    return torch.empty_strided(*of.layout, dtype=torch.bool, device=device).fill_(False)


def _view_of(mark: Tensor, view: Tensor, of: OfSlice) -> Tensor:
    if of.twin is not None:
        return mark.as_strided(of.twin.shape, of.twin.stride(), of.twin.storage_offset())
    return mark.as_strided(view.shape, view.stride(), view.storage_offset() - of.offset)


def _is_alike(mark: Tensor, dims: tuple[int, ...]) -> bool:
    if not dims:
        return bool(mark.all()) or not bool(mark.any())
    return not mark.numel() or all(bool((mark == mark.narrow(dim, 0, 1)).all()) for dim in dims)


def _numel(size: Sequence[int]) -> int:
    return functools.reduce(lambda a, b: a * b, size, 1)


# -- functions -----------------------------------------------------------------------------------------------------------------------------


def has_rows(tensor: Tensor, of: OfSlice) -> bool:
    """Whether a tensor has the slice's rows."""
    return bool(of.dims) and all(_has_rows_along(tensor, of, dim) for dim in of.dims)


def _has_rows_along(tensor: Tensor, of: OfSlice, dim: int) -> bool:
    return tensor.dim() > dim and tensor.shape[dim] == of.size[dim]


def rows_apart(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], of: OfSlice) -> bool:
    """Whether a function gives halves of the rows what it gives all of them."""
    if not of.dims or draws_by(getattr(func, "__name__", "")):
        return False
    return all(_rows_apart_along(dim, func, args, kwargs, of) for dim in of.dims)


def _rows_apart_along(
    dim: int, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], of: OfSlice
) -> bool:
    rows = max(of.size[dim], 2)
    halves = ((0, rows // 2), (rows // 2, rows - rows // 2), (0, rows))
    try:
        low, high, whole = (tree_leaves(_of_rows(dim, func, args, kwargs, of, *each)) for each in halves)
    except _CANNOT:
        return False
    if not len(low) == len(high) == len(whole):
        return False
    return all(_is_joined(a, b, c, dim) for a, b, c in zip(low, high, whole, strict=True) if isinstance(c, Tensor))


def _of_rows(
    dim: int,
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    of: OfSlice,
    start: int,
    length: int,
) -> Any:
    """What a function gives some of the rows. A second row beside one that is alone is half of it."""

    def cut(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        own = _whole(value)
        if not _has_rows_along(own, of, dim):
            return own.clone()
        own = torch.cat([own, own / 2 if own.is_floating_point() else own], dim) if of.size[dim] == 1 else own
        return own.narrow(dim, start, length).clone()

    return func(*tree_map(cut, tuple(args)), **tree_map(cut, dict(kwargs)))


def _is_joined(low: Tensor, high: Tensor, whole: Tensor, dim: int) -> bool:
    if whole.dim() <= dim or low.dim() != whole.dim() or low.shape[dim] + high.shape[dim] != whole.shape[dim]:
        return False
    return torch.allclose(torch.cat([low, high], dim).double(), whole.double(), rtol=1e-4, equal_nan=True)


def _whole(value: Any) -> Any:
    """A tensor without knowledge, and not in parts."""
    if not isinstance(value, Tensor):
        return value
    if isinstance(value, DTensor):
        return plain(value).full_tensor()  # type: ignore[attr-defined]
    return plain(value) if SLICE in vars(value) else value


@functools.cache
def is_elementwise(name: str) -> bool:
    """Whether a function does the same to each element."""
    return name in _INDEPENDENT or _operator(name) in OPERATORS or torch.Tag.pointwise in (_tags(name) or ())


def computes(func: Callable[..., Any]) -> bool:
    """Whether a function of torch's reads or writes values, or makes a view; others are about the tensor object (`register_hook`)."""
    name = getattr(func, "__name__", "")
    if name.startswith("__"):
        return name in ("__get__", "__setitem__", "__getitem__", "__matmul__") or _operator(name) in OPERATORS
    tags = _tags(name)
    if tags is None:
        return getattr(func, "__module__", None) in ("torch.functional", "torch.nn.functional")
    return name not in _OF_OBJECT and torch.Tag.inplace_view not in tags


def _tags(name: str) -> set[torch.Tag] | None:
    """Of an operation of torch's; None if there is none of this name."""
    packet = getattr(torch.ops.aten, name, None)
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        return None
    overloads: list[str] = packet.overloads()  # type: ignore[no-untyped-call]
    return {tag for each in overloads for tag in getattr(packet, each).tags}


def _operator(name: str) -> str:
    """add, of `__add__`, `__iadd__` and `__radd__`."""
    bare = name[2:-2] if name.startswith("__") and name.endswith("__") else ""
    return bare if bare in OPERATORS else bare[1:]


@functools.cache
def draws_by(name: str) -> bool:
    """Whether a function draws random numbers."""
    return torch.Tag.nondeterministic_seeded in (_tags(name) or ())
