"""The arguments of a step function: bound to its parameters, split into microbatches, and sent to the rank that runs the function.

    train_step(model, batch, n=3)  -> bind  -> {"model": model, "batch": batch, "n": 3}  -> split -> one such dict for each microbatch

Terms
    arguments     parameter name -> value, as the function's signature binds them. Each keyword that only a `**kwargs` takes has its own
                  name; all of `*args` is one argument called by its name
    body          the function and its rules for splitting
    form          rank 0's arguments that hold tensors, with a `Slot` for every tensor, a `SlicedArgument` for an object that splits itself,
                  and a `PlainArgument` for every other leaf
    merged        the last rank's arguments with the form's put in
    container     list, tuple, named tuple, set, frozenset, or mutable mapping (dict and its kin, Hugging Face's ModelOutput and
                  BatchEncoding): opened, and rebuilt of the same type when something inside has changed
    leaf          everything else. An object with `smp_slice(num_mb, mb, axis)` is a leaf, whatever it is made of
    path          how a leaf is reached from the argument, as Python: `batch['input_ids']`

Every tensor in the arguments is split. Tensors are narrowed along an axis into equal parts; an object with `smp_slice` is split by calling
it; any other leaf goes to every microbatch unchanged. A tensor without dimensions cannot be split and is such a leaf.

    >>> parts = split_argument({"x": torch.arange(4), "scale": 2}, "batch", num_microbatches=2)
    >>> parts[1]
    {'x': tensor([2, 3]), 'scale': 2}

Only pipeline rank 0's tensors count, but the step function runs on the last rank. So the tensors of rank 0's arguments, wherever they are
in containers, and its objects that split themselves, replace the last rank's values at the same place; the last rank's other arguments
(model, optimizer, flags) are its own.

    rank 0:  train_step(model, {"x": tensor, "n": 3}, True)     form: {"batch": {"x": Slot(0), "n": Plain(3)}}
    last:    train_step(model, None, True)                      merged: model, {"x": tensor, "n": 3}, True

If the last rank passes a container of the same shape, its plain leaves are used; otherwise rank 0's, if they can be sent.

Source: public SMP v1 API (`smp.step`).
"""

from __future__ import annotations

import inspect
import io
import pickle
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar, Protocol, runtime_checkable
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from smpc.containers import rebuilt
from smpc.errors import StepError
from smpc.executor.transport.messages import WireFormat
from smpc.nn.script_writes.slice_numbers import KINDS
from smpc.nn.script_writes.slice_provenance import refuse_of_slices
from smpc.nn.script_writes.slice_values import SlicePartValues, SliceValues
from smpc.tracer.constants import is_constant, normalise
from smpc.tracer.ir import TensorSpec, spec_of

Arguments = dict[str, Any]
_PLAIN = frozenset(
    {list, tuple, dict, set, frozenset, str, int, float, bool, type(None)}
)  # types that are checked quickly
_OF_SLICES = KINDS | {SliceValues, SlicePartValues}


class StepBody:
    """The function under `@smp.step`.

    `non_split_inputs`: names of arguments that every microbatch gets whole. `input_split_axes`: name -> axis, 0 for the others.
    `detach_outputs`: what the function returns loses its history.
    Raises StepError for names that the function does not have.
    """

    known: ClassVar[WeakValueDictionary[int, StepBody]] = WeakValueDictionary()  # by number, the last one of a name

    def __init__(
        self,
        function: Callable[..., Any],
        non_split_inputs: Iterable[str],
        input_split_axes: Mapping[str, int],
        detach_outputs: bool,
    ) -> None:
        if isinstance(non_split_inputs, Iterable) and not isinstance(non_split_inputs, str):
            non_split_inputs = list(non_split_inputs)  # it may be an iterator
        _check_options(function, non_split_inputs, input_split_axes)
        self.function = function
        self.detach_outputs = detach_outputs
        self.name = f"{function.__module__}.{function.__qualname__}"
        self.number = zlib.crc32(self.name.encode())  # the same on every rank
        StepBody.known[self.number] = self
        self._signature = inspect.signature(function)
        self._whole = frozenset(non_split_inputs)
        self._axes = dict(input_split_axes)
        self._keywords = self._parameter_of_kind(inspect.Parameter.VAR_KEYWORD)
        self._check_names()

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Arguments:
        """The arguments of a call. Raises TypeError as the call itself would."""
        arguments: Arguments = dict(self._signature.bind(*args, **kwargs).arguments)
        if self._keywords in arguments:
            arguments.update(arguments.pop(self._keywords))
        if not _OF_SLICES.isdisjoint(map(type, arguments.values())):
            refuse_of_slices(f"step function {self.name}: an argument", *arguments.values())
        return arguments

    def call(self, arguments: Arguments) -> Any:
        """The function's result for these arguments."""
        known, more = arguments, {}
        if self._keywords:
            known = {name: value for name, value in arguments.items() if name in self._signature.parameters}
            more = {name: value for name, value in arguments.items() if name not in known}
        bound = inspect.BoundArguments(self._signature, known)
        return self.function(*bound.args, **bound.kwargs, **more)

    def split(self, arguments: Arguments, num_microbatches: int, device: torch.device) -> list[Arguments]:
        """The arguments of every microbatch. `device`: the device of their tensors, see `on_device`.

        Raises StepError, with a line for every tensor that does not divide.
        """
        wrong: list[str] = []
        for name, value in arguments.items():
            if name not in self._whole:
                wrong += check_argument(value, name, num_microbatches, self._axes.get(name, 0))
        if wrong:
            more = "drop the last batch, change microbatches, or name the argument in non_split_inputs"
            raise StepError("\n".join([f"step function {self.name} cannot split its batch; {more}", *wrong]))
        microbatches: list[Arguments] = list(map(dict, [()] * num_microbatches))
        for name, value in arguments.items():
            parts = [value] * num_microbatches
            if name not in self._whole:
                parts = split_argument(value, name, num_microbatches, self._axes.get(name, 0), device)
            for microbatch, part in zip(microbatches, parts, strict=True):
                microbatch[name] = part
        return microbatches

    def _parameter_of_kind(self, kind: Any) -> str:
        return next((p.name for p in self._signature.parameters.values() if p.kind is kind), "")

    def _check_names(self) -> None:
        if self._keywords:
            return
        known = list(self._signature.parameters)
        unknown = [name for name in (*sorted(self._whole), *self._axes) if name not in known]
        if unknown:
            raise StepError(
                f"step function {self.name}: non_split_inputs and input_split_axes name the parameters "
                f"{', '.join(known) or '(none)'}; found {', '.join(unknown)}"
            )


def _check_options(function: Any, whole: Any, axes: Any) -> None:
    """Raise StepError, with a line for each, for options of the wrong type: a str would be taken for the names of its letters."""
    wrong = []
    if not isinstance(whole, list) or not all(isinstance(name, str) for name in whole):
        wrong.append(f"non_split_inputs: expected a list of names, found {whole!r}")
    if not isinstance(axes, Mapping):
        wrong.append(f"input_split_axes: expected a dict from name to axis, found {axes!r}")
    else:
        wrong += [
            f"input_split_axes: expected an int as the axis of {name!r}, found {axis!r}"
            for name, axis in axes.items()
            if not isinstance(axis, int) or isinstance(axis, bool)
        ]
    if wrong:
        raise StepError("\n".join([f"step function {getattr(function, '__qualname__', function)}:", *wrong]))


@runtime_checkable
class Sliceable(Protocol):
    """A user's object that knows how to be split."""

    def smp_slice(self, num_mb: int, mb: int, axis: int) -> Any:
        """Microbatch `mb` of `num_mb`, cut along `axis`."""


def map_leaves(value: Any, function: Callable[[Any, str], Any], path: str) -> Any:
    """The value with `function(leaf, path)` in place of every leaf; the value itself if no leaf has changed."""
    steps, children = _open(value)
    if steps is None:
        return function(value, path)
    new = [map_leaves(child, function, path + step) for step, child in zip(steps, children, strict=True)]
    if all(a is b for a, b in zip(new, children, strict=True)):
        return value
    return rebuilt(value, new)


def shared_containers(value: Any) -> Iterator[Any]:
    """The containers of an argument that every microbatch gets as they are, and that can be changed: without tensors in them."""
    steps, children = _open(value)
    if steps is not None and not isinstance(value, (tuple, frozenset)) and not _holds_tensor(value):
        yield value
    for child in children:
        yield from shared_containers(child)


def _holds_tensor(value: Any) -> bool:
    _, children = _open(value)
    return isinstance(value, Tensor) or slices_itself(value) or any(map(_holds_tensor, children))


def slices_itself(value: Any) -> bool:
    """Whether an object knows how to be split."""
    if type(value) in _PLAIN or isinstance(value, type):
        return False
    # On the class, since a DistributedModel would look it up in its module.
    return isinstance(value, Sliceable) if not isinstance(value, nn.Module) else hasattr(type(value), "smp_slice")


def _open(value: Any) -> tuple[list[str] | None, list[Any]]:
    """The path steps and children of a container; (None, []) for a leaf."""
    if isinstance(value, (Tensor, torch.Size, nn.Module, str)) or slices_itself(value):
        return None, []
    if isinstance(value, (list, tuple, set, frozenset)):
        children = list(value)
        return [f"[{i}]" for i in range(len(children))], children
    if isinstance(value, MutableMapping):
        return [f"[{key!r}]" for key in value], list(value.values())
    return None, []


def on_device(arguments: Arguments, device: torch.device) -> Arguments:
    """The arguments with their tensors on the device."""

    def move(leaf: Any, path: str) -> Any:
        return leaf.to(device, non_blocking=True) if isinstance(leaf, Tensor) else leaf

    moved: Arguments = {}
    for name, value in arguments.items():
        moved[name] = map_leaves(value, move, "")
    return moved


def check_argument(value: Any, name: str, num_microbatches: int, axis: int = 0) -> list[str]:
    """The reasons why an argument cannot be split: one line for each tensor, with its path, size and axis."""
    wrong: list[str] = []

    def check(leaf: Any, path: str) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.dim():
            return leaf
        if not -leaf.dim() <= axis < leaf.dim():
            wrong.append(f"argument {path}: expected a tensor with an axis {axis}, found shape {list(leaf.shape)}")
            return leaf
        size = leaf.shape[axis]
        if not size or size % num_microbatches:
            wrong.append(
                f"argument {path}: size {size} of axis {axis} is not a multiple of microbatches = {num_microbatches} "
                f"(shape {list(leaf.shape)})"
            )
        return leaf

    map_leaves(value, check, name)
    return wrong


def split_argument(
    value: Any, name: str, num_microbatches: int, axis: int = 0, device: torch.device | None = None
) -> list[Any]:
    """The argument of every microbatch. `check_argument` must have found nothing.

    `device`: the device for tensors in the results of objects that split themselves.
    """

    def part(leaf: Any, path: str, index: int) -> Any:
        if isinstance(leaf, Tensor):
            if not leaf.dim():
                return leaf
            size = leaf.shape[axis] // num_microbatches
            return leaf.narrow(axis, index * size, size)
        if slices_itself(leaf):
            own = leaf.smp_slice(num_microbatches, index, axis)
            return own if device is None else on_device({"": own}, device)[""]
        return leaf

    parts = []
    for index in range(num_microbatches):
        parts.append(map_leaves(value, partial(part, index=index), name))
    return parts


@dataclass(frozen=True, slots=True)
class Slot:
    """A tensor; `index` is its place among those that are sent."""

    index: int


@dataclass(frozen=True, slots=True)
class PlainArgument:
    """Any other leaf. `sent`: `value` is rank 0's; otherwise rank 0's value cannot be sent."""

    value: Any = None
    sent: bool = False


@dataclass(frozen=True, slots=True)
class SlicedArgument:
    """Rank 0's object that splits itself: a pickle without its tensors, and these, with whether each is on the CPU."""

    pickled: bytes
    slots: tuple[tuple[Slot, bool], ...]

    def build(self, tensors: list[Tensor]) -> Any:
        """The object on another rank."""
        own = [tensors[slot.index].cpu() if is_on_cpu else tensors[slot.index] for slot, is_on_cpu in self.slots]
        return _Unpickler(self.pickled, own).load()


class _Pickler(pickle.Pickler):
    """Leaves tensors out, in `slots`."""

    def __init__(self, buffer: io.BytesIO, slot_of: Callable[[Tensor], Slot]) -> None:
        super().__init__(buffer)
        self._slot_of = slot_of
        self.slots: list[tuple[Slot, bool]] = []

    def persistent_id(self, obj: Any) -> int | None:
        """The number of a tensor."""
        if not isinstance(obj, Tensor):
            return None
        self.slots.append((self._slot_of(obj), obj.is_cpu))
        return len(self.slots) - 1


class _Unpickler(pickle.Unpickler):
    """Puts tensors back."""

    def __init__(self, pickled: bytes, tensors: list[Tensor]) -> None:
        super().__init__(io.BytesIO(pickled))
        self._tensors = tensors

    def persistent_load(self, pid: int) -> Tensor:
        """The tensor of a number."""
        return self._tensors[pid]


def _taken_apart(value: Any, path: str, slot_of: Callable[[Tensor], Slot]) -> SlicedArgument:
    """See `SlicedArgument`. StepError for an object that cannot be pickled."""
    buffer = io.BytesIO()
    pickler = _Pickler(buffer, slot_of)
    try:
        pickler.dump(value)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise StepError(
            f"argument {path}: expected an object with smp_slice that can be pickled, as the rank of the last stage needs pipeline rank "
            f"0's, found a {type(value).__qualname__}: {error}; define its class at the top level of a module"
        ) from error
    return SlicedArgument(buffer.getvalue(), tuple(pickler.slots))


@dataclass(frozen=True)
class ArgumentForm:
    """The form of rank 0's arguments, with the specs of the tensors."""

    skeleton: Arguments
    specs: tuple[TensorSpec, ...]

    @cached_property
    def formats(self) -> tuple[WireFormat, ...]:
        """How the tensors travel."""
        return tuple(WireFormat.of(f"tensor argument {i}", spec) for i, spec in enumerate(self.specs))


def form_of(
    arguments: Arguments, *, device: torch.device | None = None, detached: bool = False
) -> tuple[ArgumentForm, list[Tensor]]:
    """The form of rank 0's arguments, and the tensors to send; one that occurs twice is sent once.

    `device`: of tensors inside of objects that split themselves, on the way. `detached`: raise StepError for a tensor that requires grad,
    whose gradient would not come back from the last rank.
    """
    tensors: list[Tensor] = []
    specs: list[TensorSpec] = []
    slots: dict[int, tuple[Slot, Tensor]] = {}  # by identity, while the tensor lives
    holds_tensor = False

    def replace(leaf: Any, path: str) -> Any:
        nonlocal holds_tensor
        if isinstance(leaf, nn.Module):
            return PlainArgument()  # the model, as a rule
        if slices_itself(leaf):
            holds_tensor = True
            return _taken_apart(leaf, path, partial(replace, path=path))
        if not isinstance(leaf, Tensor):
            leaf = normalise(leaf)
            return PlainArgument(leaf, sent=True) if is_constant(leaf) else PlainArgument()
        holds_tensor = True
        if detached and leaf.requires_grad:
            raise StepError(
                f"argument {path} requires grad, but its gradient would not come back: the rank that computes the loss uses a copy, or "
                "a part of the sequence; pass it detached (.detach()), or put what computes it, or the parameter itself, into the model"
            )
        if id(leaf) not in slots:
            slots[id(leaf)] = Slot(len(tensors)), leaf
            tensors.append(leaf if device is None else leaf.to(device))
            specs.append(spec_of(leaf.shape, leaf.dtype, leaf.stride() if leaf.layout is torch.strided else ()))
        return slots[id(leaf)][0]

    skeleton: Arguments = {}
    for name, value in arguments.items():
        holds_tensor = False
        replaced = map_leaves(value, replace, name)
        if holds_tensor:
            skeleton[name] = replaced
    return ArgumentForm(skeleton, tuple(specs)), tensors


def own_tensors(form: ArgumentForm, own: Arguments) -> dict[int, Tensor]:
    """A rank's own tensors at the places of rank 0's, by slot."""
    found: dict[int, Tensor] = {}
    for name, skeleton in form.skeleton.items():
        slots: dict[str, int] = {}

        def note(leaf: Any, path: str, slots: dict[str, int] = slots) -> Any:
            if isinstance(leaf, Slot):
                slots[path] = leaf.index
            return leaf

        def match(leaf: Any, path: str, slots: dict[str, int] = slots) -> Any:
            if isinstance(leaf, Tensor) and path in slots:
                found.setdefault(slots[path], leaf)
            return leaf

        map_leaves(skeleton, note, name)
        map_leaves(own.get(name), match, name)
    return found


def merge_arguments(form: ArgumentForm, own: Arguments, tensors: list[Tensor]) -> Arguments:
    """The last rank's arguments with rank 0's tensors in their places.

    Raises StepError for a leaf that only rank 0 has and that cannot be sent.
    """

    def put(name: str) -> Any:
        leaves: dict[str, Any] = {}
        map_leaves(own.get(name), lambda leaf, path: leaves.setdefault(path, leaf), name)

        def fill(leaf: Any, path: str) -> Any:
            if isinstance(leaf, Slot):
                return tensors[leaf.index]
            if isinstance(leaf, SlicedArgument):
                return leaf.build(tensors)
            if path in leaves and not isinstance(leaves[path], Tensor):
                return leaves[path]
            if not leaf.sent:
                raise StepError(
                    f"argument {path}: pipeline rank 0 has an object there that cannot be sent to the rank of the "
                    "last stage, and that rank passes nothing in its place; pass it as an argument of its own"
                )
            return leaf.value

        return map_leaves(form.skeleton[name], fill, name)

    # Rank 0's order if both have the argument; the function is called by name, so order has no other meaning.
    return {**own, **{name: put(name) for name in form.skeleton}}
