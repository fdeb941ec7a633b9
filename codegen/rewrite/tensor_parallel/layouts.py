"""Layouts: how a value is distributed over the ranks of a tensor-parallel group, and the conversions between layouts.

    layout       value on a rank                      gradient on a rank
    R            whole                                whole
    B            whole ("broadcast" to its users)     a summand of it: the users compute parts
    S(d)         a slice along dimension d            the slice of it
    S(d|a,b)     of each of the blocks of a and b elements along d a slice, joined: a fused query-key-value projection,
                 say, so that every part of it is sharded once it is split up
    Z(d)         S(d) for causal attention ("zigzag"): of 2n pieces the r-th of n ranks has pieces r and 2n - 1 - r, joined, so that
                 every rank has as much to look back on; Z(d|a,b): so of each block
    P            a summand ("partial")                whole

So an operation may always run on R alone or on B alone (its backward is linear in the gradient), one that works along a
dimension in pieces takes S of it and B of everything that all pieces need, and one that sums over the sharded dimension gives P.

`CONVERSIONS` has the changes that exist, with the parts of the value's bytes, times (t - 1) / t for t ranks, that each rank sends
forward and backward with ring algorithms:

    >>> linear = Layout.sharded(1)
    >>> [step.function for step in CONVERSIONS[PARTIAL.kind, REPLICATED.kind]]
    ['all_reduce']
    >>> str(linear)
    'S(1)'
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from smpc.tracer.ir import StateSpec, TensorSpec, contiguous_stride


class LayoutKind(StrEnum):
    """See the module docstring."""

    REPLICATED = "R"
    BROADCAST = "B"
    SHARDED = "S"
    PARTIAL = "P"


@dataclass(frozen=True, slots=True)
class Layout:
    """One layout. `dim`: of S, counted from the front; `blocks` are the sizes of the blocks along it, if there are several.

    `mirrored`: it is Z.
    """

    kind: LayoutKind
    dim: int = -1
    blocks: tuple[int, ...] = ()
    mirrored: bool = False

    def __post_init__(self) -> None:
        assert (self.dim >= 0) == (self.kind is LayoutKind.SHARDED), self
        assert self.dim >= 0 or not (self.blocks or self.mirrored), self

    @classmethod
    def sharded(cls, dim: int, blocks: tuple[int, ...] = (), mirrored: bool = False) -> Layout:
        """S, or Z, along a dimension."""
        return cls(LayoutKind.SHARDED, dim, blocks, mirrored)

    @property
    def is_plain(self) -> bool:
        """Whether a rank's part is one run of the whole."""
        return not (self.blocks or self.mirrored)

    def __str__(self) -> str:
        if self.kind is not LayoutKind.SHARDED:
            return self.kind
        letter = "Z" if self.mirrored else "S"
        return f"{letter}({self.dim}|{','.join(map(str, self.blocks))})" if self.blocks else f"{letter}({self.dim})"

    def local_shape(self, shape: tuple[int, ...], degree: int) -> tuple[int, ...]:
        """The shape on a rank of a value of this shape."""
        if self.kind is not LayoutKind.SHARDED:
            return shape
        assert shape[self.dim] % degree == 0, f"{self} of {shape} on {degree} ranks"
        return (*shape[: self.dim], shape[self.dim] // degree, *shape[self.dim + 1 :])

    def whole_shape(self, shape: tuple[int, ...], degree: int) -> tuple[int, ...]:
        """The shape of the value of which a rank's part has this shape."""
        if self.kind is not LayoutKind.SHARDED:
            return shape
        return (*shape[: self.dim], shape[self.dim] * degree, *shape[self.dim + 1 :])

    def for_gradient(self, requires_grad: bool) -> Layout:
        """The same; B and R are one where there is no gradient."""
        return self if requires_grad or self.kind is not LayoutKind.BROADCAST else REPLICATED


REPLICATED = Layout(LayoutKind.REPLICATED)
BROADCAST = Layout(LayoutKind.BROADCAST)
PARTIAL = Layout(LayoutKind.PARTIAL)


@dataclass(frozen=True, slots=True)
class CollectiveStep:
    """A call of `smpc.executor.tensor_ops`, with the bytes it sends: see the module docstring."""

    function: str
    forward: float = 0.0
    backward: float = 0.0


CONVERSIONS: Mapping[tuple[LayoutKind, LayoutKind], tuple[CollectiveStep, ...]] = MappingProxyType(
    {
        (LayoutKind.REPLICATED, LayoutKind.BROADCAST): (CollectiveStep("replicate_in", 0, 2),),
        (LayoutKind.REPLICATED, LayoutKind.SHARDED): (CollectiveStep("split", 0, 1),),
        (LayoutKind.REPLICATED, LayoutKind.PARTIAL): (CollectiveStep("to_partial"),),
        (LayoutKind.BROADCAST, LayoutKind.SHARDED): (CollectiveStep("own_part"),),
        (LayoutKind.PARTIAL, LayoutKind.REPLICATED): (CollectiveStep("all_reduce", 2, 0),),
        (LayoutKind.PARTIAL, LayoutKind.BROADCAST): (
            CollectiveStep("all_reduce", 2, 0),
            CollectiveStep("replicate_in", 0, 2),
        ),
        (LayoutKind.PARTIAL, LayoutKind.SHARDED): (CollectiveStep("reduce_scatter", 1, 1),),
        (LayoutKind.SHARDED, LayoutKind.REPLICATED): (CollectiveStep("all_gather", 1, 0),),
        (LayoutKind.SHARDED, LayoutKind.BROADCAST): (CollectiveStep("gather_in", 1, 1),),
    }
)


def conversion(source: Layout, target: Layout, spec: TensorSpec, degree: int) -> tuple[CollectiveStep, ...] | None:
    """The steps from one layout of a value to another: none if they are the same, None if there is no way.

    Values without gradients are sliced without communication, and nothing of theirs goes backward.
    """
    if source == target:
        return ()
    if source.kind is target.kind is LayoutKind.SHARDED:
        if source.dim == target.dim:
            return None
        return (_without_gradient(CollectiveStep("all_to_all", 1 / degree, 1 / degree), spec),)
    if not spec.requires_grad and source.kind is LayoutKind.REPLICATED and target.kind is LayoutKind.SHARDED:
        return (CollectiveStep("own_part"),)
    steps = CONVERSIONS.get((source.kind, target.kind))
    return None if steps is None else tuple(_without_gradient(step, spec) for step in steps)


def sent_bytes(step: CollectiveStep, spec: TensorSpec, degree: int) -> tuple[int, int]:
    """Bytes that each rank sends in a step on a value of this (whole) spec, forward and backward."""
    share = spec.num_bytes * (degree - 1) / degree
    return round(step.forward * share), round(step.backward * share)


def local_state(state: StateSpec, layout: Layout, degree: int) -> StateSpec:
    """A parameter as a rank holds it: contiguous."""
    shape = layout.local_shape(state.spec.shape, degree)
    spec = TensorSpec(shape, state.spec.dtype, contiguous_stride(shape), state.spec.requires_grad)
    return StateSpec(state.names, spec, state.is_parameter, state.is_persistent, state.storage)


def _without_gradient(step: CollectiveStep, spec: TensorSpec) -> CollectiveStep:
    return step if spec.requires_grad else CollectiveStep(step.function, step.forward)
