"""Splits a backward: gradients of inputs at once (B), gradients of parameters later (W).

During the forward of a stage whose backward is split, a TorchFunctionMode sees every torch call that takes a parameter:

    deferrable call     linear, addmm (Conv1D), matrix products, convolutions, embedding: its backward computes the gradients of the
                        call's other arguments, and leaves what W computes the parameters' from
    any other call      gets an alias of the parameter; the gradient that comes back to it is kept for W as it is
    small call          the same: on a CPU, two halves of little work take longer than one

So no parameter has a gradient before W, and W adds up what there is from the last call to the first, which is the order in which an
unsplit backward adds it up. Then it accumulates the sums, as `torch.autograd.backward` on the parameters: hooks run, and `.grad` is what
it would have been, bit for bit. A deferrable call is one of two kinds (see `smpc.executor.split_backward.deferred_calls`):

    product     linear and addmm of rows and a matrix, nearly all of a transformer. The call itself, without gradients of its parameters;
                a hook notes the gradient of its result, and W multiplies
    record      any other: one node of the stage's graph, around a record that autograd makes of the call on detached arguments. Its two
                halves are two `torch.autograd.grad` over that record, so the kernels are autograd's own

    F    y = F.conv2d(x, w)        stage graph   x ------------> Deferrable --> y
                                   record        x' , w  ------> conv2d ------> y'
    B    gx = grad(y', x', gy)     leaves gy for later
    W    w.grad += grad(y', w, gy)

Inside activation checkpoints (and other saved-tensor hooks) no call is deferred, since what is computed again for B is gone afterwards:
B computes the gradients of the parameters, and they are kept for W. So it is inside of what torch.func transforms (vmap, grad), whose
tensors do not outlive it. Where gradients are off, nothing is touched.

Example:

    pending = Pending()         # of `smpc.executor.split_backward.deferred_calls`
    with Deferral(pending):
        y = module(x)
    y.backward(g)        # x.grad, but no gradient of a parameter
    pending.run()        # the gradients of the parameters
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.overrides import TorchFunctionMode

from smpc.executor.split_backward.deferred_calls import (
    Pending,
    PendingAlias,
    PendingProduct,
    PendingRecord,
    as_product,
    watch,
)
from smpc.partitioner.costs.node_costs import WORTHWHILE

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
_NO_TENSORS = frozenset({int, float, bool, str, type(None), type(...), slice, torch.dtype, torch.device, torch.layout})
_NO_PARAMETERS = _NO_TENSORS | {Tensor}
# Calls that mean this very tensor.
_ABOUT = frozenset(
    {torch.Tensor.register_hook, torch.Tensor.requires_grad_, torch.Tensor.__hash__, torch.Tensor.backward}
)


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
        if not kwargs:
            if _NO_PARAMETERS.issuperset(map(type, args)):
                return func(*args)  # by far the most calls
            kwargs = {}
        if not torch.is_grad_enabled():
            return func(*args, **kwargs)
        if func in _DEFERRABLE:
            values = [*args, *kwargs.values()]
            trained, places, work = _look_at(values)
            if trained and work >= self._worthwhile and not _is_computed_otherwise():
                product = None if kwargs else as_product(func, values, trained, places)
                if product is not None:
                    return self._multiply(func, values, product)
                return self._record(func, values, tuple(kwargs), trained, places)
        used = _first_used(func)
        if used is None:
            return func(*args, **kwargs)
        args = (
            *args[:used],
            *[value if type(value) in _NO_PARAMETERS else self._alias(value) for value in args[used:]],
        )
        if kwargs:
            kwargs = {name: self._alias(value) for name, value in kwargs.items()}
        return func(*args, **kwargs)

    def _multiply(self, func: Callable[..., Any], values: Sequence[Any], product: PendingProduct) -> Tensor:
        """The call without gradients of parameters."""
        self._pending.add(product)
        result: Tensor = func(*[value.detach() if type(value) is nn.Parameter else value for value in values])
        watch(product, result)
        return result

    def _record(
        self,
        func: Callable[..., Any],
        values: list[Any],
        names: tuple[str, ...],
        trained: Sequence[nn.Parameter],
        places: list[int],
    ) -> Any:
        """The call as one node, with its own record."""
        record = PendingRecord(trained)
        self._pending.add(record)
        others = [values[i] for i in places]
        return _Deferrable.apply(self._pending.token, record, func, values, names, places, *others)  # type: ignore[no-untyped-call]

    def _alias(self, value: Any) -> Any:
        """The parameter itself as another leaf, which keeps its gradient for W."""
        if _is_trained(value):
            alias = PendingAlias(value)
            self._pending.add(alias)
            return alias.leaf
        if type(value) in (list, tuple) and _has_trained(value):
            return type(value)(self._alias(item) for item in value)
        return value


class _Deferrable(torch.autograd.Function):
    """A call as one node: see the module docstring. `values` are its arguments, the last ones by `names`; the tensors among them that
    want gradients, but for parameters, are at `places`."""

    @staticmethod
    def forward(
        ctx: Any,
        token: Tensor,
        entry: PendingRecord,
        func: Callable[..., Any],
        values: list[Any],
        names: tuple[str, ...],
        places: list[int],
        *others: Tensor,
    ) -> Tensor:
        with torch.enable_grad():
            ctx.leaves = leaves = [other.detach().requires_grad_() for other in others]
            for place, leaf in zip(places, leaves, strict=True):
                values[place] = leaf
            if names:
                split = len(values) - len(names)
                result: Tensor = func(*values[:split], **dict(zip(names, values[split:], strict=True)))
            else:
                result = func(*values)
        entry.edge = GradientEdge(result.grad_fn, result.output_nr)  # type: ignore[arg-type]
        ctx.entry = entry
        return result.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        entry, leaves = ctx.entry, ctx.leaves
        ctx.entry = ctx.leaves = None
        entry.grad = grad
        found: Sequence[Tensor | None] = ()
        if leaves:
            found = torch.autograd.grad((entry.edge,), leaves, (grad,), retain_graph=True, allow_unused=True)
        return (None, None, None, None, None, None, *found)


def _look_at(values: Sequence[Any]) -> tuple[list[nn.Parameter], list[int], float]:
    """From a call's arguments: the trained parameters, the positions of other arguments that require a gradient, and the approximate
    number of multiplications for the parameters' gradients (infinite except on a CPU)."""
    trained: list[nn.Parameter] = []
    places: list[int] = []
    elements, longest = 0.0, 0
    for place, value in enumerate(values):
        if type(value) in _NO_TENSORS or not isinstance(value, Tensor):
            continue
        if not value.is_cpu:
            elements = math.inf
        if _is_trained(value):
            trained.append(cast(nn.Parameter, value))
            longest = max(longest, *value.shape) if value.dim() else longest
        else:
            elements = max(elements, value.numel())
            if value.requires_grad:
                places.append(place)
    return trained, places, elements * longest


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


@functools.lru_cache(maxsize=4096)
def _first_used(func: Callable[..., Any]) -> int | None:
    """The first argument whose values a call uses, not counting one that it only overwrites. None: it only reads metadata."""
    name = func.__name__
    if name == "__get__":
        return 0 if func in _DIFFERENTIABLE_GETTERS else None
    if name == "__set__" or func in _ABOUT:
        return None
    in_place = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
    return 1 if in_place else 0


def _is_computed_otherwise() -> bool:
    """Whether a call's graph is not what its backward runs: in an activation checkpoint, or a function that torch.func transforms."""
    hooked = torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
    return hooked or bool(torch._C._are_functorch_transforms_active())
