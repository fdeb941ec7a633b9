"""Splits a backward: gradients of inputs at once (B), gradients of parameters later (W).

During the forward of a stage whose backward is split, a TorchFunctionMode sees every torch call that takes a parameter:

    deferrable call     linear, addmm (Conv1D), matrix products, convolutions, embedding: becomes one node of the
                        stage's graph. Its backward returns the gradients of the call's other arguments and leaves a
                        `_Deferred`, which computes the parameters' when W runs
    any other call      gets an alias of the parameter; the gradient that comes back to it is kept for W as it is
    small call          the same: on a CPU, two halves of little work take longer than one

So no parameter has a gradient before W, and W adds up what there is in the order in which it came, which is the order
in which an unsplit backward adds it up. Then it accumulates the sums, as `torch.autograd.backward` on the parameters:
hooks run, and `.grad` is what it would have been, bit for bit. The kernels are autograd's own, since a deferrable call
is recorded by autograd as it is, on detached arguments; its two halves are two `torch.autograd.grad` over that record.

    F    y = F.linear(x, w)        stage graph   x ------------> Deferrable --> y
                                   record        x' , w' ------> addmm -------> y'
    B    gx = grad(y', x', gy)     leaves (w, grad(y', w', gy)) for later
    W    w.grad += grad(y', w', gy)

Inside activation checkpoints (and other saved-tensor hooks) no call is deferred, since what is computed again for B is gone afterwards:
B computes the gradients of the parameters, and they are kept for W. Where gradients are off, nothing is touched.

Example:

    pending = Pending()
    with Deferral(pending):
        y = module(x)
    y.backward(g)        # x.grad, but no gradient of a parameter
    pending.run()        # the gradients of the parameters
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.overrides import TorchFunctionMode

_DEFERRABLE: frozenset[Callable[..., Any]] = frozenset(
    {
        F.linear,
        F.embedding,
        F.conv1d,
        F.conv2d,
        F.conv3d,
        F.conv_transpose1d,
        F.conv_transpose2d,
        F.conv_transpose3d,
        torch.addmm,
        torch.mm,
        torch.bmm,
        torch.matmul,
        torch.Tensor.addmm,
        torch.Tensor.mm,
        torch.Tensor.bmm,
        torch.Tensor.matmul,
        torch.Tensor.__matmul__,
        torch.Tensor.__rmatmul__,
    }
)
# Getters whose value is a function of the parameter; the others (shape, grad, data) are about it.
_DIFFERENTIABLE_GETTERS = frozenset(
    getattr(torch.Tensor, name).__get__ for name in ("T", "H", "mT", "mH", "real", "imag")
)
WORTHWHILE = 2_000_000  # multiplications, which take a core about 50 us
_TOGETHER = 1 << 18  # elements of incoming gradients that W may hold at a time
_NO_PARAMETERS = frozenset(
    {torch.Tensor, int, float, bool, str, type(None), type(...), slice, torch.dtype, torch.device, torch.layout}
)
# Calls that mean this very tensor.
_ABOUT = frozenset(
    {torch.Tensor.register_hook, torch.Tensor.requires_grad_, torch.Tensor.__hash__, torch.Tensor.backward}
)


@dataclass(frozen=True, slots=True)
class _Hidden:
    """A parameter, as an argument that autograd does not see: it has no edge in the stage's graph, so no hook of it runs
    before W."""

    parameter: nn.Parameter


@dataclass(frozen=True, slots=True)
class _Deferred:
    """One backward for parameters: `edge` is where `grad` enters the record that leads to `records`."""

    parameters: tuple[nn.Parameter, ...]
    records: tuple[Tensor, ...]
    edge: GradientEdge
    grad: Tensor


_Entry: TypeAlias = _Deferred | tuple[nn.Parameter, Tensor]


class Pending:
    """What a stage's B has left for its W, in the order of the backward.

    `token` stands for the parameters in the stage's graph: it makes what is computed from them require a gradient.
    """

    __slots__ = ("_entries", "token")

    def __init__(self) -> None:
        self.token = torch.empty(0, requires_grad=True)
        self._entries: list[_Entry] = []

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, entry: _Entry) -> None:
        """Keep work, or a gradient, for W."""
        self._entries.append(entry)

    def clear(self) -> None:
        """Let go of everything."""
        self._entries.clear()

    def run(self) -> bool | None:
        """Add the gradients to those of the parameters. Empty afterwards.

        Whether work was left, and not just gradients; None if there was nothing.
        """
        entries, self._entries = self._entries, []
        if not entries:
            return None
        has_work = any(isinstance(entry, _Deferred) for entry in entries)
        sums: dict[nn.Parameter, Tensor] = {}
        entries.reverse()
        while entries:  # what a group holds is free as soon as it has run
            for parameter, grad in _gradients(_next_group(entries)):
                if grad is not None:
                    sums[parameter] = grad if parameter not in sums else sums[parameter] + grad
        if sums:
            torch.autograd.backward(list(sums), list(sums.values()))
        return has_work


def _next_group(entries: list[_Entry]) -> list[_Entry]:
    """The next entries, taken from the end: those of little work together, as a call of autograd takes longer than a small product."""
    group, num_elements = [entries.pop()], 0
    while entries:
        num_elements += _num_elements(group[-1])
        if num_elements + _num_elements(entries[-1]) > _TOGETHER:
            break
        group.append(entries.pop())
    return group


def _num_elements(entry: _Entry) -> int:
    return entry.grad.numel() if isinstance(entry, _Deferred) else 0


def _gradients(group: Sequence[_Entry]) -> list[tuple[nn.Parameter, Tensor | None]]:
    """Of the parameters of a group, in order; those of several calls are not summed."""
    deferred = [entry for entry in group if isinstance(entry, _Deferred)]
    records = [record for entry in deferred for record in entry.records]
    edges, grads = [entry.edge for entry in deferred], [entry.grad for entry in deferred]
    computed = iter(torch.autograd.grad(edges, records, grads, allow_unused=True) if deferred else ())
    found: list[tuple[nn.Parameter, Tensor | None]] = []
    for entry in group:
        if isinstance(entry, _Deferred):
            found += [(parameter, next(computed)) for parameter in entry.parameters]
        else:
            found.append(entry)
    return found


class Deferral(TorchFunctionMode):
    """The mode; active during a stage's forward.

    `worthwhile`: multiplications for parameters below which a call is small, on a CPU; by default WORTHWHILE.
    """

    def __init__(self, pending: Pending, worthwhile: int | None = None) -> None:
        super().__init__()
        self._pending, self._worthwhile = pending, WORTHWHILE if worthwhile is None else worthwhile

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run a torch call; `types` is not looked at."""
        kwargs = kwargs or {}
        if not _may_have_trained(args) and not (kwargs and _may_have_trained(kwargs.values())):
            return func(*args, **kwargs)  # by far the most calls
        if not torch.is_grad_enabled():
            return func(*args, **kwargs)
        values = (*args, *kwargs.values())
        if func in _DEFERRABLE and _work(values) >= self._worthwhile and not _saved_tensors_are_hooked():
            hidden = [_Hidden(value) if _is_trained(value) else value for value in values]
            if any(isinstance(value, _Hidden) for value in hidden):
                return _Deferrable.apply(self._pending.token, self._pending, func, len(args), tuple(kwargs), *hidden)  # type: ignore[no-untyped-call]
        if _uses_values(func) and any(_has_trained(value) for value in values):
            args = tuple(self._alias(value) for value in args)
            kwargs = {name: self._alias(value) for name, value in kwargs.items()}
        return func(*args, **kwargs)

    def _alias(self, value: Any) -> Any:
        if _is_trained(value):
            return _Alias.apply(self._pending.token, self._pending, _Hidden(value))  # type: ignore[no-untyped-call]
        if type(value) in (list, tuple) and _has_trained(value):
            return type(value)(self._alias(item) for item in value)
        return value


class _Deferrable(torch.autograd.Function):
    """A call as one node: see the module docstring."""

    @staticmethod
    def forward(
        ctx: Any,
        token: Tensor,
        pending: Pending,
        func: Callable[..., Any],
        num_args: int,
        names: tuple[str, ...],
        *values: Any,
    ) -> Tensor:
        with torch.enable_grad():
            records = [_record(value) for value in values]
            result: Tensor = func(*records[:num_args], **dict(zip(names, records[num_args:], strict=True)))
            ctx.edge = GradientEdge(result.grad_fn, result.output_nr)  # type: ignore[arg-type]
        ctx.pending = pending
        pairs = list(zip(values, records, strict=True))
        ctx.trained = [(value.parameter, record) for value, record in pairs if isinstance(value, _Hidden)]
        ctx.others = [
            (i, record) for i, (value, record) in enumerate(pairs) if isinstance(value, Tensor) and value.requires_grad
        ]
        ctx.num_values = len(values)
        return result.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        edge, trained, others = ctx.edge, ctx.trained, ctx.others
        ctx.edge = ctx.trained = ctx.others = None
        grads: list[Tensor | None] = [None] * ctx.num_values
        if others:
            found = torch.autograd.grad(
                (edge,), [record for _, record in others], (grad,), retain_graph=True, allow_unused=True
            )
            for (index, _), value in zip(others, found, strict=True):
                grads[index] = value
        parameters, records = zip(*trained, strict=True)
        ctx.pending.add(_Deferred(parameters, records, edge, grad))
        return (None, None, None, None, None, *grads)


class _Alias(torch.autograd.Function):
    """The parameter itself; its gradient is kept for W."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, pending: Pending, hidden: _Hidden) -> Tensor:
        ctx.pending, ctx.parameter = pending, hidden.parameter
        return hidden.parameter.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        ctx.pending.add((ctx.parameter, grad))
        return None, None, None


def _record(value: Any) -> Any:
    """An argument of the recorded call: a leaf of its own."""
    tensor = value.parameter if isinstance(value, _Hidden) else value
    return tensor.detach().requires_grad_(tensor.requires_grad) if isinstance(tensor, Tensor) else tensor


def _work(values: Sequence[Any]) -> float:
    """About how many multiplications the gradients of a call's parameters take; infinitely many elsewhere than on a CPU."""
    elements, longest = 0, 0
    for value in values:
        if isinstance(value, Tensor):
            if value.device.type != "cpu":
                return math.inf
            if _is_trained(value):
                longest = max(longest, *value.shape) if value.dim() else longest
            else:
                elements = max(elements, value.numel())
    return elements * longest


def _may_have_trained(values: Iterable[Any]) -> bool:
    """Whether some value is of a type that a parameter may have, or contain one."""
    for value in values:
        kind = type(value)
        if kind not in _NO_PARAMETERS and (kind not in (tuple, list, torch.Size) or _may_have_trained(value)):
            return True
    return False


def _is_trained(value: Any) -> bool:
    kind = type(value)
    if kind is nn.Parameter:
        return bool(value.requires_grad)
    # torch's isinstance also knows subclasses of Tensor that were marked, and takes long.
    return kind not in _NO_PARAMETERS and isinstance(value, nn.Parameter) and value.requires_grad


def _has_trained(value: Any) -> bool:
    if type(value) in (list, tuple):
        return any(_has_trained(item) for item in value)
    return _is_trained(value)


def _uses_values(func: Callable[..., Any]) -> bool:
    """Whether a call computes with its arguments, and does not ask about them or change them."""
    name = func.__name__
    if name == "__get__":
        return func in _DIFFERENTIABLE_GETTERS
    in_place = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
    return not in_place and name != "__set__" and func not in _ABOUT


def _saved_tensors_are_hooked() -> bool:
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
