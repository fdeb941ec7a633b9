"""What scripts see of a slice of a parameter between steps: values that know which slice they come from, so that wrong writes are errors.

A rank has rows 4 to 7 of a weight of 8 rows, as a tensor of 4 rows:

    weight.data.mul_(0.9); weight.data *= mask; weight.data[:, 2] = 0     each rank does it to its rows: as in one process
    weight.data[:, 2] -= weight.data[:, 3]
    weight.data[weight.data.abs() < 0.1] = 0
    weight.data /= weight.data.norm(dim=1, keepdim=True)
    weight.data[3] = 0                        UsageError: it is row 7 of the weight here, and row 3 elsewhere
    weight.data /= weight.data.norm()         UsageError: the norm is of the slice alone
    weight.data.normal_()                     what one process draws, cut (`smpc.nn.init.nn_init_on_slices`)

What is known of a value, and the terms, are in `slice_provenance`; what collectives do to it is in
`script_collectives`. A slice that replicas have in parts is a DTensor, and so are its values (SlicePartValues). Writes that are no error
are torch's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map

from smpc.errors import UsageError
from smpc.nn.init.nn_init_on_slices import drawn_as_whole, filled_as_whole, whole_shape
from smpc.nn.script_writes.callers import is_script, is_script_beyond_torch
from smpc.nn.script_writes.script_collectives import check_collective, have_one_memory, is_collective, known_after
from smpc.nn.script_writes.slice_numbers import (
    SliceInt,
    SliceNumber,
    decided,
    known_number,
    number_of,
    tells_of_size,
    warn_of_shown,
)
from smpc.nn.script_writes.slice_provenance import (
    AGAIN,
    OPERATORS,
    SLICE,
    OfAgain,
    OfSlice,
    OfWhole,
    Ranks,
    computes,
    dims_of,
    draws_by,
    has_even_index,
    is_elementwise,
    is_even,
    is_independent,
    known,
    known_again,
    known_whole,
    lined_up,
    plain,
    rows_after,
    seen_on_twin,
    seen_on_wide,
    unknown_view,
)
from smpc.nn.script_writes.slice_sizes import WithSizes
from smpc.nn.script_writes.write_operands import ANY, Rows, Used, used_by_all, used_in

_OVERWRITE = ("zero_", "fill_", "copy_")
_ORDERS = ("lt", "le", "gt", "ge", "less", "less_equal", "greater", "greater_equal")
_ARITHMETIC = (
    *("add", "sub", "mul", "div", "true_divide", "pow", "__radd__", "__rsub__", "__rmul__", "__rdiv__", "__rpow__"),
    *("add_", "sub_", "mul_", "div_", "multiply", "divide", "subtract"),
)
_LEAVING = (
    "item",
    "tolist",
    "numpy",
    "__array__",
    "__dlpack__",
    "__bool__",
    "__float__",
    "__int__",
    "__index__",
    "__complex__",
)


class AskedFirst(Tensor):
    """The base of classes that decide about what is computed of them and of slices."""


class SliceValues(WithSizes):
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
        if are_asked_first(types):
            return NotImplemented
        if is_collective(func):
            return communicate(func, args, kwargs or {})
        if is_script():
            return answer(func, args, kwargs or {})
        if getattr(func, "__name__", "") in _LEAVING:
            _check_shown(func.__name__, args[0])
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """An ordinary tensor, but for a hidden one."""
        if id(self) not in memo:
            of, copied = known(self), plain(self).clone()
            memo[id(self)] = copied if of is None or of.hide is None else told(copied, of)
        found: Tensor = memo[id(self)]
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        """As an ordinary tensor."""
        _check_shown("saving a value of it", self)
        return plain(self).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        _look_at_shown(self)
        return repr(plain(self))

    def __format__(self, spec: str) -> str:
        _look_at_shown(self)
        return format(plain(self), spec)


def are_asked_first(types: Sequence[type]) -> bool:
    """Whether one of the classes whose tensors a function is given is to decide."""
    return any(issubclass(each, AskedFirst) for each in types)


class SlicePartValues(SliceValues, DTensor):
    """The same of a slice that replicas have in parts. What torch asks nobody about tells of it itself."""

    def full_tensor(self, **kwargs: Any) -> Tensor:
        """All of the slice."""
        of, found = known(self), super().full_tensor(**kwargs)
        if of is None:
            return found
        is_root = not of.is_partial and self.shape == of.size
        return told(found, of.like(found, of.dims) if is_root else replace(of, is_partial=True, twin=None, pieces=()))

    def redistribute(self, *args: Any, **kwargs: Any) -> DTensor:
        """The same values."""
        of, found = known(self), super().redistribute(*args, **kwargs)
        if of is not None:
            told(found, of)
        return found


def _check_loss(operands: Sequence[Any]) -> None:
    """UsageError where a number of a slice alone goes into what is differentiated (`loss * weight.norm().detach()`)."""
    is_recorded = any(type(each) is Tensor and each.requires_grad for each in operands)
    for each in operands if is_recorded else ():
        of = known(each)
        if of is not None and of.is_partial:
            raise decided("a loss, or what it is computed of", of)


def answer(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What a script gets of a function of torch's. UsageError for what the module's docstring says."""
    name, named = getattr(func, "__name__", ""), dict(kwargs)
    with torch._C.DisableTorchFunctionSubclass():
        if name in _LEAVING:
            _check_shown(name, args[0])
        if name == "__bool__":
            _check_decision(args[0])
        if name in _ARITHMETIC and torch.is_grad_enabled():
            _check_loss(args)
        if not computes(func):
            return known_result(name, func, args, named, func(*args, **named))
        if draws_by(name) and any(
            of.is_empty for each in tree_leaves((args, named)) if (of := known(each)) is not None
        ):
            _draw_elsewhere(name, func, args, named)
        if is_writing(name, named):
            return _write(name, func, args, named)
        like = known(args[0]) if args and name.endswith("_like") and draws_by(name) else None
        drawn = (
            None
            if like is None or like.is_empty or len(like.groups) > 1
            else drawn_as_whole(func, like.drawn_as(args[0]), *args[1:], **named)
        )
        if like is not None and drawn is not None:
            return told(drawn, like.like(drawn, like.dims))
        result = _run(name, func, args, named)
        if not name.startswith("_foreach_"):
            return known_result(name, func, args, named, result)
        single = name.removeprefix("_foreach_")
        for number, made in enumerate(result):
            own = [tree_leaves(each)[number] if isinstance(each, (list, tuple)) else each for each in args]
            known_result(single, getattr(torch.ops.aten, single), own, named, made)
        return result


def _run(name: str, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """UsageError for what cannot be computed without rows, and of values in parts on other ranks."""
    try:
        return func(*args, **kwargs)
    except (RuntimeError, IndexError) as error:
        leaves = tree_leaves((args, kwargs))
        if len({each.device_mesh for each in leaves if isinstance(each, DTensor)}) > 1:
            raise UsageError(
                f"{name}: expected values that are in parts on the same ranks, found some of experts, of which these ranks hold their own, "
                "beside some of parameters that are in parts on others; torch.nn.utils.clip_grad_norm_ takes the norm of all of them, and "
                "model.state_dict() has all values"
            ) from error
        empty = next((of for each in leaves if (of := known(each)) is not None and of.is_empty), None)
        if empty is None:
            raise
        if empty.hide is not None:
            raise empty.hide(name) from error
        raise UsageError(
            f"{name}: expected what can be computed without values of {empty.name!r}, which is {empty.holders or 'on another rank'}, found "
            f"an error of torch's: {error}; look at it on a rank that has it, and to change it, change the whole parameter of "
            "model.state_dict(), and load it on every rank with model.load_state_dict"
        ) from error


def communicate(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What a function of torch.distributed does. UsageError for a script that would mix slices of ranks."""
    is_of_script = is_script_beyond_torch()
    with torch._C.DisableTorchFunctionSubclass():
        if is_of_script:
            check_collective(func, args, kwargs)
        result = func(*args, **kwargs)
        for written, of in list(known_after(func, args, kwargs)):
            if of is None:
                _forget(written)
            else:
                told(written, of)
    return result


def told(tensor: Any, of: OfSlice | OfWhole) -> SliceValues:
    """The same tensor, which knows what it is."""
    tensor.__class__ = SlicePartValues if isinstance(tensor, DTensor) else SliceValues
    vars(tensor)[SLICE] = of
    return tensor  # type: ignore[no-any-return]


def _told_again(tensors: Iterable[Any], of: OfAgain | None) -> None:
    """Has values know that they were computed of a parameter that other stages have, too."""
    for each in tensors if of is not None else ():
        if type(each) in (Tensor, DTensor):
            each.__class__ = SlicePartValues if isinstance(each, DTensor) else SliceValues
        if isinstance(each, SliceValues) and known_whole(each) is None:
            vars(each)[AGAIN] = of


def _again_in(values: Any) -> OfAgain | None:
    """The first of those that values know of."""
    return next((of for each in tree_leaves(values) if (of := known_again(each)) is not None), None)


def _forget(tensor: Any) -> None:
    if isinstance(tensor, SliceValues):
        ordinary: Any = DTensor if isinstance(tensor, DTensor) else Tensor
        tensor.__class__ = ordinary
        vars(tensor).pop(SLICE, None)
        vars(tensor).pop(AGAIN, None)


def check_whole(tensor: Tensor, what: str = "weight.data = ...") -> None:
    """UsageError for values that this rank has computed of its slice alone."""
    of = known(tensor)
    if of is not None and of.is_partial:
        raise _of_slice_alone(what, of)


# -- writes --------------------------------------------------------------------------------------------------------------------------------


def is_writing(name: str, kwargs: Mapping[str, Any]) -> bool:
    """Whether a function of torch's writes into what it is given."""
    is_in_place = name.endswith("_") and not name.endswith("__") and name != "requires_grad_"
    return (
        is_in_place
        or name == "__setitem__"
        or (name.startswith("__i") and name[3:-2] in OPERATORS)
        or kwargs.get("out") is not None
    )


def _write(name: str, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    targets, rest = _targets(args, kwargs)
    for position, target in enumerate(targets):
        if known_whole(target):
            _, own = _targets(*_of_one_target(name, position, targets, args, kwargs))
            _check_alike(name, own, _numbers(name, args, kwargs))
    slices = [(target, of) for target in targets if (of := known(target)) is not None and not of.is_partial]
    if len(slices) == len(targets) and all(of.is_empty for _, of in slices):
        for position, target in enumerate(targets):
            note_write(name, target, *_of_one_target(name, position, targets, args, kwargs))
        return args[0] if kwargs.get("out") is None else kwargs["out"]
    for target, of in slices:
        if of.is_empty:
            continue
        for number in _numbers(name, args, kwargs):
            raise _of_slice_alone(name, number.of)
        if draws_by(name):
            if filled_as_whole(func, target, *args[1:], known_as=of.drawn_as(target), **kwargs):
                note_write(name, target, args, kwargs)
                return target
            raise _uneven(name, of, target.shape)
        for each in rest:
            _check_operand(name, each)
        if name == "__setitem__":
            if not has_even_index(target, args[1], of):
                raise _uneven("weight[...] = ...", of, target.shape)
        elif not is_even(target, of) or not _keeps_rows(name, func, args, kwargs, target, of):
            raise _uneven(name, of, target.shape)
    result = func(*args, **kwargs)
    again = _again_in((args, kwargs))
    _told_again([each for each in targets if again is not None and each.numel() < again.size], again)
    for position, target in enumerate(targets):
        given, named = _of_one_target(name, position, targets, args, kwargs)
        if len(slices) < len(targets):
            _pass_on(name.removeprefix("_foreach"), func, given, named, [target], _targets(given, named)[1])
        note_write(name, target, given, named)
    return result


def _of_one_target(
    name: str, position: int, targets: Sequence[Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Sequence[Any], dict[str, Any]]:
    """The arguments for one of the targets of a function of lists; for other functions, the arguments as they are."""
    if not name.startswith("_foreach_"):
        return args, kwargs

    def at(value: Any) -> Any:
        return value[position] if isinstance(value, (list, tuple)) and len(value) == len(targets) else value

    return [at(each) for each in args], {key: at(value) for key, value in kwargs.items()}


def _draw_elsewhere(name: str, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Draws as much as the rank that has the rows of an empty slice."""

    def whole(value: Any) -> Any:
        of = known(value)
        if of is None or not of.is_empty:
            return value
        shape = None if value.shape != of.size else whole_shape(of.drawn_as(value))
        if shape is None:
            raise UsageError(
                f"{name}: expected draws for all of {of.name!r}, which another rank has, found one for a part; draw for all of it, or "
                "change the whole parameter of model.state_dict(), and load it on every rank with model.load_state_dict"
            )
        return torch.full(shape, 0.5, dtype=value.dtype, device=value.device)

    func(*tree_map(whole, tuple(args)), **tree_map(whole, dict(kwargs)))


def note_write(name: str, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """What a slice, a value of one, or a parameter that all have whole, has been written with."""
    whole, of = known_whole(target), known(target)
    writes = None if whole is None else whole.writes
    if whole is not None and writes is not None and not whole.is_everywhere:
        writes.note_of_one(whole.name, name, numbers_of_one(args, kwargs), is_here=True)
    elif whole is not None and writes is not None:
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor) and each is not target]
        others = [*(each for each in given if known(each) is None), *([target] if draws_by(name) else [])]
        others = [each for each in others if not isinstance(each, DTensor)]  # ranks may have other parts
        writes.note(whole.name, name, used_by_all(name, args, kwargs, others))
    if of is None or of.is_partial or of.writes is None:
        return
    if of.is_empty:
        if of.is_held:
            of.writes.note_of_one(of.name, name, numbers_of_one(args, kwargs), is_here=False)
        return
    used = _used(name, args, kwargs, target, of)
    own = of.parameter()
    if any(each is not None and have_one_memory(target, each) for each in (own, None if own is None else own.grad)):
        of.writes.note(of.name, name, used)
    elif name in _OVERWRITE:
        vars(target)[SLICE] = replace(of, used=used)
    else:
        vars(target)[SLICE] = replace(of, used=of.used.and_also(used))


def numbers_of_one(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[float, ...]:
    """What is compared of a write into what one rank has: numbers of a script. What was computed of a slice alone may be any."""
    leaves = (each for each in tree_leaves((args, kwargs)) if isinstance(each, float))
    return tuple(ANY if known_number(each) is not None else each for each in leaves)


def _used(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], like: Tensor, of: OfSlice) -> Used:
    """What a function uses for a value, beside slices, and what was used for what it is given."""
    is_by_element = is_elementwise(name) or name == "__setitem__"
    dims = dims_of(like, of)
    rows = Rows(like.shape if of.twin is None else of.twin.shape, dims, is_by_element)
    given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor) and each is not like]
    found = used_in(name, args, kwargs, [each for each in given if known(each) is None], rows)
    for each in given:
        own = known(each)
        found = found if own is None else found.and_also(own.used)
    return found


def _keeps_rows(
    name: str, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], target: Tensor, of: OfSlice
) -> bool:
    """Whether what is written into a row is of that row."""
    if is_elementwise(name) or name.startswith("_foreach_"):
        return True
    found = rows_after(func, args, kwargs, target, of)
    return bool(found) and found[0] == dims_of(target, of)


def _targets(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
    """What is written, and tensors that are read."""
    out = kwargs.get("out")
    written = tree_leaves(args[0] if out is None else out)
    read = tree_leaves((args[1:] if out is None else args, {k: v for k, v in kwargs.items() if k != "out"}))
    return written, [each for each in read if known(each) is not None]


def _numbers(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Numbers of slices alone that are values: sizes are sizes in all that is not done by element."""
    kinds = (SliceNumber, SliceInt) if is_elementwise(name) or name == "__setitem__" or draws_by(name) else SliceNumber
    return [each for each in tree_leaves((args, kwargs)) if isinstance(each, kinds)]


def _check_alike(name: str, values: Sequence[Tensor], numbers: Sequence[Any]) -> None:
    """UsageError for what is not the same on all ranks."""
    for of in (*map(known, values), *(each.of for each in numbers)):
        if of is not None:
            raise _of_slice_alone(name, of)


def _check_operand(name: str, value: Tensor) -> None:
    of = known(value)
    if of is not None and (of.is_partial or not is_even(value, of)):
        raise _of_slice_alone(name, of)


def _pass_on(
    name: str,
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    targets: list[Any],
    rest: list[Any],
) -> None:
    """What is known of values that are written into others (`total += weight.norm()`) is known of these, too."""
    for target in targets:
        of = known(target)
        if of is not None and not rest and name in _OVERWRITE:
            _forget(target)
        elif rest and (of is not None and of.is_partial):
            told(target, _of_all(of, target, *rest))
        elif rest and type(target) in (Tensor, DTensor) and not (name == "__setitem__" and _are_even(rest)):
            _tell(name, func, args, kwargs, rest, [target])


def _are_even(values: list[Any]) -> bool:
    pairs = ((each, of) for each in values if (of := known(each)) is not None)
    return not any(of.is_partial or not is_even(each, of) for each, of in pairs)


# -- results -------------------------------------------------------------------------------------------------------------------------------


def known_result(name: str, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> Any:
    """The result, which knows of what slice it is, and whether it has what other stages have, too."""
    found = _known_of_slices(name, func, args, kwargs, result)
    given = tree_leaves((args, kwargs))
    made = (each for each in tree_leaves(found) if isinstance(each, Tensor) and not any(each is one for one in given))
    _told_again(made, _again_in(given))
    return found


def _known_of_slices(
    name: str, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], result: Any
) -> Any:
    """The result, which knows of what slice it is."""
    if name == "numpy":
        whole = known_whole(args[0])
        if whole is None or (whole.writes is not None and whole.writes.must_see):
            result.flags.writeable = False  # what is written into it, nobody sees
        return result
    seen = [each for each in tree_leaves((args, kwargs)) if isinstance(each, SliceValues)]
    made = [each for each in tree_leaves(result) if isinstance(each, Tensor) and not any(each is one for one in seen)]
    made = [each for each in made if not (each.requires_grad and torch.is_grad_enabled())]
    given = [each for each in seen if known(each) is not None]
    if name == "__float__" and not _are_even(given):
        warn_of_shown("float(...)")
    if name == "item" and not _are_even(given):
        return number_of(result, next(of for each in given if (of := known(each)) is not None))
    for each, view_of in _views(func, args, kwargs, seen, made):
        told(each, view_of)
    if not made or not given:
        return result
    values = [each for each in made if not isinstance(each, SliceValues)]
    if values:
        _tell(name, func, args, kwargs, given, values)
    for each in made:
        own = known(each)
        if own is not None and own.writes is not None and not own.is_partial:
            vars(each)[SLICE] = replace(own, used=_used(name, args, kwargs, each, own))
    return result


def _views(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], given: list[Any], made: list[Any]
) -> Iterator[tuple[Tensor, OfSlice | OfWhole]]:
    """What is made that is a view of what is given, and what is known of it."""
    wholes = {each.untyped_storage()._cdata: whole for each in given if (whole := known_whole(each)) is not None}
    if wholes:
        yield from ((each, wholes[key]) for each in made if (key := each.untyped_storage()._cdata) in wholes)
    source = known(args[0]) if args else None
    wide: list[Tensor | None] = [None] * len(made)
    if made and source is not None and not source.is_partial:
        found = seen_on_wide(func, args, kwargs, source)
        wide = [*found[: len(made)]] if found is not None and len(found) >= len(made) else wide  # splits have more
    if source is not None and source.twin is not None and not source.is_partial:
        seen = seen_on_twin(func, args, kwargs, source)
        if seen is not None and len(seen) == len(made):
            for each, view, other in zip(made, seen, wide, strict=True):
                yield each, replace(source, twin=view, wide=other)
            return
    memories = {each.untyped_storage()._cdata: of for each in given if (of := known(each)) is not None}
    for each, other in zip(made, wide, strict=True):
        of = memories.get(each.untyped_storage()._cdata)
        if of is not None:
            yield each, replace(unknown_view(of), wide=other)


def _tell(
    name: str,
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    given: list[Any],
    values: list[Any],
) -> None:
    """Have values, all or some of what a function returns, know what was computed of what is given."""
    all_known = [(each, of) for each in given if (of := known(each)) is not None]
    numbers = _numbers(name, args, kwargs)
    are_even = _are_even(given) and not numbers
    roots = _roots(name, func, args, kwargs, all_known, values) if are_even else iter([None] * len(values))
    for each, own in zip(values, roots, strict=True):
        if own is not None:
            told(each, _of_all(own, *given, *numbers))
    left = [each for each in values if not isinstance(each, SliceValues)]
    if left and (numbers or not is_independent(func, args, kwargs, left)):
        decides = _operator_of(name) in _ORDERS and any(map(tells_of_size, tree_leaves((args, kwargs))))
        partial = replace(all_known[0][1], is_partial=True, twin=None, pieces=(), decides=decides)
        partial = _of_all(partial, *given, *numbers)
        for each in left:
            told(each, partial)


def _roots(
    name: str,
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    given: list[tuple[Any, OfSlice]],
    values: list[Any],
) -> Iterator[OfSlice | None]:
    """What is known of values that were computed of even views; None if they are partial."""
    first, of = next((pair for pair in given if dims_of(*pair)), given[0])
    after: list[tuple[int, ...] | None] | None = None
    for number, each in enumerate(values):
        like = next(((one, own) for one, own in given if one.shape == each.shape), None)
        if is_elementwise(name) and like is not None:
            like = next((pair for pair in given if pair[0].shape == each.shape and dims_of(*pair)), like)
            yield replace(
                like[1].like(each, dims_of(*like)), pieces=like[1].pieces if each.shape == like[1].size else ()
            )
            continue
        after = rows_after(func, args, kwargs, first, of) if after is None else after
        dims = after[number] if len(after) == len(values) else None
        if dims is not None:
            yield of.like(each, dims)
        else:
            pieces = lined_up(func, args, kwargs, each)
            yield replace(of.like(each, ()), pieces=pieces) if pieces else None


def _groups(*values: Any) -> tuple[Ranks, ...]:
    found = (known_number(each) or known(each) for each in values)
    return tuple(dict.fromkeys(group for of in found if of is not None for group in of.groups))


def _of_all(of: OfSlice, *values: Any) -> OfSlice:
    """What is known of a value that was computed of all of these."""
    hidden = next((own for each in values if (own := known(each)) is not None and own.hide is not None), of)
    return replace(of, groups=_groups(*values), hide=hidden.hide)


def _check_shown(what: str, tensor: Any) -> None:
    of = known(tensor)
    if of is not None and of.hide is not None:
        raise of.hide(what)


def _look_at_shown(tensor: Tensor) -> None:
    """An error for what is hidden, a warning for a number of this rank's slice alone."""
    _check_shown("printing a value of it", tensor)
    of = known(tensor)
    if of is not None and not tensor.dim() and not _are_even([tensor]):
        warn_of_shown("printing a number")


def _check_decision(tensor: Tensor) -> None:
    of = known(tensor)
    if of is not None and of.decides:
        raise decided("a comparison with a number", of)


def _operator_of(name: str) -> str:
    return name[2:-2] if name.startswith("__") else name


def _uneven(what: str, of: OfSlice, shape: Sequence[int]) -> UsageError:
    rows = " and ".join(f"{of.size[dim]} rows along dimension {dim}" for dim in of.dims) or "values"
    return UsageError(
        f"{what}: expected a write that does the same to each of the {rows} of {of.name!r}, of which this rank has a slice, found one for "
        f"a part of shape {list(shape)}: other rows of the parameter on each rank; "
        "change the whole parameter of model.state_dict(), and load it on every rank with model.load_state_dict"
    )


def _of_slice_alone(what: str, of: OfSlice) -> UsageError:
    return UsageError(
        f"{what}: expected values that one process would have, too, found one that was computed of {of.alone} "
        "(a norm, a mean, a threshold, or a row of it): ranks would write by different ones; sum up what all ranks have with "
        "torch.distributed.all_reduce, and take its item(), or compute it of the whole parameter of model.state_dict()"
    )
