"""What one operation makes and drops while it runs forward and backward, seen in a run of that operation alone on fake tensors.

A trace knows the tensors that outlive an operation. It knows nothing of the tensors that an operation's formula makes on the way: the
backward of `x.square()` makes three values of x's size, of which one stays; the backward of a sum makes none, since its gradient is a view
of one number. So each kind of operation, by its target, its constants, and the shapes and strides of its tensors, is run once, and its
storages are watched:

    scratch     in its forward: the most bytes beyond what it reads, returns, or saves for the backward
    working     in its backward: the most bytes beyond what was there when it began, the gradient of its result included
    shared      the same, if something else holds the gradient of the result as well, so that it stays
    gradients   by input, what its gradient takes: bytes of its own; or none, because it is the gradient of the result or a view of it, or
                because it is in the memory of an earlier input's gradient. And its stride: a view of a gradient that is laid out
                otherwise than its value is a copy

Fake tensors compute nothing, and have the trace's sizes. What passes torch's dispatcher is seen, which is all but the workspace of kernels.
Nothing is found for operations that are no function of torch (modules called whole, custom autograd functions, what ranks do together), or
that read or return tuples: see `smpc.partitioner.memory.lifetimes` for what is assumed there.

Example: h = x.square(), 4 bytes each: scratch 0, working 12 (x to the power of 1, twice that, and the gradient), gradients (4,).
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from smpc.tracer import targets
from smpc.tracer.constants import Ref, map_references
from smpc.tracer.ir import Autocast, Node, NodeKind, TensorSpec, Trace, contiguous_stride
from smpc.tracer.replay import evaluate

HANDED_ON, TOGETHER = -1, -2  # in place of bytes: it is the result's gradient; it is beside an earlier input's
_OF_TORCH = ("torch.", "_operator.", "builtins.")
_DEVICE = torch.device("cpu")
_WHERE = torch.ops.prim.device.default
Stride = tuple[int, ...]


class Gradient(NamedTuple):
    """The gradient of one input: see the module docstring."""

    num_bytes: int
    stride: Stride


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of one operation: see the module docstring."""

    scratch: int
    is_view: bool  # the result, as autograd sees it
    working: int = 0
    shared: int = 0
    gradients: tuple[Gradient | None, ...] = ()  # by input of the node; None: it has none


def footprint(trace: Trace, position: int, stride: Stride | None = None) -> Footprint | None:
    """The footprint of a node if the gradient of its result has this stride, by default a dense tensor's. None: nothing is known."""
    spec = trace.nodes[position].spec
    is_dense = stride is None or (spec is not None and stride == contiguous_stride(spec.shape))
    return _footprints(trace, position).get(None if is_dense else stride)


def forward_footprint(trace: Trace, position: int) -> Footprint | None:
    """The footprint of a node for its forward alone: one with whatever gradient is known. None: nothing is known."""
    known = _footprints(trace, position)
    return next((found for found in known.by_stride.values() if found is not None), None) or known.get(None)


def _footprints(trace: Trace, position: int) -> _Footprints:
    return trace.remembered((footprint, position), lambda: _footprints_of(_call(trace, trace.nodes[position])))


@dataclass(frozen=True, slots=True)
class _Footprints:
    """The known footprints of one operation, by the stride of the gradient of its result. `call` None: nothing is known."""

    call: _Operation | None
    by_stride: dict[Stride | None, Footprint | None] = field(default_factory=dict)

    def get(self, stride: Stride | None) -> Footprint | None:
        """The footprint for a gradient with this stride, found by a run the first time. None: a dense gradient."""
        if stride not in self.by_stride:
            self.by_stride[stride] = None if self.call is None else _run_once(self.call, stride)
        return self.by_stride[stride]


@dataclass(frozen=True)
class _Operation:
    """An operation with `specs` of its inputs; two are the same if their arguments read the same."""

    target: str
    text: str
    specs: tuple[TensorSpec, ...]
    changed: int  # the input that it writes in place; -1: none
    is_view: bool  # that input
    is_differentiated: bool
    autocast: Autocast | None
    args: tuple[Any, ...] = field(compare=False)
    kwargs: tuple[tuple[str, Any], ...] = field(compare=False)


def _call(trace: Trace, node: Node) -> _Operation | None:
    if node.kind is not NodeKind.CALL_FUNCTION or not node.target.startswith(_OF_TORCH):
        return None
    specs = [spec for name in node.inputs if (spec := trace.node(name).spec) is not None]
    if node.target.startswith("torch.ops.smpc.") or len(specs) < len(node.inputs):
        return None
    changed = [i for i, name in enumerate(node.inputs) if name in node.mutates and specs[i].requires_grad]
    spec = specs[changed[0]] if node.target == targets.SETITEM and changed else node.spec
    if spec is None:
        return None
    is_view = False
    if changed:
        origin = forward_footprint(trace, trace.position(node.inputs[changed[0]]))
        is_view = origin is not None and origin.is_view
    names = {name: f"v{i}" for i, name in enumerate(node.inputs)}
    args, kwargs = (map_references(tree, lambda name: Ref(names[name])) for tree in (node.args, node.kwargs))
    is_differentiated = spec.requires_grad and node.grad_enabled
    first = changed[0] if changed else -1
    text = repr((args, kwargs))
    return _Operation(node.target, text, tuple(specs), first, is_view, is_differentiated, node.autocast, args, kwargs)


@functools.lru_cache(maxsize=1 << 14)
def _footprints_of(call: _Operation | None) -> _Footprints:
    """One for all operations that are the same, in whatever trace."""
    return _Footprints(call)


def _run_once(call: _Operation, stride: Stride | None) -> Footprint | None:
    try:
        with _disable_current_modes(), torch._C.DisableTorchFunction(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with _own_hooks(), FakeTensorMode(allow_non_fake_inputs=True), _Storages() as storages:
                return _run(call, stride, storages)
    except Exception:  # an operation that fake tensors cannot do, or that depends on values
        return None


def _own_hooks() -> AbstractContextManager[Any]:
    """Hooks for saved tensors that are around a script's step see nothing of this."""
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
        return nullcontext()
    return saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


def _run(call: _Operation, stride: Stride | None, storages: _Storages) -> Footprint:
    arrived: dict[int, Tensor] = {}
    with torch.set_grad_enabled(call.is_differentiated):
        values = _values(call, arrived)
        storages.start()
        node = Node("it", NodeKind.CALL_FUNCTION, call.target, call.args, call.kwargs, autocast=call.autocast)
        result = evaluate(node, values, _DEVICE)
        result = values[f"v{call.changed}"] if call.target == targets.SETITEM else result
        scratch = storages.most - storages.live
        if not call.is_differentiated:
            return Footprint(scratch, result._is_view())
        is_view = result._is_view()
        root = _Seed.apply(result, stride, storages)  # type: ignore[no-untyped-call]
        del result
        torch.autograd.backward(root, torch.ones_like(root))
    seen, gradients = {storages.seed}, list[Gradient | None]()
    for i in range(len(call.specs)):
        if i not in arrived:
            gradients.append(None)
            continue
        grad = arrived[i]
        number, num_bytes = storages.number(grad), grad.untyped_storage().nbytes()
        if number in seen:
            num_bytes = HANDED_ON if number == storages.seed else TOGETHER
        gradients.append(Gradient(num_bytes, tuple(grad.stride())))
        seen.add(number)
    return Footprint(scratch, is_view, storages.most, storages.most_held, tuple(gradients))


def _values(call: _Operation, arrived: dict[int, Tensor]) -> dict[str, Tensor]:
    """The inputs, by name."""
    token = torch.empty((), requires_grad=True)
    found: dict[str, Tensor] = {}
    for i, spec in enumerate(call.specs):
        if spec.requires_grad and call.is_differentiated:
            value: Tensor = _Source.apply(token, spec, i, arrived)  # type: ignore[no-untyped-call]
            found[f"v{i}"] = value.view_as(value) if call.is_view and i == call.changed else value
        else:
            found[f"v{i}"] = _made(spec)
    return found


def _made(spec: TensorSpec) -> Tensor:
    return torch.empty_strided(spec.shape, spec.stride, dtype=spec.torch_dtype, device=_DEVICE)


class _Source(torch.autograd.Function):
    """A tensor that wants a gradient and is no leaf; keeps the gradient."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, spec: TensorSpec, index: int, arrived: dict[int, Tensor]) -> Tensor:
        ctx.index, ctx.arrived = index, arrived
        return _made(spec)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        ctx.arrived[ctx.index] = grad
        return None, None, None, None


class _Seed(torch.autograd.Function):
    """Makes the gradient of a result, which nobody else holds; the backward is watched from there on."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, stride: Stride | None, storages: _Storages) -> Tensor:
        ctx.shape, ctx.dtype, ctx.stride, ctx.storages = result.shape, result.dtype, stride, storages
        return torch.empty(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        made = torch.empty(ctx.shape, dtype=ctx.dtype)
        if ctx.stride is not None:
            made = torch.empty_strided(ctx.shape, ctx.stride, dtype=ctx.dtype)
        ctx.storages.start(made)
        return made, None, None


class _Storages(TorchDispatchMode):
    """Bytes of storages made since `start`: `live` ones, and the most that there were. They have numbers, since addresses come again."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.most = self.most_held = self.seed = self._made = self._freed = 0
        self._known: dict[int, tuple[int, int]] = {}  # address -> (number, bytes)

    def start(self, seed: Tensor | None = None) -> None:
        """Counts from here on. `seed` is the gradient of the result."""
        self.live = self.most = self.most_held = 0
        self.seed = 0 if seed is None else self.number(seed)

    def number(self, tensor: Tensor) -> int:
        """The number of the tensor's storage, from 1 on."""
        storage = tensor.untyped_storage()
        key, num_bytes = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._made += 1
            self._known[key] = self._made, num_bytes
            weakref.finalize(storage, self._drop, key)
            self.live += num_bytes
            self.most, self.most_held = max(self.most, self.live), max(self.most_held, self.live + self._freed)
        return self._known[key][0]

    def _drop(self, key: int) -> None:
        number, num_bytes = self._known.pop(key)
        self.live -= num_bytes
        self._freed += num_bytes if number == self.seed else 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is _WHERE and isinstance(args[0], FakeTensor):
            return args[0].device  # asked for by every node of autograd: what the fakes' mode answers
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.number(leaf)
        return out
