"""What scripts see of a slice of a parameter between steps: values that know of what they are, so that wrong writes are errors.

A rank has rows 4 to 7 of a weight of 8 rows, as a tensor of 4 rows:

    weight.data.mul_(0.9); weight.data *= mask; weight.data[:, 2] = 0     each rank does it to its rows: as in one process
    weight.data[:, 2] -= weight.data[:, 3]
    weight.data[weight.data.abs() < 0.1] = 0
    weight.data /= weight.data.norm(dim=1, keepdim=True)
    weight.data[3] = 0                        UsageError: it is row 7 of the weight here, and row 3 elsewhere
    weight.data /= weight.data.norm()         UsageError: the norm is that of the slice
    weight.data.normal_()                     what one process draws, cut (`smpc.nn.init.whole_fills`)

Terms
    root        the slice, or a tensor of its layout that was computed of it: `weight.data.abs()`
    even        a view of a root that has the same of each row (for slices of rows): all of it, or some columns
    partial     computed of this rank's rows together, where one process would look at all: `weight.data.norm()`

Whether a function looks at rows together is tried: it is called with all rows, and with each half of them. Elementwise functions say so.
Writes that are no error are torch's own.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function
from torch.utils._pytree import tree_leaves, tree_map

from smpc.errors import UsageError
from smpc.nn.init.whole_fills import drawn_as_whole, filled_as_whole

_SLICE = "_smpc_slice"
_OWN = ("torch", "smpc")
_OF_OBJECT = ("requires_grad_", "retain_grad", "detach_", "backward", "set_data", "is_leaf", "output_nr", "rename_")
_INDEPENDENT = (
    "copy_", "fill_", "zero_", "masked_fill_", "masked_fill", "clone", "to", "contiguous", "zeros_like", "ones_like", "full_like",
    "empty_like", "type", "float", "double", "half", "bfloat16", "cpu", "cuda", "where",
)  # fmt: skip
_COLLECTIVES = "torch.distributed.distributed_c10d"
_MAKE_ALIKE = ("all_reduce", "all_reduce_coalesced", "broadcast")


@dataclass(frozen=True, slots=True)
class OfSlice:
    """Of which parameter, along which dimension it is sliced, and the root's layout in memory. `is_partial`: see above; it has no root.
    `dim`: None for what is computed of even views elementwise, and has another shape: only all of it is even. `parameter()`: the slice."""

    name: str
    parameter: Callable[[], Tensor | None]
    dim: int | None
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    is_partial: bool = False

    @classmethod
    def of(cls, name: str, parameter: Callable[[], Tensor | None], dim: int | None, root: Tensor) -> OfSlice:
        """A root."""
        return cls(name, parameter, dim, tuple(root.shape), root.stride(), int(root.storage_offset()))

    def like(self, root: Tensor, dim: int | None) -> OfSlice:
        """Another root, of the same parameter."""
        return OfSlice.of(self.name, self.parameter, dim, root)

    def drawn_as(self, tensor: Tensor) -> Tensor:
        """Of which tensor it is known what one process draws for one like this: the parameter, for all of a root of its shape."""
        own = self.parameter()
        is_root = tensor.shape == self.size and tensor.stride() == self.stride and not self.is_partial
        return own if own is not None and is_root and self.dim is not None and own.shape == self.size else tensor


class SliceValues(Tensor):
    """See above."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """For scripts, torch's function after a check of what it writes."""
        if is_script():
            return answer(func, args, kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") in _MAKE_ALIKE and getattr(func, "__module__", "") == _COLLECTIVES:
            _forget_alone(args, kwargs or {})
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """An ordinary tensor."""
        if id(self) not in memo:
            memo[id(self)] = plain(self).clone()
        copied: Tensor = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """As an ordinary tensor."""
        return plain(self).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(plain(self))

    def __format__(self, spec: str) -> str:
        return format(plain(self), spec)


def answer(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What a script gets of a function of torch's. UsageError for what the module's docstring says."""
    name, named = getattr(func, "__name__", ""), dict(kwargs)
    with torch._C.DisableTorchFunctionSubclass():
        if not computes(func):
            return func(*args, **named)
        if _is_writing(name, named):
            return _write(name, func, args, named)
        like = _of(args[0]) if args and name.endswith("_like") and _draws_by(name) else None
        drawn = None if like is None else drawn_as_whole(func, like.drawn_as(args[0]), *args[1:], **named)
        if like is not None and drawn is not None:
            return _marked(drawn, like.like(drawn, like.dim))
        result = func(*args, **named)
        if not name.startswith("_foreach_"):
            return _told(name, func, args, named, result)
        single = name.removeprefix("_foreach_")
        for number, made in enumerate(result):
            own = [tree_leaves(each)[number] if isinstance(each, (list, tuple)) else each for each in args]
            _told(single, getattr(torch.ops.aten, single), own, named, made)
        return result


def told(tensor: Tensor, of: OfSlice) -> SliceValues:
    """The same tensor, which knows what it is."""
    with torch._C.DisableTorchFunctionSubclass():
        return _marked(tensor, of)


def plain(tensor: Tensor) -> Tensor:
    """An alias without knowledge."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.detach().as_subclass(Tensor)


def check_whole(tensor: Tensor, what: str = "weight.data = ...") -> None:
    """UsageError for values that this rank has computed of its slice alone."""
    of = _of(tensor)
    if of is not None and of.is_partial:
        raise _of_slice_alone(what, of)


def _forget_alone(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """After a collective that leaves all ranks the same values."""
    for each in tree_leaves((args, kwargs)):
        of = _of(each)
        if of is not None and of.is_partial:
            each.__class__ = Tensor


def _marked(tensor: Any, of: OfSlice) -> SliceValues:
    tensor.__class__ = SliceValues
    setattr(tensor, _SLICE, of)
    return tensor  # type: ignore[no-any-return]


def is_script() -> bool:
    """Whether the code that calls the caller is neither torch's nor ours."""
    frame: FrameType | None = sys._getframe(2)
    if frame is not None and frame.f_code is handle_torch_function.__code__:
        frame = frame.f_back and frame.f_back.f_back  # a function of torch's that is written in Python asks by this
    module: str = "" if frame is None else frame.f_globals.get("__name__", "")
    return module.partition(".")[0] not in _OWN


def _of(value: Any) -> OfSlice | None:
    return vars(value).get(_SLICE) if isinstance(value, SliceValues) else None


# -- writes --------------------------------------------------------------------------------------------------------------------------------


def _is_writing(name: str, kwargs: Mapping[str, Any]) -> bool:
    is_in_place = name.endswith("_") and not name.endswith("__") and name != "requires_grad_"
    return (
        is_in_place
        or name == "__setitem__"
        or (name.startswith("__i") and name[3:-2] in _OPERATORS)
        or kwargs.get("out") is not None
    )


def _write(name: str, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    targets, rest = _targets(args, kwargs)
    known = [(target, of) for target in targets if (of := _of(target)) is not None and not of.is_partial]
    for target, of in known:
        if _draws_by(name):
            if filled_as_whole(func, target, *args[1:], known_as=of.drawn_as(target), **kwargs):
                return target
            raise _uneven(name, of, target.shape)
        for each in rest:
            _check_operand(name, each, of)
        if name == "__setitem__":
            _check_index(of, target, args[1])
        elif not _is_even(target, of) or (
            not (_is_elementwise(name) or name.startswith("_foreach_")) and not _rows_apart(func, args, kwargs, of)
        ):
            raise _uneven(name, of, target.shape)
    return func(*args, **kwargs)


def _targets(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
    """What is written, and tensors that are read."""
    out = kwargs.get("out")
    written = tree_leaves(args[0] if out is None else out)
    read = tree_leaves((args[1:] if out is None else args, {k: v for k, v in kwargs.items() if k != "out"}))
    return written, [each for each in read if isinstance(each, SliceValues)]


def _check_operand(name: str, value: Tensor, target: OfSlice) -> None:
    of = _of(value)
    if of is not None and (of.is_partial or not _is_even(value, of)):
        raise _of_slice_alone(name, of)


def _check_index(of: OfSlice, target: Tensor, index: Any) -> None:
    """UsageError if `target[index]` is not even."""
    if isinstance(index, Tensor) and index.dtype is torch.bool and index.shape == target.shape:
        if not _is_even(target, of):
            raise _uneven("weight[...] = ...", of, target.shape)
        return
    mark = _mark(of, target.device)
    _view_of(mark, target, of)[plain(index) if isinstance(index, SliceValues) else index] = True
    if not _is_alike(mark, of.dim):
        raise _uneven("weight[...] = ...", of, target.shape)


def _is_even(view: Tensor, of: OfSlice) -> bool:
    if view.numel() == _numel(of.size):
        return True
    mark = _mark(of, view.device)
    _view_of(mark, view, of).fill_(True)
    return _is_alike(mark, of.dim)


def _mark(of: OfSlice, device: torch.device) -> Tensor:
    return torch.empty_strided(of.size, of.stride, dtype=torch.bool, device=device).fill_(False)


def _view_of(mark: Tensor, view: Tensor, of: OfSlice) -> Tensor:
    return mark.as_strided(view.shape, view.stride(), view.storage_offset() - of.offset)


def _is_alike(mark: Tensor, dim: int | None) -> bool:
    if dim is None:
        return bool(mark.all()) or not bool(mark.any())
    return not mark.numel() or bool((mark == mark.narrow(dim, 0, 1)).all())


def _numel(size: Sequence[int]) -> int:
    return functools.reduce(lambda a, b: a * b, size, 1)


# -- results -------------------------------------------------------------------------------------------------------------------------------


def _told(name: str, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> Any:
    """The result, which knows of what slice it is."""
    given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, SliceValues)]
    made = [each for each in tree_leaves(result) if isinstance(each, Tensor) and not any(each is one for one in given)]
    made = [each for each in made if not (each.requires_grad and torch.is_grad_enabled())]
    if not made or not given:
        return result
    known = [of for each in given if (of := _of(each)) is not None]
    first = next((of for of in known if of.dim is not None), known[0])
    memories = {each.untyped_storage()._cdata: of for each in given if (of := _of(each)) is not None}
    views = [each for each in made if each.untyped_storage()._cdata in memories]
    for each in views:
        _marked(each, memories[each.untyped_storage()._cdata])
    values = [each for each in made if not isinstance(each, SliceValues)]
    if values:
        knows = not any(of.is_partial or not _is_even(each, of) for each in given if (of := _of(each)) is not None)
        by_element = _is_elementwise(name)
        apart = knows and (by_element or _rows_apart(func, args, kwargs, first))
        for each in values:
            has_rows = apart and _has_rows(each, first)
            is_like = apart and by_element and any(each.shape == one.shape for one in given)
            own = first.like(each, first.dim if has_rows else None)
            _marked(each, own if has_rows or is_like else replace(own, is_partial=True))
    return result


def _has_rows(tensor: Tensor, of: OfSlice) -> bool:
    return of.dim is not None and tensor.dim() > of.dim and tensor.shape[of.dim] == of.size[of.dim]


def _rows_apart(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], of: OfSlice) -> bool:
    """Whether a function gives halves of the rows what it gives all of them."""
    dim = of.dim
    rows = 0 if dim is None else of.size[dim]
    if dim is None or rows < 2 or _draws_by(getattr(func, "__name__", "")):
        return False

    def part(value: Any, start: int, length: int) -> Any:
        if not isinstance(value, Tensor):
            return value
        value = plain(value).clone() if isinstance(value, SliceValues) else value
        has_rows = _has_rows(value, of)
        return value.narrow(dim, start, length).clone() if has_rows else value

    cut = rows // 2
    try:
        pieces = [
            func(
                *tree_map(lambda v, s=s, n=n: part(v, s, n), tuple(args)),
                **tree_map(lambda v, s=s, n=n: part(v, s, n), dict(kwargs)),
            )
            for s, n in ((0, cut), (cut, rows - cut), (0, rows))
        ]
    except (RuntimeError, IndexError, ValueError):
        return False
    for low, high, whole in zip(*map(tree_leaves, pieces), strict=True):
        if isinstance(whole, Tensor):
            if whole.dim() <= dim or low.dim() != whole.dim() or whole.shape[dim] != rows or low.shape[dim] != cut:
                return False
            if not torch.allclose(torch.cat([low, high], dim).double(), whole.double(), rtol=1e-4, equal_nan=True):
                return False
    return True


@functools.cache
def _is_elementwise(name: str) -> bool:
    return name in _INDEPENDENT or _operator(name) in _OPERATORS or torch.Tag.pointwise in (_tags(name) or ())


def computes(func: Callable[..., Any]) -> bool:
    """Whether a function of torch's reads or writes values, or makes a view; others are about the tensor object (`register_hook`)."""
    name = getattr(func, "__name__", "")
    if name.startswith("__"):
        return name in ("__get__", "__setitem__", "__getitem__", "__matmul__") or _operator(name) in _OPERATORS
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
    return bare if bare in _OPERATORS else bare[1:]


@functools.cache
def _draws_by(name: str) -> bool:
    return torch.Tag.nondeterministic_seeded in (_tags(name) or ())


_OPERATORS = (
    "add", "sub", "mul", "truediv", "div", "floordiv", "mod", "pow", "and", "or", "xor", "neg", "abs", "invert", "lt", "le", "gt", "ge",
    "eq", "ne",
)  # fmt: skip


def _uneven(what: str, of: OfSlice, shape: Sequence[int]) -> UsageError:
    rows = "values" if of.dim is None else f"{of.size[of.dim]} rows along dimension {of.dim}"
    return UsageError(
        f"{what}: expected a write that does the same to each of the {rows} of {of.name!r}, of which this rank has a slice, found one for "
        f"a part of shape {list(shape)}: other rows of the parameter on each rank; "
        "change the whole parameter of model.state_dict(), and load it on every rank with model.load_state_dict"
    )


def _of_slice_alone(what: str, of: OfSlice) -> UsageError:
    return UsageError(
        f"{what}: expected values that one process would have, too, found one that was computed of this rank's slice of {of.name!r} alone "
        "(a norm, a mean, a threshold, or a row of it): ranks would write by different ones; sum up what all ranks have with "
        "torch.distributed.all_reduce, and take its item(), or compute it of the whole parameter of model.state_dict()"
    )
