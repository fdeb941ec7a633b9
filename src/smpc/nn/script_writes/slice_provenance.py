"""Slices of parameters as what they are: which views of one, and which functions of one, have the same of each row.

Terms
    root        the slice, or a tensor of its layout that was computed of it: `weight.data.abs()`
    even        a view of a root that has the same of each row (for slices of rows): all of it, or some columns
    partial     computed of this rank's rows together, where one process would look at all: `weight.data.norm()`
    twin        a tensor without memory in a root's place, on which views are made once more: of one row, or none, it has two, so that
                row 0 is not all of it, and it has strides where ranks have parts of the slice (DTensors)
    wide        the same with more rows than the whole parameter has: a view of it without one of its rows is of rows that a script has
                named, and all that a slice has may be some of them: `weight.data[:4]` of the slice above
    empty       of a parameter that one rank has whole: a root without rows, on the others
    hidden      of one whose values may not leave tensors here: a weight of another stage of a pipeline

    weight of 4 rows, [4, 2]       mark of weight[:, 1]    0 1 0 1 0 1 0 1     even
                                   mark of weight[3]       0 0 0 0 0 0 1 1     not even

Whether a function looks at rows together is tried: it is called with all rows, and with each half of them. Elementwise functions say so.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map

from smpc.nn.script_writes.compare_writes import Writes
from smpc.nn.script_writes.slice_numbers import SliceInt, decided, known_number
from smpc.nn.script_writes.write_operands import NOTHING, Used

_OF_OBJECT = ("requires_grad_", "retain_grad", "detach_", "backward", "set_data", "is_leaf", "output_nr", "rename_")
_INDEPENDENT = (
    "copy_", "fill_", "zero_", "masked_fill_", "masked_fill", "clone", "to", "contiguous", "zeros_like", "ones_like", "full_like",
    "empty_like", "type", "float", "double", "half", "bfloat16", "cpu", "cuda", "where",
)  # fmt: skip
OPERATORS = (
    "add", "sub", "mul", "truediv", "div", "floordiv", "mod", "pow", "and", "or", "xor", "neg", "abs", "invert", "lt", "le", "gt", "ge",
    "eq", "ne",
)  # fmt: skip
_SCALES = (1, 1000)
_CANNOT = (RuntimeError, IndexError, ValueError, TypeError)
Ranks = tuple[int, ...]
SLICE = "_smpc_slice"  # of a value: what is known of it
AGAIN = "_smpc_again"  # of values: an OfAgain


@dataclass(frozen=True, slots=True)
class OfSlice:
    """Of which parameter, along which dimension it is sliced, and the root's layout in memory. `is_partial`: see above; it has no root.
    `dims`: several if ranks have slices of slices, whose rows are rows of each; none where rows are not told apart (`weight.view(-1) * 2`):
    only all of it is even, or all of one of the `pieces`, the start and length of each of several that were lined up. `parameter()`: the
    slice. `groups`: of ranks that have the other slices; of a partial value, those among which it may still differ. `twin`,
    `wide`: views of the root's, if there are any. `decides`: it tells how large a partial value is. `used`: to compute it, beside slices.
    `writes`: where writes into the slice are noted, None if they are not. `is_held`: an empty one in the place of the parameter, or of its
    gradient. `holders`: of one that other stages of a pipeline have, who they are. `hide`: the error for reading a hidden value, by what
    reads it."""

    name: str
    parameter: Callable[[], Tensor | None]
    dims: tuple[int, ...]
    groups: tuple[Ranks, ...]
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    is_partial: bool = False
    twin: Tensor | None = field(default=None, compare=False)
    wide: Tensor | None = field(default=None, compare=False)
    pieces: tuple[tuple[int, int], ...] = ()
    decides: bool = False
    used: Used = field(default=NOTHING, compare=False)
    writes: Writes | None = field(default=None, compare=False)
    is_held: bool = False
    holders: str = ""
    hide: Callable[[str], Exception] | None = field(default=None, compare=False)

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
        found = replace(found, wide=torch.empty(found.wide_size, device="meta"))
        if not isinstance(root, DTensor) and not found.has_few_rows:
            return found
        return replace(found, twin=torch.empty_strided(*found.layout, device="meta"))

    @property
    def has_few_rows(self) -> bool:
        """Whether a row of it is all of it, or there is none."""
        return any(self.size[dim] <= 1 for dim in self.dims)

    @property
    def is_empty(self) -> bool:
        """See above."""
        return not self.is_partial and any(self.size[dim] == 0 for dim in self.dims)

    @property
    def alone(self) -> str:
        """What a partial value was computed of, for people."""
        if not self.holders:
            return f"this rank's slice of {self.name!r} alone"
        return f"what this rank has alone, without {self.name!r}, which is {self.holders}"

    @property
    def wide_size(self) -> tuple[int, ...]:
        """See above; other slices may have a row more."""
        count = functools.reduce(lambda a, b: a * b, map(len, self.groups), 1)
        return tuple((each + 1) * count + 1 if dim in self.dims else each for dim, each in enumerate(self.size))

    @property
    def layout(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The sizes and strides of what views are compared in: of the root, or of two rows."""
        if not self.has_few_rows:
            return self.size, self.stride
        size = tuple(2 if dim in self.dims and each <= 1 else each for dim, each in enumerate(self.size))
        return size, torch.empty(size, device="meta").stride()

    def like(self, root: Tensor, dims: tuple[int, ...]) -> OfSlice:
        """Another root, of the same parameter."""
        found = OfSlice.of(self.name, self.parameter, dims, self.groups, root)
        return replace(found, writes=self.writes, holders=self.holders, hide=self.hide)

    def drawn_as(self, tensor: Tensor) -> Tensor:
        """Of which tensor it is known what one process draws for one like this: the parameter, for all of a root of its shape."""
        own = self.parameter()
        is_root = tensor.shape == self.size and tensor.stride() == self.stride and not self.is_partial
        return own if own is not None and is_root and self.dims and own.shape == self.size else tensor


@dataclass(frozen=True, slots=True)
class OfWhole:
    """Of which parameter that this rank has whole, though ranks have slices of others; `writes` as above. `is_everywhere`: all have it.
    `again`: if some stages have it, and this one is not the first of them, all their ranks."""

    name: str
    parameter: Callable[[], Tensor | None]
    writes: Writes | None
    is_everywhere: bool = True
    again: Ranks = ()


@dataclass(frozen=True, slots=True)
class OfAgain:
    """Of which parameter a value was computed that stages have together, on a rank of another one than the first: a sum over their `ranks`
    would count it again. `size`: elements of the parameter."""

    name: str
    ranks: Ranks
    size: int


def known(value: Any) -> OfSlice | None:
    """What is known of a value of a slice."""
    found = vars(value).get(SLICE) if isinstance(value, Tensor) else None
    return found if isinstance(found, OfSlice) else None


def refuse_of_slices(what: str, *values: Any) -> None:
    """UsageError for numbers and tensors that were computed of a slice alone, where `what` is to have one process's."""
    for value in values:
        of = known_number(value)
        of = known(value) if of is None else of
        if of is not None:
            raise decided(what, of)


def known_again(value: Any) -> OfAgain | None:
    """Whether a value was computed of a parameter that a sum over stages would count again."""
    if not isinstance(value, Tensor):
        return None
    whole = known_whole(value)
    if whole is not None and whole.again:
        return OfAgain(whole.name, whole.again, value.numel())
    found: OfAgain | None = vars(value).get(AGAIN)
    return found


def known_whole(value: Any) -> OfWhole | None:
    """What is known of an alias of a parameter that all ranks have whole."""
    found = vars(value).get(SLICE) if isinstance(value, Tensor) else None
    return found if isinstance(found, OfWhole) else None


def plain(tensor: Tensor) -> Tensor:
    """An alias without knowledge."""
    with torch._C.DisableTorchFunctionSubclass():
        alias = tensor.detach()
        return alias if isinstance(alias, DTensor) else alias.as_subclass(Tensor)


# -- views ---------------------------------------------------------------------------------------------------------------------------------


def is_even(view: Tensor, of: OfSlice) -> bool:
    """See above."""
    if not _has_all_rows(of.wide, of):
        return False
    if (view if of.twin is None else of.twin).numel() == _numel(of.layout[0]):
        return True
    mark = _mark(of, view.device)
    _view_of(mark, view, of).fill_(True)
    return _is_alike(mark, of)


def has_even_index(target: Tensor, index: Any, of: OfSlice) -> bool:
    """Whether `target[index]` is even."""
    if isinstance(index, Tensor) and index.dtype is torch.bool and index.shape == target.shape:
        return is_even(target, of)
    if of.wide is not None:
        with contextlib.suppress(*_CANNOT):
            if not _has_all_rows(of.wide[_widened(index, of)], of):
                return False
    mark = _mark(of, target.device)
    try:
        _view_of(mark, target, of)[tree_map(_whole, index)] = True
    except _CANNOT:
        return False
    return _is_alike(mark, of)


def _has_all_rows(wide: Tensor | None, of: OfSlice) -> bool:
    """Whether a view of the wide one has its rows, or they are not told apart."""
    return (
        wide is None or wide.numel() == _numel(of.wide_size) or all(of.wide_size[dim] in wide.shape for dim in of.dims)
    )


def _widened(value: Any, of: OfSlice) -> Any:
    """Arguments that say as many rows as the wide one has, where they say those that the slice has."""

    def widened(value: Any) -> Any:
        if isinstance(value, slice):
            return slice(widened(value.start), widened(value.stop), widened(value.step))
        sizes = (dim for dim in of.dims if of.size[dim] == value) if isinstance(value, SliceInt) else iter(())
        return next((of.wide_size[dim] for dim in sizes), value)

    return tree_map(widened, value)


def seen_on_wide(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], of: OfSlice
) -> list[Tensor] | None:
    """The same of the wide one."""
    given = _widened((tuple(args[1:]), dict(kwargs)), of)
    return None if of.wide is None else _views_of(of.wide, func, *given)


def seen_on_twin(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], of: OfSlice
) -> list[Tensor] | None:
    """The views of the twin that a function makes where it makes views of a tensor; None if it makes none, or others."""
    assert of.twin is not None
    return _views_of(of.twin, func, args[1:], kwargs)


def _views_of(
    other: Tensor, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[Tensor] | None:
    try:
        leaves = tree_leaves(func(other, *args, **kwargs))
    except _CANNOT:
        return None
    memory = other.untyped_storage()._cdata
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


def _is_alike(mark: Tensor, of: OfSlice) -> bool:
    if of.dims:
        return not mark.numel() or all(bool((mark == mark.narrow(dim, 0, 1)).all()) for dim in of.dims)
    flat = mark.reshape(-1)
    pieces = [flat.narrow(0, *each) for each in of.pieces or ((0, len(flat)),)]
    return all(bool(piece.all()) or not bool(piece.any()) for piece in pieces)


def dims_of(view: Tensor, of: OfSlice) -> tuple[int, ...]:
    """The dimensions along which an even view has the slice's rows; none if they are not told apart (`weight.view(-1)`)."""
    if of.is_partial or not of.dims:
        return ()
    size, stride = of.layout
    shape, strides = (view.shape, view.stride()) if of.twin is None else (of.twin.shape, of.twin.stride())
    found = []
    for dim in of.dims:
        if shape == size and strides == stride:
            fitting = [dim]
        else:
            fitting = [at for at, each in enumerate(shape) if each == size[dim] and strides[at] == stride[dim]]
        if len(fitting) != 1:
            return ()
        found += fitting
    return tuple(found)


def _numel(size: Sequence[int]) -> int:
    return functools.reduce(lambda a, b: a * b, size, 1)


# -- functions -----------------------------------------------------------------------------------------------------------------------------


def rows_after(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], like: Tensor, of: OfSlice
) -> list[tuple[int, ...] | None]:
    """For each tensor that a function returns, the dimensions along which it has the rows of `like`, of which it was computed; None if
    it has not what halves of the rows give. Empty if that cannot be tried."""
    dims = dims_of(like, of)
    if not dims or draws_by(getattr(func, "__name__", "")):
        return []
    along = []
    for (place, dim), scale in itertools.product(enumerate(dims), _SCALES):
        run = functools.partial(_of_rows, place, scale=scale, func=func, args=args, kwargs=kwargs, like=like, dim=dim)
        try:
            low, high, whole = (_tensors(run(half)) for half in range(3))
        except _CANNOT:
            return []
        if not len(low) == len(high) == len(whole):
            return []
        along.append([_joined_along(a, b, c, dim) for a, b, c in zip(low, high, whole, strict=True)])
    along = [
        after if after == scaled else [None] * len(after) for after, scaled in zip(along[::2], along[1::2], strict=True)
    ]
    return [None if None in each else tuple(each) for each in zip(*along, strict=True)]


def _tensors(values: Any) -> list[Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, Tensor)]


def _of_rows(
    place: int,
    half: int,
    *,
    scale: int,
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    like: Tensor,
    dim: int,
) -> Any:
    """What a function gives the first (0) or second (1) half of the rows, or all (2). Of less than two rows there are others, see `_rows`.

    Ordinary tensors are cut like `like` where they have as many rows along `dim`. `scale`: of slices, as some functions look at rows
    together only if they are large.
    """

    def cut(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        of, own = known(value), _tried(value)
        has_rows = own.dim() > dim and own.shape[dim] == like.shape[dim]
        dims = ((dim,) * (place + 1) if has_rows else ()) if of is None else dims_of(value, of)
        if place >= len(dims):
            return own.clone()
        at = dims[place]
        own = own * scale if of is not None and own.is_floating_point() else own
        own = _rows(own, at)
        middle = own.shape[at] // 2
        parts = ((0, middle), (middle, own.shape[at] - middle), (0, own.shape[at]))
        return own.narrow(at, *parts[half]).clone()

    return func(*tree_map(cut, tuple(args)), **tree_map(cut, dict(kwargs)))


def _rows(value: Tensor, dim: int) -> Tensor:
    """A tensor of at least two rows: one that is alone gets a second, half of it; where there is none, any."""
    if value.shape[dim] > 1:
        return value
    if value.shape[dim] == 0:
        shape = [2 if at == dim else each for at, each in enumerate(value.shape)]
        drawn = torch.rand(shape, generator=torch.Generator().manual_seed(2)).to(value.device)
        return drawn > 0.5 if value.dtype is torch.bool else drawn.to(value.dtype)
    return torch.cat([value, value / 2 if value.is_floating_point() else value], dim)


def _joined_along(low: Tensor, high: Tensor, whole: Tensor, dim: int) -> int | None:
    """The dimension along which two tensors are parts of a third, `dim` if it can be."""
    for at in sorted(range(whole.dim()), key=lambda each: each != dim):
        shape = list(whole.shape)
        shape[at] -= low.shape[at] if low.dim() == whole.dim() else 0
        if list(high.shape) != shape or low.shape[at] in (0, whole.shape[at]):
            continue
        if torch.allclose(torch.cat([low, high], at).double(), whole.double(), rtol=1e-4, equal_nan=True):
            return at
    return None


def is_independent(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], made: Sequence[Tensor]
) -> bool:
    """Whether a function has only looked at sizes and types of slices: it has made views of what is none, or numbers that it makes of any
    values of them."""
    given = _tensors((args, kwargs))
    read = [each for each in given if known(each) is None and not any(each is one for one in made)]
    others = {each.untyped_storage()._cdata for each in read}
    if all(each.untyped_storage()._cdata in others for each in made) or "empty" in getattr(func, "__name__", ""):
        return True
    if draws_by(getattr(func, "__name__", "")) or not all(each.is_floating_point() for each in made):
        return False
    try:
        first, second = (_tensors(_of_values(func, args, kwargs, are_own=own)) for own in (True, False))
    except _CANNOT:
        return False
    return len(first) == len(made) == len(second) and all(map(torch.equal, first, second))


def _of_values(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], *, are_own: bool) -> Any:
    """What a function gives the values of slices, or others; of at least two rows."""

    def value_of(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        of, own = known(value), _tried(value).clone()
        for dim in () if of is None else dims_of(value, of):
            own = _rows(own, dim)
        if are_own or of is None:
            return own
        if not own.is_floating_point():
            return (own == 0).to(own.dtype)
        return torch.rand(own.shape, generator=torch.Generator().manual_seed(0)).to(own)

    return func(*tree_map(value_of, tuple(args)), **tree_map(value_of, dict(kwargs)))


def lined_up(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], made: Tensor
) -> tuple[tuple[int, int], ...]:
    """Where a tensor has all elements of those that it was made of, in their order, the start and length of each; none if it has not."""
    given = _tensors((args, kwargs))
    if sum(each.numel() for each in given) != made.numel():
        return ()
    starts = [0]

    def number(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        starts.append(starts[-1] + value.numel())
        return torch.arange(starts[-2], starts[-1], dtype=torch.int32).view(value.shape)

    try:
        leaves = _tensors(func(*tree_map(number, tuple(args)), **tree_map(number, dict(kwargs))))
    except _CANNOT:
        return ()
    if len(leaves) != 1 or not torch.equal(leaves[0].reshape(-1), torch.arange(made.numel(), dtype=torch.int32)):
        return ()
    return tuple(piece for start, each in zip(starts, given, strict=False) for piece in _pieces_of(start, each))


def _pieces_of(start: int, value: Tensor) -> list[tuple[int, int]]:
    of = known(value)
    pieces = of.pieces if of is not None and of.pieces and value.numel() == _numel(of.size) else ((0, value.numel()),)
    return [(start + first, length) for first, length in pieces]


def _tried(value: Tensor) -> Tensor:
    """A tensor without knowledge that a function is tried with. Of one in parts others, as a script may run on one rank alone."""
    if not isinstance(value, DTensor):
        return _whole(value)  # type: ignore[no-any-return]
    drawn = torch.rand(value.shape, generator=torch.Generator().manual_seed(1))
    return (drawn > 0.5 if value.dtype is torch.bool else drawn).to(value.device, value.dtype)


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
