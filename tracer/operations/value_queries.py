"""Calls that need the values of tensors, which a fake run does not have.

The result of such a call is, in this order,

    1. where only the size of the result depends on values, a tensor of an invented size (`DataSized`);
    2. what it gives if its checks hold, where it asks no more: the program makes them (`require`);
    3. an answer from the sample inputs, or from an earlier trace, with a guard (see `smpc.tracer.input_guards`);
    4. what it gives with numbers in place of tensors of one element, if these are known.

Otherwise it is an error, and the module around it becomes a leaf (see `smpc.tracer.operations.opaque`).

`run_ctc`: the CTC loss, whose kernel walks over targets of lengths that a fake run does not have.

The lengths decide how large a table the kernel saves for its backward: log_probs [T, N, C], targets of at most S labels, table
[N, T, 2 S + 1]. They do not matter for the loss: a scalar, or [N] without a reduction. S is taken as large as the targets allow.

`run_packed`: recurrent layers over packed sequences, for which torch has no kernel without values.

A packed sequence is (data [sum of lengths, features], batch sizes by time step). The batch sizes decide how the layer walks over the
data, not what shapes it returns: data [sum of lengths, directions * hidden], and states as they were given.

`DataSized`: tensors whose sizes depend on values, such as `losses[mask]`, `labels.masked_select(mask)` and `mask.nonzero()`.

A recording has no values, so it invents a size: the largest one, as if all of the mask were true. A call with such a tensor runs at two
sizes. A result that is equal at both does not depend on the size (a mean, a loss), and has a spec like all others. Other results are
data-sized in turn: their node has no spec, so it stays on the stage that makes it, and microbatches may differ in it.

Python that asks for such a size (`chosen.shape[0]`, `for row in chosen`) needs the true one. The recording then starts again, and the call
that made the tensor is a question about values (see `smpc.tracer.input_guards`), known by its key.

Sizes that depend on parameters are left to a module that is called whole (see `smpc.tracer.operations.opaque`), whose costs are measured:
the largest size for each expert of a mixture would be all tokens. Only the model's own forward has such sizes, and modules that cannot be
called whole.

    key     where the size was made: the module's name, and how many the module had made before in this run; "encoder.layers.0#1"

Example: in `(prediction - target)[mask].pow(2).mean()` of shapes [4, 3], the values of the index and of `pow` are data-sized, the
value of `mean` is a scalar.

Checks of values that raise an error and have no other result, so that a program can make them where the values are.

    torch.distributions.Normal(mean, std)       raises ValueError for a standard deviation that is not positive
    torch._assert_async((x < 100).all(), ...)   raises RuntimeError
    F.gaussian_nll_loss(mean, target, var)      raises ValueError for a negative variance

torch.distributions asks `if not torch._is_all_true(valid)`. A recording has no values: it goes on as if all were valid, and notes a call of
`require`, which raises the error in the program otherwise. Nodes of checks count as writing into what they check: so they are never left
out.

A function of torch's that is written in Python is one node, whatever it asks. If all that it asks of values is whether to raise an error, a
recording runs it as if they were valid (`run_unchecked`); the program runs it with values, and it checks them.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from functools import lru_cache
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from smpc.tracer import targets
from smpc.tracer.constants import references
from smpc.tracer.effects.differentiation import joined
from smpc.tracer.effects.torch_calls import tensors_in
from smpc.tracer.input_guards import NoAnswerError, is_fixed, origins, written_state
from smpc.tracer.operations.meter import Meter
from smpc.tracer.recording.untraceable import UntraceableError, calling_frame
from smpc.tracer.structure import flatten

if TYPE_CHECKING:
    from smpc.tracer.recording.recorder import Recorder


REQUIRE = f"{__name__}.require"
_CHECKED_IN = "torch.distributions.distribution"
_NUMBERS = frozenset({"item", "tolist", "float", "int", "complex", "len", "range"})
_VALUE_OF = torch.ops.aten._local_scalar_dense.default


def require(valid: torch.Tensor, message: str) -> None:
    """Raise ValueError with this message unless all of `valid` is true."""
    if not valid.all():
        raise ValueError(message)


def is_assertion(func: Callable[..., Any]) -> bool:
    """Whether a call checks its first argument and does nothing else."""
    return func is torch._assert_async


def refusal(func: Callable[..., Any], frame: FrameType) -> str:
    """What torch.distributions would say of invalid values, if that is what it asks for in this frame; else ""."""
    if getattr(func, "__name__", "") != "__bool__" or frame.f_globals.get("__name__") != _CHECKED_IN:
        return ""
    found = frame.f_locals
    what = f"parameter {found['param']}" if "param" in found else "the value"
    constraint = type(found.get("constraint", found.get("support"))).__name__.lstrip("_")
    return (
        f"expected {what} of the distribution {type(found['self']).__name__} to satisfy its constraint ({constraint}), found invalid "
        "values; validate_args=False turns this check off"
    )


def run_unchecked(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The result over fakes of a function that `has_checks`, as if none of them failed. Raises as torch does where it asks for more."""
    code = func.__code__
    with _Valid(_lines_of_checks(code), code), torch._C.DisableTorchFunction():
        return func(*args, **kwargs)


def has_checks(func: Callable[..., Any]) -> bool:
    """Whether this is a function of torch's whose Python raises errors on conditions."""
    is_of_torch = str(getattr(func, "__module__", "")).split(".")[0] == "torch"
    return is_of_torch and hasattr(func, "__code__") and bool(_lines_of_checks(func.__code__))


class _Valid(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers the questions for values that lines of a function ask. `lines`: the answers with which it goes on."""

    def __init__(self, lines: Mapping[int, bool], code: CodeType) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._lines, self._code = lines, code

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _VALUE_OF:
            answer = self._lines.get(next((frame.f_lineno for frame in _frames() if frame.f_code is self._code), 0))
            if answer is not None:
                return answer
        return func(*args, **(kwargs or {}))


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


@lru_cache(maxsize=64)
def _lines_of_checks(code: CodeType) -> dict[int, bool]:
    """By each line on which only a check is made, whether it asks for a true value: `if not x: raise`; else False: `if x: raise`."""
    try:
        lines, first = inspect.getsourcelines(code)
    except OSError:
        return {}
    found: dict[int, bool] = {}
    for node in ast.walk(ast.parse(textwrap.dedent("".join(lines)))):
        if isinstance(node, ast.If) and isinstance(node.body[0], ast.Raise) and _asks_for_truth(node.test):
            is_negated = isinstance(node.test, ast.UnaryOp) and isinstance(node.test.op, ast.Not)
            end = node.test.end_lineno or node.test.lineno
            found.update(dict.fromkeys(range(first + node.test.lineno - 1, first + end), is_negated))
    return found


def _asks_for_truth(test: ast.expr) -> bool:
    """Whether a condition can ask of values only whether one tensor is true: it takes no number out, and combines nothing in Python."""
    taken = {node.attr for node in ast.walk(test) if isinstance(node, ast.Attribute)}
    taken |= {node.id for node in ast.walk(test) if isinstance(node, ast.Name)}
    combined = any(isinstance(node, ast.BoolOp | ast.IfExp | ast.comprehension) for node in ast.walk(test))
    return not combined and taken.isdisjoint(_NUMBERS)


Call = Callable[..., Any]

UNTRACEABLE = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)


class Values:
    """Such calls of one recording."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._askers: list[tuple[nn.Module | None, str]] = []  # of each guard, the module that asked, and where

    def call(self, func: Call, args: tuple[Any, ...], kwargs: Mapping[str, Any], error: Exception) -> Any:
        """The result of a call that has failed over fakes. Raises UntraceableError."""
        recorder = self._recorder
        if message := refusal(func, calling_frame()):
            name = recorder.known(args[0])
            if name and not is_fixed(recorder.nodes, (name,)):  # ranks without inputs do the same
                recorder.add_check(args[0], message)
                return True
        if isinstance(error, DataDependentOutputException) and has_checks(func):
            recorder.begin_call()
            try:
                return run_unchecked(func, args, kwargs)
            except UNTRACEABLE as still:
                error = still
        sizes = recorder.sizes
        key = sizes.next_key(recorder.context()) if isinstance(error, DynamicOutputShapeException) else ""
        try:
            with torch._C.DisableTorchFunction():
                made = sizes.make(key, func, args, kwargs) if key and self._may_invent(func, args, kwargs) else None
                return self.ask(func, args, kwargs, key if key in sizes.asked else "") if made is None else made
        except NoAnswerError as reason:
            found = self._with_numbers(func, args, kwargs)
            if found is None:
                what = f"torch.{getattr(func, '__name__', func)} needs the values of a tensor, or has no shape rule"
                raise recorder.error(f"{what} ({type(error).__name__}: {error}), and {reason}") from error
            return found

    def ask(self, func: Call, args: tuple[Any, ...], kwargs: Mapping[str, Any], size: str = "") -> Any:
        """The result of a call, known from the sample inputs or from earlier answers; a guard records the assumption."""
        recorder = self._recorder
        used = (
            [tensor for tensor in tensors_in((args, kwargs)) if tensor.requires_grad] if torch.is_grad_enabled() else []
        )
        target, args = targets.name_call(func, args)
        arguments = recorder.arguments(target, args, kwargs)
        with recorder.inside_call():
            found = recorder.questions.ask(recorder.nodes, target, *arguments, used, size)
        if len(recorder.questions.guards) > len(self._askers):
            self._askers.append((recorder.open[-1].module if recorder.open else None, recorder.context()))
        return found

    def check(self) -> None:
        """Raise UntraceableError if an answer rests on a buffer that the model writes: each run may find another value in it."""
        recorder = self._recorder
        written = written_state(recorder.nodes)
        for guard, (module, place) in zip(recorder.questions.guards, self._askers, strict=True) if written else ():
            names = origins(recorder.nodes, guard.target, guard.args, dict(guard.kwargs)) or ()
            found = next((name for name in names for pattern in written if fnmatchcase(name, pattern)), None)
            if found is not None:
                raise UntraceableError.inside(
                    module,
                    place,
                    guard.source,
                    f"Python needs the value of buffer {found}, which the model writes in each run",
                )

    def _may_invent(self, func: Call, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether a size that depends on values is invented: not where it is known, or a module can be called whole instead."""
        recorder = self._recorder
        target, args = targets.name_call(func, args)
        node_args, node_kwargs = recorder.arguments(target, args, kwargs)
        if is_fixed(recorder.nodes, references((node_args, dict(node_kwargs)))):
            return False  # known without a guard
        if recorder.sizes.everywhere or not recorder.context():
            return True
        found = origins(recorder.nodes, target, node_args, dict(node_kwargs))
        return found is not None and all(name in recorder.state.real_buffers for name in found)

    def _with_numbers(self, func: Call, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The result of a call with numbers in place of tensors of one element, such as sizes, if these are known; else None."""

        def number(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return value if value.dim() else self.ask(torch.Tensor.item, (value,), {})
            return type(value)(map(number, value)) if type(value) in (tuple, list) else value

        try:
            with torch._C.DisableTorchFunction():
                numbers = number(list(args)), {key: number(value) for key, value in kwargs.items()}
            return func(*numbers[0], **numbers[1])
        except (NoAnswerError, *UNTRACEABLE):
            return None


def is_ctc(func: Callable[..., Any]) -> bool:
    """Whether the call is of `torch.ctc_loss`, or of the function around it."""
    return getattr(func, "__name__", "") == "ctc_loss"


def run_ctc(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: int | str = "mean",
    zero_infinity: bool = False,
) -> torch.Tensor:
    """The call's result over fakes; autograd saves the same as for real, or a little more."""
    longest = targets.shape[-1] if isinstance(target_lengths, torch.Tensor) else max(target_lengths, default=0)
    losses: torch.Tensor = _FakeLosses.apply(log_probs, targets, longest)  # type: ignore[no-untyped-call]
    return losses if reduction in (0, "none") else losses.sum()


class _FakeLosses(torch.autograd.Function):
    """Losses of the right shape, for fakes."""

    @staticmethod
    def forward(ctx: Any, log_probs: torch.Tensor, targets: torch.Tensor, longest: int) -> torch.Tensor:
        steps, *batch, _ = log_probs.shape
        ctx.save_for_backward(log_probs, targets, log_probs.new_empty(*batch, steps, 2 * longest + 1))
        return log_probs.new_empty(batch)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        log_probs, *_ = ctx.saved_tensors
        return torch.empty_like(log_probs), None, None


_RECURRENT = ("gru", "lstm", "rnn_relu", "rnn_tanh")


def is_packed(func: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Whether the call is torch's `lstm(data, batch_sizes, states, ...)` or the like; else states come second."""
    if getattr(func, "__name__", "") not in _RECURRENT or len(args) != 9:
        return False
    sizes = args[1]
    return isinstance(sizes, torch.Tensor) and sizes.dtype is torch.int64 and sizes.dim() == 1


def run_packed(args: tuple[Any, ...]) -> tuple[tuple[torch.Tensor, ...], int]:
    """The call's result over fakes, and its FLOPs: two for each weight and row of data, as good as exact."""
    data, _, states, weights, *_, bidirectional = args
    states = tuple(tensors_in(states))
    width = states[0].shape[-1] * (2 if bidirectional else 1)
    found = (data.new_empty(data.shape[0], width), *(torch.empty_like(state) for state in states))
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors_in(args)):
        found = tuple(joined(output, tensors_in(args)) for output in found)
    return found, sum(2 * data.shape[0] * weight.numel() for weight in weights if weight.dim() == 2)


_PLAIN = (bool, int, float, str, torch.Size)


class SizeAskedError(Exception):
    """Python needs sizes that depend on values: those made under these keys."""

    def __init__(self, keys: frozenset[str]) -> None:
        super().__init__(f"the size of what {', '.join(sorted(keys))} made is needed")
        self.keys = keys


class DataSized:
    """The data-sized tensors of one recording.

    `asked`: keys of the sizes that are questions. `everywhere`: whether there are such sizes in modules that might be called whole.
    """

    def __init__(self, asked: frozenset[str] = frozenset(), everywhere: bool = False) -> None:
        self.asked, self.everywhere = asked, everywhere
        self._made: Counter[str] = Counter()
        self._others: dict[int, torch.Tensor] = {}  # by id of a data-sized tensor: the same at another size
        self._keys: dict[int, frozenset[str]] = {}
        self._alive: list[torch.Tensor] = []

    def forget(self) -> None:
        """The recording is over."""
        self._others.clear()
        self._keys.clear()
        self._alive.clear()

    def again(self) -> DataSized:
        """For another run that asks for the same sizes."""
        return DataSized(self.asked, self.everywhere)

    def keys(self, tree: Any) -> frozenset[str]:
        """On which sizes the tensors in some arguments depend; none if none of them is data-sized."""
        found: frozenset[str] = frozenset()
        if self._keys:
            for tensor in tensors_in(tree):
                found |= self._keys.get(id(tensor), frozenset())
        return found

    def refuse(self, tree: Any) -> None:
        """For calls that must know the sizes of their arguments: SizeAskedError if one of them is data-sized."""
        keys = self.keys(tree)
        if keys:
            raise SizeAskedError(keys)

    def run(
        self, keys: frozenset[str], meter: Meter, func: Call, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """The result of a call with arguments of these keys. Raises SizeAskedError if it needs their sizes."""
        out = func(*args, **kwargs)
        cost = meter.flops, meter.random
        try:
            with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):  # nobody counts what it saves
                other = func(*self._other(args), **self._other(dict(kwargs)))
        except Exception as error:
            raise SizeAskedError(keys) from error
        meter.flops, meter.random = cost
        self._compare(out, other, keys)
        return out

    def next_key(self, place: str) -> str:
        """The key of a size that is made now, in the module of that name."""
        self._made[place] += 1
        return f"{place}#{self._made[place] - 1}"

    def make(self, key: str, func: Call, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The result, at an invented size, of a call whose size depends on values; None if the real size has to be asked for."""
        rule = _RULES.get(getattr(func, "__name__", ""))
        if rule is None or key in self.asked:
            return None
        try:
            out = rule(0, *args, **kwargs)
            other = rule(1, *self._other(args), **self._other(dict(kwargs)))
        except (IndexError, RuntimeError, TypeError, ValueError):
            return None
        self._compare(out, other, self.keys((args, kwargs)) | {key})
        return out

    def _other(self, tree: Any) -> Any:
        """Arguments with data-sized tensors at their other size."""
        if isinstance(tree, torch.Tensor):
            return self._others.get(id(tree), tree)
        if type(tree) in (tuple, list):
            return type(tree)(self._other(item) for item in tree)
        if isinstance(tree, dict):
            return {key: self._other(item) for key, item in tree.items()}
        if isinstance(tree, slice):
            return slice(*(self._other(item) for item in (tree.start, tree.stop, tree.step)))
        return tree

    def _compare(self, out: Any, other: Any, keys: frozenset[str]) -> None:
        """Notes results at two sizes."""
        (leaves, structure), (others, its_structure) = flatten(out), flatten(other)
        if structure != its_structure:
            raise SizeAskedError(keys)
        for leaf, its_other in zip(leaves, others, strict=True):
            if isinstance(leaf, torch.Tensor):
                if leaf.layout is torch.strided and (leaf.shape, leaf.stride()) != (
                    its_other.shape,
                    its_other.stride(),
                ):
                    self._others[id(leaf)], self._keys[id(leaf)] = its_other, keys
                    self._alive.append(leaf)
            elif isinstance(leaf, _PLAIN) and leaf != its_other:
                raise SizeAskedError(keys)


def _indices(mask: torch.Tensor, more: int) -> torch.Tensor:
    """Positions along one dimension of a mask's elements, as if all were true (and `more`)."""
    return torch.empty(max(mask.numel(), 2) + more, dtype=torch.int64, device=mask.device)


def _nonzero(more: int, mask: torch.Tensor, *, as_tuple: bool = False) -> Any:
    rows = [_indices(mask, more) for _ in range(mask.dim())]
    return tuple(rows) if as_tuple else torch.stack(rows, 1)


def _where(more: int, mask: torch.Tensor) -> Any:
    return _nonzero(more, mask, as_tuple=True)


def _masked_select(more: int, source: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    source, mask = torch.broadcast_tensors(source, mask)  # type: ignore[no-untyped-call]
    return source.reshape(-1)[_indices(mask, more)]


def _index_by_mask(more: int, source: torch.Tensor, index: Any) -> torch.Tensor:
    """An index with masks, of as many elements as a fake one may have."""
    parts: list[Any] = []
    for part in index if isinstance(index, tuple) else (index,):
        is_mask = isinstance(part, torch.Tensor) and part.dtype in (torch.bool, torch.uint8)
        if is_mask and not part.dim():
            raise ValueError("a mask without dimensions adds one")
        parts += [_indices(part, more)] * part.dim() if is_mask else [part]
    return source[tuple(parts)]


_RULES: dict[str, Call] = {
    "nonzero": _nonzero,
    "argwhere": _nonzero,
    "nonzero_numpy": _where,
    "where": _where,
    "masked_select": _masked_select,
    "__getitem__": _index_by_mask,
}
