"""Parameters of other ranks: tensors that raise an error that names the holders when code computes with them.

A rank has no values of other stages' parameters, but scripts still hold the objects: `model.parameters()` in a norm of all gradients, in a
weight penalty, in an average of weights. They would silently count as zero where their memory was freed (`smpc.v1`), or as they were before
training where it was not (`smpc.Runtime`, whose model is whole on every rank). So they become `AbsentParameter`s, in place:

    p.shape, p.size(), p.numel()        of the parameter, so that torch.randn(p.shape) draws as much as in one process; p.nbytes is what
                                        this rank has: 0 where its memory was freed
    p.requires_grad, p.dtype, p.dim()   as ever
    p.data, p.detach()                  absent, too
    p.mul_(0.5), p.data = other         nothing here: whoever holds it does it, if all ranks run the same line
    p.normal_(), nn.init.normal_(p)     as much is drawn as its holders draw, so that what comes next is drawn as in one process
    p.grad                              between steps a gradient without rows, if this rank has gradients, and a warning; None for torch's
                                        own code, and in DistributedOptimizer's steps, which skip it
    p.norm(), p + 1, F.linear(x, p)     an error where gradients are recorded, and in steps
    copy.deepcopy(p)                    absent, too
    pickle                              an error

Where nothing is recorded, between steps, scripts may compute with what they have nothing of, as with slices without rows
(`smpc.nn.script_writes`): one function for each parameter by itself does here what it does for the holders.

    p.grad.mul_(c * p.norm() / p.grad.norm())     here nothing
    total += p.grad.norm() ** 2                   partial: an error if it is written into a parameter or gradient, until
    dist.all_reduce(total, group=pipeline)        the ranks of the pipeline have summed it up
    p.norm().item(), print(p.norm())              an error: its holders have the number

Where memory was not freed, none of this is so: `p.grad` is None, and computing an error. The values are out of date, and writes are done.
Who writes all of it anew (`p.copy_(v)`, `p.data = v`, `p.zero_()`, `model.load_state_dict(gathered)`) has a plain parameter again, as there
is nothing left that is out of date.

`mark` makes a parameter or buffer absent, `unmark` gives it its class back. A rank's own computations use none of them, so only accesses by
scripts and optimizers cost time: about a microsecond each.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from smpc.absent.class_blind_calls import refuse_unasked
from smpc.errors import UsageError
from smpc.nn.init.nn_init_on_slices import WholeTensor, fill_whole
from smpc.nn.script_writes.between_steps import are_plain
from smpc.nn.script_writes.callers import is_script
from smpc.nn.script_writes.compare_writes import Writes
from smpc.nn.script_writes.script_collectives import is_collective
from smpc.nn.script_writes.slice_parameters import answered, without_rows
from smpc.nn.script_writes.slice_values import AskedFirst, numbers_of_one
from smpc.nn.script_writes.uncompiled import leave_to_python

_PLACE = "_smpc_place"
_warned: set[tuple[str, int]] = set()  # lines
_readers: ContextVar[bool] = ContextVar("smpc_reads_absent_gradients", default=False)


@dataclass(frozen=True, slots=True)
class AbsentTexts:
    """Parts of messages: what this rank lacks, what to do instead, and what to do for gradients."""

    lack: str
    advice: str
    gradients: str


@dataclass(frozen=True, slots=True)
class AbsentPlace:
    """A parameter's name, its shape on its holders, the pipeline ranks of the holders and of this process, and its original class.

    `owner`: the parameter itself, where its memory was not freed. `whole`: its shape in one process, where holders have slices. `ranks`: of
    all, those that share the model with this process; `have_gradients()`: whether this one has any. `writes`: where it is noted what this
    process's script would have written.
    """

    name: str
    shape: torch.Size
    holders: tuple[int, ...]
    rank: int
    kind: type[Tensor]
    texts: AbsentTexts
    owner: weakref.ref[Tensor] | None = None
    whole: torch.Size | None = None
    ranks: tuple[int, ...] = ()
    have_gradients: Callable[[], bool] = lambda: False
    writes: Writes | None = None

    def refuse(self, what: str) -> UsageError:
        """The error for an operation that needs its values."""
        kind = "parameter" if issubclass(self.kind, nn.Parameter) else "buffer"
        return UsageError(
            f"{what}: {kind} {self.name!r} is {self.text}, and pipeline rank {self.rank} has {self.texts.lack}; {self.texts.advice}"
        )

    @property
    def drawn(self) -> torch.Size:
        """What one process draws for all of it."""
        return self.shape if self.whole is None else self.whole

    @property
    def text(self) -> str:
        """The holders, for people."""
        return f"on pipeline rank{'s' * (len(self.holders) > 1)} {', '.join(map(str, self.holders))}"


class Absent(AskedFirst):
    """The common base of absent parameters, buffers and their aliases."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """See the module's docstring."""
        rule = _RULES.get(func)
        if rule is not None:
            return rule(func, args, kwargs or {})
        name = getattr(func, "__name__", "")
        is_in_place = name.endswith("_") and not name.endswith("__")
        is_of_script = is_script()
        if is_in_place or name in _WRITING:
            return _run_in_place(name, func, args, kwargs or {}, is_of_script=is_of_script)
        attribute = getattr(getattr(func, "__self__", None), "__name__", "") if name == "__get__" else ""
        place, what = place_of(args, kwargs), attribute or name or repr(func)
        if is_collective(func) or not is_of_script or not _is_between_steps(place, args, kwargs or {}):
            raise place.refuse(what)
        return _without_rows(what, func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy that is absent, too."""
        if id(self) not in memo:
            place: AbsentPlace = getattr(self, _PLACE)
            with torch._C.DisableTorchFunctionSubclass():
                data = self.detach().clone()
                copied = nn.Parameter(data, self.requires_grad) if isinstance(self, nn.Parameter) else data
            if place.owner is not None:
                place = dataclasses.replace(place, owner=weakref.ref(copied))
            memo[id(self)] = _marked(copied, place, type(self))
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refused: there is no value to save."""
        raise getattr(self, _PLACE).refuse("saving a module or its state dict from this rank")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        place: AbsentPlace = getattr(self, _PLACE)
        return (
            f"{type(self).__name__}({place.name!r}, shape={list(place.shape)}, on pipeline ranks {list(place.holders)})"
        )


class AbsentParameter(Absent, nn.Parameter):
    """A parameter of other ranks."""


class AbsentTensor(Absent):
    """A buffer of other ranks, or the data of an absent parameter, or its detached alias."""


def empty(parameter: Tensor, shape: torch.Size, device: torch.device) -> Tensor:
    """The empty shape of an absent parameter of this shape."""
    return torch.empty((0, *shape[1:]), dtype=parameter.dtype, device=device)


def _whole_of(tensor: Tensor) -> WholeTensor | None:
    """For torch.nn.init: of a parameter, or of `weight.data` whose memory was freed."""
    if not isinstance(tensor, Absent):
        return None
    place: AbsentPlace = getattr(tensor, _PLACE)
    if not isinstance(tensor, AbsentParameter) and place.owner is not None:
        return None
    return WholeTensor(place.drawn, None if place.owner is None else lambda values: values)


def mark(tensor: Tensor, place: AbsentPlace) -> None:
    """Make a parameter or buffer absent, after its memory was freed unless `place` has an owner."""
    _fill_absent()
    if not isinstance(tensor, Absent):
        _marked(tensor, place, AbsentParameter if isinstance(tensor, nn.Parameter) else AbsentTensor)


@functools.cache
def _fill_absent() -> None:
    fill_whole(_whole_of)
    leave_to_python(__package__, AbsentParameter, AbsentTensor)
    refuse_unasked(Absent, lambda what, tensor: place_of([tensor]).refuse(what))


def unmark(tensor: Tensor) -> None:
    """Give a parameter or buffer its class back, before its values are restored."""
    if isinstance(tensor, Absent):
        place: AbsentPlace = vars(tensor).pop(_PLACE)
        tensor.__class__ = place.kind  # type: ignore[assignment]


@contextlib.contextmanager
def reading_gradients() -> Iterator[None]:
    """In this context, reading the gradient of an absent parameter does not warn: for optimizers, which skip it."""
    token = _readers.set(True)
    try:
        yield
    finally:
        _readers.reset(token)


def place_of(args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> AbsentPlace:
    """The record of the first absent tensor among the arguments of a call."""
    pending = [*args, *(kwargs or {}).values()]
    while pending:
        value = pending.pop(0)
        if isinstance(value, Absent):
            found: AbsentPlace = getattr(value, _PLACE)
            return found
        if isinstance(value, (list, tuple)):
            pending = [*value, *pending]
    raise AssertionError("an absent tensor brought us here")


# -- rules: (function, arguments, keyword arguments) -> what it returns -------------------------------------------------


def _run(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **(kwargs or {}))


def _run_in_place(
    name: str, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], *, is_of_script: bool
) -> Any:
    """In-place operations on an absent tensor do nothing, unless it is out of date. Others cannot be changed by an absent one."""
    place = place_of(args, kwargs)
    if place.owner is not None:
        return _write(name, func, args, kwargs)
    target = next(iter((*args, *kwargs.values())))
    if isinstance(target, Absent):
        if name in _DRAWING:
            _draw(func, place, target, args, kwargs)
        elif is_of_script and place.writes is not None:
            place.writes.note_of_one(place.name, name, numbers_of_one(args, kwargs), is_here=False)
        return target
    if is_of_script and _is_between_steps(place, args, kwargs):
        return _without_rows(name, func, args, kwargs)
    try:
        return _run(func, args, kwargs)
    except (RuntimeError, TypeError, IndexError) as error:  # about sizes
        raise place.refuse(name) from error


def _write(name: str, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Among tensors that are out of date: refused where others would come to depend on their values."""
    target, *others = *args, *kwargs.values()
    targets = target if isinstance(target, (list, tuple)) else [target]
    renewed = []
    for position, written in enumerate(targets):
        own = [other[position] if type(other) in (list, tuple) and targets is target else other for other in others]
        stale = [other for other in own if isinstance(other, Absent)]
        if stale and not isinstance(written, Absent):
            raise place_of(stale).refuse(name)
        if not stale and isinstance(written, Absent) and name.removeprefix("_foreach") in _FILLING:
            renewed.append(written)
    found = _run(func, args, kwargs)
    for written in renewed:
        _renew(written)
    return found


def _renew(target: Absent) -> None:
    """All of it has been written: it, and the parameter of which it is all, have their values."""
    place: AbsentPlace = getattr(target, _PLACE)
    owner = None if place.owner is None else place.owner()
    with torch._C.DisableTorchFunctionSubclass():
        is_all = owner is not None and (owner.data_ptr(), owner.numel()) == (target.data_ptr(), target.numel())
    if is_all:
        assert owner is not None
        unmark(owner)
    if isinstance(target, Absent):
        unmark(target)
        target.__class__ = Tensor  # type: ignore[assignment]


def _draw(
    func: Callable[..., Any], place: AbsentPlace, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Draw what the holders draw, so that what comes next is drawn as in one process."""
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        func(torch.empty(place.drawn, dtype=target.dtype, device=target.device), *args[1:], **kwargs)


def _ignore(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Does nothing: the holders do it."""


def _set_data(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """`p.data = values` does nothing where memory was freed: the holders do it."""
    place, value = place_of(args), args[1]
    if isinstance(value, Absent):
        _run(func, args, kwargs)
    elif place.owner is not None:
        _run(func, args, kwargs)
        _renew(args[0])
    elif not value.numel():
        _run(func, args, kwargs)
    elif value.shape != place.shape:
        raise place.refuse(f"setting .data to a tensor of shape {list(value.shape)}")


def _alias(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    place = place_of(args, kwargs)
    if not isinstance(args[0], Absent):
        return _shape(func, args, kwargs)
    found = _run(func, args, kwargs)
    return _marked(found.as_subclass(AbsentTensor), place, AbsentTensor) if isinstance(found, Tensor) else found


def _is_between_steps(place: AbsentPlace, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a script may compute with what it has nothing of: nothing is recorded."""
    if place.owner is not None or are_plain():
        return False
    leaves = (each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor))
    return not (torch.is_grad_enabled() and any(each.requires_grad for each in leaves))


def _without_rows(what: str, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What a function of a script returns for tensors without rows."""

    def told(value: Any) -> Any:
        if not isinstance(value, Absent):
            return value
        place: AbsentPlace = getattr(value, _PLACE)
        with torch._C.DisableTorchFunctionSubclass():
            values = value.detach().as_subclass(Tensor)
            return without_rows(place.name, value, values, place.ranks, place.text, place.refuse, place.writes)

    given, named = tree_map(told, (tuple(args), dict(kwargs)))
    try:
        return answered(func, given, named)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:  # about sizes
        view = _view(func, args, kwargs)
        if view is not None:
            return view
        if isinstance(error, UsageError):
            raise
        raise place_of(args, kwargs).refuse(what) from error


def _view(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """An absent tensor for a view of one, such as a row of it; None: it is no view."""
    if not isinstance(args[0], Absent):
        return None
    place: AbsentPlace = getattr(args[0], _PLACE)
    whole = torch.empty(place.shape, dtype=args[0].dtype, device="meta")
    try:
        found = func(whole, *args[1:], **kwargs)
    except (RuntimeError, TypeError, ValueError, IndexError):
        return None
    if not isinstance(found, Tensor) or found.untyped_storage()._cdata != whole.untyped_storage()._cdata:
        return None
    place = dataclasses.replace(place, shape=found.shape, whole=None)
    return _marked(empty(found, found.shape, args[0].device).as_subclass(AbsentTensor), place, AbsentTensor)


def _shape(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What takes only its shape and dtype, which it has where its memory was not freed."""
    place = place_of(args, kwargs)
    if place.owner is not None:
        return _run(func, args, kwargs)
    if _is_library(sys._getframe(2).f_globals) or not _is_between_steps(place, args[1:], kwargs):
        raise place.refuse(func.__name__)
    return _without_rows(func.__name__, func, args, kwargs)


def _size(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Its holders' for scripts; libraries see the tensor that is there."""
    place = place_of(args, kwargs)
    if place.owner is not None or _is_library(sys._getframe(2).f_globals):
        return _run(func, args, kwargs)
    return func(torch.empty(place.shape, device="meta"), *args[1:], **kwargs)


def _memory(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Where it is in memory: other code than torch's goes there for its values."""
    place = place_of(args, kwargs)
    if place.owner is not None and not _is_library(sys._getframe(2).f_globals):
        raise place.refuse(func.__name__)
    return _run(func, args, kwargs)


def _gradient(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """See above. Code that sums over all gradients gets a warning, once per line."""
    reader = sys._getframe(2)
    if _is_library(reader.f_globals) or _readers.get():
        return None
    place, line = place_of(args), (reader.f_code.co_filename, reader.f_lineno)
    if line not in _warned:
        _warned.add(line)
        warnings.warn(
            f"the gradient of parameter {place.name!r} is {place.text}, and pipeline rank {place.rank} has nothing of it: what is done to "
            f"each gradient by itself is right, but a sum over all of them (a norm) is that of this rank alone. {place.texts.gradients}",
            stacklevel=3,
        )
    if place.owner is not None or are_plain() or not args[0].requires_grad or not place.have_gradients():
        return None
    with torch._C.DisableTorchFunctionSubclass():
        values = torch.empty_like(args[0].detach().as_subclass(Tensor))
    return without_rows(place.name, args[0], values, place.ranks, place.text, writes=place.writes)


def _is_library(names: Mapping[str, Any]) -> bool:
    return str(names.get("__name__", "")).startswith(("torch.", "smpc."))


def _hash(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    return id(args[0])


def _marked(tensor: Tensor, place: AbsentPlace, kind: type[Absent]) -> Any:
    tensor.__class__ = kind
    setattr(tensor, _PLACE, place)
    return tensor


def _functions(names: str) -> list[Any]:
    """Getters of attributes, and methods, of Tensor."""
    found = [getattr(Tensor, name) for name in names.split()]
    return [each if callable(each) else each.__get__ for each in found]


def _setter(name: str) -> Any:
    return getattr(Tensor, name).__set__


_RULES: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(
        _functions(
            "requires_grad dtype device is_leaf grad_fn layout is_meta is_cuda is_cpu is_sparse is_quantized is_nested _version "
            "_backward_hooks _base name grad_dtype retains_grad output_nr itemsize is_complex is_floating_point is_contiguous "
            "element_size storage_offset _is_view get_device register_hook requires_grad_ share_memory_ "
            "register_post_accumulate_grad_hook "
            "is_shared is_pinned is_inference is_signed is_conj is_neg ndim nbytes dim ndimension stride"
        ),
        _run,
    ),
    **dict.fromkeys((torch.is_floating_point, torch.is_complex, torch.is_inference, torch.is_conj, torch.is_neg), _run),
    torch._has_compatible_shallow_copy_type: _run,
    **dict.fromkeys(_functions("data_ptr untyped_storage"), _memory),
    **dict.fromkeys(
        (torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like, torch.rand_like, torch.randn_like),
        _shape,
    ),
    **dict.fromkeys(
        _functions("data detach clone view_as contiguous to float half double bfloat16 cpu cuda type pin_memory"),
        _alias,
    ),
    **dict.fromkeys((torch.detach, torch.clone), _alias),
    **dict.fromkeys(_functions("grad"), _gradient),
    **dict.fromkeys((*_functions("shape size numel nelement __len__"), torch.numel), _size),
    _setter("data"): _set_data,
    _setter("grad"): _ignore,
    _setter("requires_grad"): _run,
    _setter("grad_dtype"): _run,
    Tensor.__hash__: _hash,
}
_DRAWING = (
    "bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_", "uniform_",
    "kaiming_uniform_",  # of torch.nn.init, with a name of its own for these classes
)  # fmt: skip
_FILLING = ("copy_", "fill_", "zero_", "constant_", *_DRAWING)  # all of it anew
_WRITING = ("__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__", "__setitem__")
