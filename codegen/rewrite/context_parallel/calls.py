"""How tensor-parallel ranks share what context-parallel ranks call: along every dimension but the sequence.

    call                              sliced along
    gathers, cuts, exchanges          any dimension but those that they work along
    replicate_in, all_reduce          any dimension
    ring_attention, causal_rows       samples, heads
    exchanged_attention               samples; heads, as far as both groups divide them

Others (losses over rows) take and give whole values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from smpc.codegen.rewrite.tensor_parallel.rules import broadcast_dims
from smpc.codegen.rewrite.tensor_parallel.strategy import Facts, Rule, Strategy, argument
from smpc.tracer.constants import Ref
from smpc.tracer.ir import Node
from smpc.tracer.targets import TENSOR_OPS


def _moves(facts: Facts, node: Node) -> Iterator[Strategy]:
    """A call of a value along one dimension, or two, or none."""
    name = node.inputs[0]
    rank = len(facts.shape(name))
    along = [arg % rank for arg in node.args[1:] if type(arg) is int]
    for dim, size in enumerate(facts.shape(name)):
        if dim not in along:
            yield from facts.along(node, {name: dim}, dim, size)


def _anywhere(facts: Facts, node: Node) -> Iterator[Strategy]:
    name = node.inputs[0]
    for dim, size in enumerate(facts.shape(name)):
        yield from facts.along(node, {name: dim}, dim, size)


def _attention(facts: Facts, node: Node) -> Iterator[Strategy]:
    names = [arg.name for arg in node.args[2:5] if isinstance(arg, Ref)]
    if len(dict.fromkeys(names)) != 3 or any(len(facts.shape(name)) != 4 for name in names):
        return
    mask = argument(node, 5, "bias", dict(node.kwargs).get("attn_mask"))
    shape = facts.shape(node.name)
    for dim in (0, 1):
        dims: dict[str, int | None] = dict.fromkeys(names, dim)
        if isinstance(mask, Ref):
            dims |= broadcast_dims(facts, (mask.name,), shape, dim)
        if all(facts.shape(name)[dim] % facts.degree == 0 for name in names):
            yield from (found for found in facts.along(node, dims, dim, shape[dim]) if not found.output.blocks)


def _exchanged(facts: Facts, node: Node) -> Iterator[Strategy]:
    """Only samples of the heads: the call does not say how many heads each group has."""
    yield from (found for found in _attention(facts, node) if found.output.dim == 0)


CALLS: Mapping[str, Rule] = MappingProxyType(
    {
        f"{TENSOR_OPS}.{name}": rule
        for rule, names in (
            (_moves, ("all_gather", "gather_in", "own_part", "reduce_scatter", "split", "all_to_all")),
            (_anywhere, ("replicate_in", "all_reduce")),
            (_attention, ("ring_attention", "causal_rows")),
            (_exchanged, ("exchanged_attention",)),
        )
        for name in names
    }
)  # by target
