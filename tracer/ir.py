"""The parts of a trace: nodes, module calls, state, and the `Trace` that holds them.

Terms
    node        one recorded torch call, input or attribute read; known by its unique `name`, listed in execution order
    Ref         an argument that is the value of another node
    call        one call of an nn.Module: a span of nodes, nested in the span of the module that called it
    region      a span of nodes whose values the model asks to compute again for the backward pass (see `smpc.tracer.regions`)
    storage     memory behind one or more tensors; views share the storage of their base
    state       the model's parameters and buffers, known by fully qualified name (FQN)

A `Trace` is immutable, serialises to JSON and back, prints as text, and has a fingerprint (SHA-256 of the JSON).
Arguments are trees of tuple, list, dict and slice whose leaves are `Ref` or plain constants (see `smpc.tracer.constants`).

Example: `x + self.weight` inside the model's forward, with x of shape [2, 3], is

    Node("x", PLACEHOLDER, "x"), Node("weight", GET_ATTR, "weight"),
    Node("add", CALL_FUNCTION, "torch.Tensor.add", args=(Ref("x"), Ref("weight")), spec=TensorSpec((2, 3), ...))

Which strides a value keeps when it goes to another rank.

Kernels choose how they walk over a tensor, and with it the order of their sums, by its layout: a slice of a larger tensor, whose rows are
apart, gives other last bits than a contiguous copy. The order of dimensions, which of them are adjacent in memory, and their alignment
matter; the size of gaps does not. So the layout on arrival has the gaps of the original, but not their size.

    dense       no gaps: the strides are a permutation of contiguous ones. Arrives as it is
    gaps        in the same order and with the same alignment (64 bytes), as close as that allows. Slices along the innermost dimension
                have every second element
    others      expanded and overlapping tensors: contiguous

Example: rows of 64 floats that are 768 apart, strides (768, 1), arrive with strides (80, 1).

`as_strided` is the one operation whose values depend on strides. Programs call `strided_view`, which knows the strides of the recording: a
tensor that has others, because it was gathered or has come from another rank, is copied into the recorded layout first.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeVar

import torch
from torch import Tensor

from smpc.errors import UsageError
from smpc.tracer.constants import decode, encode, references, register, to_source
from smpc.tracer.structure import Structure

STRIDED_VIEW = f"{__name__}.strided_view"

_ALIGNMENT = 64  # bytes: a cache line, and the longest vector of a processor


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


def dense_order(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...] | None:
    """The dimensions by falling stride if the layout is dense, else None. Dimensions of size 1 stay where they are."""
    order = falling_order(shape, stride)
    return order if _packed(shape, stride, order) else None


def falling_order(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """The dimensions by falling stride. Dimensions of size 1 stay where they are."""
    if 0 in shape or tuple(stride) == contiguous_stride(shape):
        return tuple(range(len(shape)))
    falling = iter(sorted((dim for dim, size in enumerate(shape) if size != 1), key=lambda dim: -stride[dim]))
    return tuple(dim if size == 1 else next(falling) for dim, size in enumerate(shape))


def _packed(shape: Sequence[int], stride: Sequence[int], order: Sequence[int]) -> bool:
    """Whether the dimensions, in this order, have no gaps between them."""
    if 0 in shape or tuple(stride) == contiguous_stride(shape):
        return True
    step = 1
    for dim in reversed(order):
        if shape[dim] == 1:
            continue
        if stride[dim] != step:
            return False
        step *= shape[dim]
    return True


def arrival_stride(shape: Sequence[int], stride: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """The strides on arrival of a tensor of this shape and these strides."""
    order = falling_order(shape, stride)
    if _packed(shape, stride, order):
        return tuple(stride)
    found = list(stride)
    own = step = 1  # where the next dimension would begin without a gap: in the original, and on arrival
    for dim in reversed(order):
        if shape[dim] == 1:
            continue
        if stride[dim] < own or not stride[dim]:
            return contiguous_stride(shape)
        if stride[dim] == own:
            found[dim] = step
        elif own == 1:
            found[dim] = 2
        else:
            multiple = max(_ALIGNMENT // itemsize, 1)
            found[dim] = step + 1 + (stride[dim] - step - 1) % multiple
        own, step = stride[dim] * shape[dim], found[dim] * shape[dim]
    return tuple(found)


def arrival_bytes(shape: Sequence[int], stride: Sequence[int], itemsize: int) -> int:
    """Bytes that the memory of such a tensor has on arrival."""
    if 0 in shape:
        return 0
    found = arrival_stride(shape, stride, itemsize)
    return itemsize * (1 + sum((size - 1) * step for size, step in zip(shape, found, strict=True)))


def strided_view(
    tensor: Tensor, size: Any, stride: Any, offset: int, recorded: Sequence[int], memory: Sequence[int], may_copy: bool
) -> Tensor:
    """`tensor.as_strided(size, stride)`, `offset` elements behind the tensor's first one, as if the tensor had the recorded strides.

    `memory`: (offset, elements) of the tensor's storage when it was recorded, if the view goes beyond the tensor; else (). `may_copy`:
    whether nobody writes into this memory. Raises UsageError if the view would have other values than it was recorded with.
    """
    own = [step for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1]
    same = own == [step for step, size in zip(recorded, tensor.shape, strict=True) if size != 1]
    found = (tensor.storage_offset(), tensor.untyped_storage().nbytes() // tensor.element_size())
    if (memory and found != tuple(memory)) or not (same or may_copy):
        raise UsageError(
            f"as_strided: expected a tensor of shape {tuple(tensor.shape)} with strides {tuple(recorded)}"
            + (f" in a memory of {memory[1]} elements, at {memory[0]}" if memory else "")
            + f", as it was recorded, found strides {tuple(tensor.stride())} in a memory of {found[1]}, at {found[0]}: between "
            "ranks a tensor travels without what is around it; what to do: take the view of x.contiguous(), or use x.unfold"
        )
    if not same:
        tensor = tensor.new_empty_strided(tuple(tensor.shape), tuple(recorded)).copy_(tensor)
    return tensor.as_strided(size, stride, tensor.storage_offset() + offset)


def strided_view_arguments(args: Sequence[Any], kwargs: Mapping[str, Any], view: Tensor) -> tuple[Any, ...]:
    """The arguments with which `strided_view` gives a view that `as_strided` has given for these."""
    tensor, *rest = args
    size, stride = (rest[i] if len(rest) > i else kwargs[name] for i, name in enumerate(("size", "stride")))
    offset = view.storage_offset() - tensor.storage_offset()
    last = offset + sum((extent - 1) * step for extent, step in zip(view.shape, view.stride(), strict=True))
    is_inside = offset >= 0 and last < tensor.numel() and dense_order(tensor.shape, tensor.stride()) is not None
    memory = (tensor.storage_offset(), tensor.untyped_storage().nbytes() // tensor.element_size())
    return tensor, size, stride, offset, tuple(tensor.stride()), () if is_inside else memory, True


T = TypeVar("T")


@register
@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape, dtype and layout of a tensor. `dtype` is torch's name without the prefix: "float32"."""

    shape: tuple[int, ...]
    dtype: str
    stride: tuple[int, ...]
    requires_grad: bool = False

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        """The spec of a tensor, real or fake."""
        stride = tuple(tensor.stride()) if tensor.layout is torch.strided else ()
        return cls(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), stride, tensor.requires_grad)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The torch dtype."""
        return _dtype(self.dtype)

    @property
    def num_elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of a dense tensor of this shape."""
        return self.num_elements * self.torch_dtype.itemsize

    @property
    def touched_bytes(self) -> int:
        """Bytes that reading the whole tensor moves: an expanded tensor counts its memory once."""
        if not self.stride:
            return self.num_bytes
        distinct = math.prod(size for size, step in zip(self.shape, self.stride, strict=True) if step or not size)
        return distinct * self.torch_dtype.itemsize

    @property
    def arrival_bytes(self) -> int:
        """Bytes of the memory that such a tensor gets on another rank."""
        return arrival_bytes(self.shape, self.stride, self.torch_dtype.itemsize)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@functools.lru_cache(maxsize=1024)
def spec_of(shape: tuple[int, ...], dtype: torch.dtype, stride: tuple[int, ...]) -> TensorSpec:
    """The spec of tensors that need no gradient, made once for each kind: a step needs them for every microbatch."""
    return TensorSpec(tuple(shape), str(dtype).removeprefix("torch."), tuple(stride))


@functools.cache
def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype), name
    return dtype


class NodeKind(StrEnum):
    """The kind of a node."""

    PLACEHOLDER = "placeholder"  # a tensor input of the model; target: its path in the inputs ("input_ids", "args[0]")
    GET_ATTR = "get_attr"  # read a parameter, buffer or tensor attribute; target: its canonical FQN
    SET_ATTR = "set_attr"  # rebind a buffer to a new tensor (args[0]); target: its FQN
    CALL_FUNCTION = "call_function"  # call a torch function; target: its qualified name
    CALL_MODULE = "call_module"  # call a leaf module, nothing recorded inside; target: its FQN


@register
@dataclass(frozen=True, slots=True)
class Autocast:
    """Autocast state that differs from the one around the trace.

    Within a `scope` torch casts each parameter once: from the beginning of an outermost autocast of the model to its end. 0: unknown.
    """

    device_type: str
    dtype: str
    enabled: bool
    caches: bool = True
    scope: int = field(default=0, repr=False)  # not repr: blocks of a model are alike but for it


class _Inputs:
    """Room for the names of a node's inputs: everybody asks for them, and they are found by a walk through its arguments."""

    __slots__ = ("_inputs",)

    _inputs: tuple[str, ...]


@register
@dataclass(frozen=True, slots=True)
class Node(_Inputs):
    """One recorded operation.

    `spec` is None for operations that return no single tensor; their parts are read by `operator.getitem` nodes.
    `saved` lists the storages that autograd keeps for the backward pass, parameters left out.
    `mutates` names the nodes whose tensors the call writes in place.
    """

    name: str
    kind: NodeKind
    target: str
    args: tuple[Any, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()
    spec: TensorSpec | None = None
    storage: int = -1  # index into Trace.storages of the memory behind the output; -1: no single tensor
    call: int = 0  # index into Trace.calls of the innermost module call around it
    flops: int = 0  # forward floating point operations
    bytes_moved: int = 0  # bytes of tensor inputs and outputs; 0 for views
    saved: tuple[int, ...] = ()
    mutates: tuple[str, ...] = ()
    random: bool = False  # draws random numbers
    grad_enabled: bool = True
    autocast: Autocast | None = None
    source: str = ""  # file.py:line of the model's code, without folders

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the nodes it reads, each once, in argument order."""
        try:
            return self._inputs
        except AttributeError:
            object.__setattr__(self, "_inputs", references((self.args, dict(self.kwargs))))
            return self._inputs


@register
@dataclass(frozen=True, slots=True)
class ModuleCall:
    """One call of a module. Its nodes are `Trace.nodes[first:last]`; `arguments` and `output` may hold `Ref`s.

    `arguments` flattens (args, kwargs) of the call. A leaf that is neither a tensor of this trace nor a plain
    constant is `Opaque`: such a call cannot be made again from its arguments alone.
    """

    fqn: str  # "" for the model itself
    class_name: str
    parent: int  # index of the calling call; -1 for the model
    first: int
    last: int
    arguments: Structure
    argument_leaves: tuple[Any, ...]
    output: Structure
    output_leaves: tuple[Any, ...]
    grad_enabled: bool = True
    autocast: Autocast | None = None
    bare: bool = False  # made by a `__call__` of the class's own that checkpoints: nn.Module's is to be called again
    whole: bool = True  # may be called again; not where a rewrite has changed what is inside


@register
@dataclass(frozen=True, slots=True)
class Region:
    """A checkpointed span, `Trace.nodes[first:last]`: see `smpc.tracer.regions`."""

    name: str  # FQN of the module, or of the one whose code asked for it; for messages
    first: int
    last: int
    call: int  # index of the innermost call around it
    preserve_rng_state: bool = True
    sequence: int = -1  # shared by the layers of one sequential container
    strategy: str = ""  # of the container
    own: bool = False  # the model's Python does it by itself when the module around it is called


@register
@dataclass(frozen=True, slots=True)
class Guard:
    """A value that the model's Python asked for, and that depends on inputs and buffers alone.

    The call of `target` gave `expected` on the sample inputs: a number, a bool or a list; or, if there are `dtypes`, tensors of these
    dtypes and of the shapes in `expected`. The trace holds for inputs on which it gives the same.
    """

    target: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    expected: Any
    dtypes: tuple[str, ...] = ()
    source: str = ""
    size: str = ""  # the key of a size that was asked for (see `smpc.tracer.operations.value_queries`)

    def __str__(self) -> str:
        arguments = ", ".join(to_source(arg, str) for arg in self.args)
        return f"{self.target}({arguments}) at {self.source or 'unknown line'}"


@register
@dataclass(frozen=True, slots=True)
class StateSpec:
    """A parameter or buffer. `names` has every FQN under which the model knows it, the canonical one first."""

    names: tuple[str, ...]
    spec: TensorSpec
    is_parameter: bool
    is_persistent: bool = True  # part of the state_dict
    storage: int = -1

    @property
    def name(self) -> str:
        """The canonical FQN."""
        return self.names[0]


_LEFT_OUT = ("differentiating", "overwritten", "written", "left", "left_leaves")  # of JSON, where they are empty


@dataclass(frozen=True)
class Trace:
    """A recorded run of a model: see the module docstring."""

    model_class: str
    training: bool
    nodes: tuple[Node, ...]
    calls: tuple[ModuleCall, ...]  # calls[0] is the model itself
    inputs: Structure  # of (args, kwargs); its leaves are input_leaves: Ref of a placeholder, or a constant
    input_leaves: tuple[Any, ...]
    output: Structure
    output_leaves: tuple[Any, ...]
    state: tuple[StateSpec, ...]  # in order of model.named_parameters(), then named_buffers()
    storages: tuple[int, ...]  # bytes of each storage
    guards: tuple[Guard, ...] = ()  # what must hold of the inputs' values, in the order in which it was asked
    regions: tuple[Region, ...] = ()  # in order of their begin, outer ones first
    differentiating: tuple[str, ...] = ()  # nodes of modules called whole that run autograd in their forward
    overwritten: tuple[
        tuple[str, str, str], ...
    ] = ()  # state that forward overwrites and the backward needs: name, read, written where
    written: tuple[str, ...] = ()  # inputs that forward writes into, if output_leaves goes on with what it leaves there
    left: Structure | None = None  # of the inputs after the run, if forward changes their containers
    left_leaves: tuple[Any, ...] = ()  # the leaves of `left`, unless output_leaves goes on with them
    _index: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        index = {node.name: i for i, node in enumerate(self.nodes)}
        assert len(index) == len(self.nodes), "node names are not unique"
        object.__setattr__(self, "_index", index)

    def node(self, name: str) -> Node:
        """The node of that name."""
        return self.nodes[self._index[name]]

    def position(self, name: str) -> int:
        """The position in execution order of the node of that name."""
        return self._index[name]

    def remembered(self, key: Hashable, make: Callable[[], T]) -> T:
        """The result of `make`, computed once for each key: facts about a trace stay true, since it never changes."""
        known = self._known
        if key not in known:
            known[key] = make()
        found: T = known[key]
        return found

    @functools.cached_property
    def _known(self) -> dict[Hashable, Any]:
        return {}

    @functools.cached_property
    def live(self) -> frozenset[str]:
        """Nodes that matter: they reach the output, write state, draw random numbers (which shifts later draws), or are modules called
        whole, of which nobody knows what else they do."""
        live: list[str] = []
        wanted = set(self.output_names)
        acts = (NodeKind.SET_ATTR, NodeKind.CALL_MODULE)
        for node in reversed(self.nodes):
            if node.name in wanted or node.mutates or node.random or node.kind in acts:
                live.append(node.name)
                wanted.update(node.inputs)
        return frozenset(live)

    def computes_with(self, name: str) -> bool:
        """Whether what matters needs the input of this name, as the model's forward calls it."""
        names = {node.name for node in self.nodes if node.kind is NodeKind.PLACEHOLDER and node.target == name}
        return not names.isdisjoint(self.live)

    @property
    def output_names(self) -> tuple[str, ...]:
        """Names of the nodes that the model returns, each once."""
        return references(self.output_leaves)

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the JSON form."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def to_json(self) -> str:
        """JSON text: the same trace gives the same bytes."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "_index"}
        fields = {name: value for name, value in fields.items() if value or name not in _LEFT_OUT}
        return json.dumps({name: encode(value) for name, value in fields.items()}, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Trace:
        """The inverse of `to_json`. Reading runs nothing, but a trace is a program: replay one of which you know the origin."""
        return cls(**{name: decode(value) for name, value in json.loads(text).items()})

    def __str__(self) -> str:
        """One line a node: name, spec, target and arguments, module and source line."""
        lines = []
        for node in self.nodes:
            spec = f": {node.spec}" if node.spec else ""
            arguments = [to_source(arg, str) for arg in node.args]
            arguments += [f"{key}={to_source(value, str)}" for key, value in node.kwargs]
            effect = f"  writes {', '.join(node.mutates)}" if node.mutates else ""
            where = " ".join(part for part in (self.calls[node.call].fqn, node.source) if part)
            lines.append(
                f"{node.name}{spec} = {node.target}({', '.join(arguments)}){effect}" + (f"  # {where}" if where else "")
            )
        outputs = ", ".join(to_source(leaf, str) for leaf in self.output_leaves)
        return "\n".join([f"trace of {self.model_class}", *lines, f"return {outputs}"])
