"""Sharding rules of context parallelism: for slices of a sequence, and for the calls that share a sequence.

Rules for slices of a sequence, beside the rules of `smpc.codegen.rewrite.tensor_parallel.rules`:

    operation                        slices                  result     way
    scaled_dot_product_attention     q Z(2)  k B     v B     Z(2)       causal_rows: own queries, with the keys up to each
    scaled_dot_product_attention     q Z(2)  k Z(2)  v Z(2)  Z(2)       exchanged_attention: the whole sequence of own heads
    flash_attention                  q Z(2)  k Z(2)  v Z(2)  Z(2)       ring_attention: keys go around
    cross_entropy                    logits Z(0)             P          rows_cross_entropy: the losses of own rows over the number of all
    mean                             x Z(1)                  P          mean_part: the mean of own elements over the number of ranks
    experts that ranks divide        h, index, weights Z(1)  Z(1)       own tokens, with gradients to the scale of the whole sequence

Labels and masks are whole: every rank counts the labels that are not ignored, and takes what it needs of a mask.

Rules by which tensor-parallel ranks share what context-parallel ranks call, along every dimension but the sequence:

    call                              sliced along
    gathers, cuts, exchanges          any dimension but those that they work along
    replicate_in, all_reduce          any dimension
    ring_attention, causal_rows       samples, heads
    exchanged_attention               samples; heads, as far as both groups divide them

Others (losses over rows) take and give whole values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from smpc.codegen.rewrite.expert_parallel import SLICES
from smpc.codegen.rewrite.tensor_parallel.layouts import BROADCAST, PARTIAL, REPLICATED, Layout
from smpc.codegen.rewrite.tensor_parallel.rewrite import RING
from smpc.codegen.rewrite.tensor_parallel.rules import broadcast_dims
from smpc.codegen.rewrite.tensor_parallel.strategy import Facts, Rule, Strategy, argument, short_name
from smpc.tracer.constants import Ref
from smpc.tracer.ir import Node, TensorSpec
from smpc.tracer.targets import TENSOR_OPS

FLASH = "smpc.kernels.attention.op.flash_attention"
ATTENTION = "scaled_dot_product_attention"
EXCHANGE_WAY = "exchanged_attention"


def heads(node: Node) -> tuple[str, str, str] | None:
    """The query, key and value of an attention; None if one of them is not a tensor of the trace, or occurs twice."""
    found = [argument(node, i, name) for i, name in enumerate(("query", "key", "value"))]
    names = tuple(value.name for value in found if isinstance(value, Ref))
    return (names[0], names[1], names[2]) if len(dict.fromkeys(names)) == 3 else None


def is_causal(node: Node) -> bool:
    """Whether it is attention that hides the future by itself."""
    if node.target == FLASH:
        return bool(argument(node, 5, "causal", False))
    return short_name(node.target) == ATTENTION and bool(argument(node, 5, "is_causal", False))


def can_exchange(facts: Facts, node: Node) -> bool:
    """Whether every rank can have some of the heads of an attention."""
    names = heads(node)
    if names is None or any(len(facts.shape(name)) != 4 for name in names):
        return False
    return all(
        facts.shape(name)[1] % facts.degree == 0 and facts.shape(name)[2] % facts.num_pieces == 0 for name in names
    )


def _sequence_attention(facts: Facts, node: Node) -> Iterator[Strategy]:
    """Attention of slices of a sequence: own queries, or own heads of the whole sequence."""
    names, mask = heads(node), argument(node, 3, "attn_mask")
    if names is None or not (mask is None or isinstance(mask, Ref)):
        return
    rank = len(facts.shape(names[0]))
    own = facts.sharded(rank - 2)
    if mask is None and is_causal(node) and rank > 2 and facts.shape(names[0])[-2] % facts.num_pieces == 0:
        layouts = {names[0]: own, names[1]: BROADCAST, names[2]: BROADCAST}
        yield Strategy(tuple(layouts[name] for name in node.inputs), own, way="causal_rows")
    if can_exchange(facts, node):
        inputs = tuple(own if name in names else BROADCAST for name in node.inputs)
        sent = _exchanged_bytes(facts, node, names)
        yield Strategy(inputs, own, sent=sent, sent_back=sent, way=EXCHANGE_WAY)


def _exchanged_bytes(facts: Facts, node: Node, names: tuple[str, str, str]) -> tuple[int, ...]:
    specs = [facts.spec(name) for name in (*names, node.name)]
    return tuple(_shared_sequence_rule(facts, spec) // facts.degree for spec in specs if spec is not None)


def _shared_sequence_rule(facts: Facts, spec: TensorSpec) -> int:
    return spec.num_bytes * (facts.degree - 1) // facts.degree


def _ring_attention(facts: Facts, node: Node) -> Iterator[Strategy]:
    """Flash attention of slices of a sequence, whose keys go around."""
    names, bias = [argument(node, i, name) for i, name in enumerate(("q", "k", "v"))], argument(node, 3, "bias")
    if not all(isinstance(name, Ref) for name in names) or len({name.name for name in names}) < 3:
        return
    q, k = names[0].name, names[1].name
    lengths = [facts.shape(name)[2] for name in (q, k)]
    offset = argument(node, 6, "causal_offset", 0)
    if any(length % facts.num_pieces for length in lengths) or (
        is_causal(node) and (lengths[0] != lengths[1] or offset)
    ):
        return
    own = facts.sharded(2)
    inputs = tuple(REPLICATED if isinstance(bias, Ref) and name == bias.name else own for name in node.inputs)
    spec = facts.spec(k)
    assert spec is not None, "it has a length"
    pair, wide = 2 * spec.num_bytes, 2 * spec.num_elements * max(4, spec.torch_dtype.itemsize)  # gradients in fp32
    there = (pair // facts.degree,) * (facts.degree - 1)
    back = (*there, *(wide // facts.degree,) * facts.degree)
    yield Strategy(inputs, own, sent=there, sent_back=back, way=RING)


def _sequence_cross_entropy(facts: Facts, node: Node) -> Iterator[Strategy]:
    logits, target = argument(node, 0, "input"), argument(node, 1, "target")
    given = [argument(node, i, name) for i, name in ((3, "size_average"), (5, "reduce"))]
    if not (isinstance(logits, Ref) and isinstance(target, Ref)) or any(value is not None for value in given):
        return
    labels, shape = facts.spec(target.name), facts.shape(logits.name)
    whole = argument(node, 6, "reduction", "mean") in ("mean", "sum")
    if labels is None or labels.dtype not in ("int64", "int32") or not whole or facts.requires_grad(target.name):
        return
    for dim, size in enumerate(shape):
        if dim != 1 and len(shape) > 1:
            for layout in facts.layouts(dim, size):
                yield Strategy(_sequence_inputs_rule(node, logits.name, layout), PARTIAL, way="rows_cross_entropy")


def _sequence_inputs_rule(node: Node, sliced: str, layout: Layout) -> tuple[Layout, ...]:
    return tuple(layout if name == sliced else REPLICATED for name in node.inputs)


def _sequence_mean(facts: Facts, node: Node) -> Iterator[Strategy]:
    """A mean over slices of a sequence: the mean of own elements over the number of ranks."""
    if len(node.inputs) != 1:
        return
    (name,) = node.inputs
    shape, dims = facts.shape(name), argument(node, 1, "dim")
    reduced = range(len(shape)) if dims is None or dims in ((), []) else [dims] if isinstance(dims, int) else dims
    for dim in dict.fromkeys(dim % len(shape) for dim in reduced):
        yield from (Strategy((layout,), PARTIAL, way="mean_part") for layout in facts.layouts(dim, shape[dim]))


def of_tokens(facts: Facts, node: Node) -> Iterator[Strategy]:
    """Expert-parallel experts serve each token independently of its rank."""
    if facts.is_tuple(node.name) or not all(facts.spec(name) is not None for name in node.inputs):
        return
    shape = facts.shape(node.name)
    tokens = shape[:-1]
    if any(facts.shape(name)[:-1] != tokens for name in node.inputs):
        return
    for dim, size in enumerate(tokens):
        for found in facts.along(node, dict.fromkeys(node.inputs, dim), dim, size):
            yield dataclasses.replace(found, way=SLICES)


RULES: Mapping[str, Rule] = MappingProxyType(
    {
        ATTENTION: _sequence_attention,
        FLASH: _ring_attention,
        "cross_entropy": _sequence_cross_entropy,
        "mean": _sequence_mean,
    }
)  # by short name, or by target


def _moved_sequence_rule(facts: Facts, node: Node) -> Iterator[Strategy]:
    """A call of a value along one dimension, or two, or none."""
    name = node.inputs[0]
    rank = len(facts.shape(name))
    along = [arg % rank for arg in node.args[1:] if type(arg) is int]
    for dim, size in enumerate(facts.shape(name)):
        if dim not in along:
            yield from facts.along(node, {name: dim}, dim, size)


def _rule_of_any_sequence_dim(facts: Facts, node: Node) -> Iterator[Strategy]:
    name = node.inputs[0]
    for dim, size in enumerate(facts.shape(name)):
        yield from facts.along(node, {name: dim}, dim, size)


def _exchanged_attention(facts: Facts, node: Node) -> Iterator[Strategy]:
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


def _exchanged_heads_rule(facts: Facts, node: Node) -> Iterator[Strategy]:
    """Only samples of the heads: the call does not say how many heads each group has."""
    yield from (found for found in _exchanged_attention(facts, node) if found.output.dim == 0)


CALLS: Mapping[str, Rule] = MappingProxyType(
    {
        f"{TENSOR_OPS}.{name}": rule
        for rule, names in (
            (_moved_sequence_rule, ("all_gather", "gather_in", "own_part", "reduce_scatter", "split", "all_to_all")),
            (_rule_of_any_sequence_dim, ("replicate_in", "all_reduce")),
            (_exchanged_attention, ("ring_attention", "causal_rows")),
            (_exchanged_heads_rule, ("exchanged_attention",)),
        )
        for name in names
    }
)  # by target
