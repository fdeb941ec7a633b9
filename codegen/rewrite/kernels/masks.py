"""What an attention mask hides, read from how it is made.

`torch.nn.functional.scaled_dot_product_attention` takes any mask [batch, heads, queries, keys]; the kernel hides the future by itself and
keys by a bias [batch or 1, heads or 1, 1, keys]. A mask of the first kind is of the second when it is a conjunction of

    - parts that do not depend on the query (padding)
    - parts without inputs, which are computed here and now: true everywhere, or the lower triangle (aligned with the first or the last key)

Example: Hugging Face's causal mask with padding, `ones & (keys <= queries) & padding[batch, keys]`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from smpc.codegen.rewrite.kernels.graph import Graph
from smpc.tracer.ir import NodeKind
from smpc.tracer.replay import evaluate

_LARGEST = 2**28  # elements of a mask that is computed here
_SAME_VALUES = ("expand", "contiguous", "broadcast_to", "expand_as")


@dataclass(frozen=True, slots=True)
class Mask:
    """What is hidden: the future of `offset`, if it is not None, and what the conjunction of `keys` is false for, or `bias` is added."""

    offset: int | None = None
    keys: tuple[str, ...] = ()
    bias: str | None = None


def read_mask(graph: Graph, mask: str, num_queries: int, num_keys: int) -> Mask | str:
    """The mask in these terms, or why it has none."""
    spec = graph.spec(mask)
    if spec.requires_grad:
        return "its mask needs a gradient"
    if spec.dtype != "bool":
        if len(spec.shape) == 4 and spec.shape[2] == 1 and spec.shape[3] == num_keys:
            return Mask(bias=mask)
        return f"its mask {spec} is added to the scores and has a row for every query"
    offset: int | None = None
    keys: list[str] = []
    for part in dict.fromkeys(_parts(graph, mask)):
        value = _constant(graph, part)
        if value is not None and bool(value.all()):
            continue
        shape = graph.shape(part)
        if len(shape) == 4 and shape[2] == 1 and shape[3] == num_keys:
            keys.append(part)
            continue
        found = None if value is None else _triangle(value, num_queries, num_keys)
        if found is None or offset not in (None, found):
            return f"its mask {spec} hides other keys of every query"
        offset = found
    return Mask(offset, tuple(keys))


def _parts(graph: Graph, name: str) -> Iterator[str]:
    """The parts of a conjunction."""
    if graph.op(name) in _SAME_VALUES and len(graph.node(name).inputs) >= 1:
        yield from _parts(graph, graph.node(name).inputs[0])
    elif graph.op(name) == "and" and graph.tensors(name) is not None:
        for operand in graph.tensors(name) or ():
            yield from _parts(graph, operand)
    else:
        yield name


def _constant(graph: Graph, name: str) -> torch.Tensor | None:
    """The value of a node that depends on nothing that a run could change, if it is not too large."""
    cone = graph.between(name, ())
    for part in cone:
        node = graph.node(part)
        only_calls = (
            node.kind is NodeKind.CALL_FUNCTION and not node.random and not node.mutates and node.autocast is None
        )
        outside = any(graph.node(read).kind is not NodeKind.CALL_FUNCTION for read in node.inputs)
        if not only_calls or outside or (node.spec is not None and node.spec.num_elements > _LARGEST):
            return None
    if not cone:
        return None
    values: dict[str, object] = {}
    for part in cone:
        values[part] = evaluate(graph.node(part), values, torch.device("cpu"))
    found = values[name]
    return found if isinstance(found, torch.Tensor) else None


def _triangle(value: torch.Tensor, num_queries: int, num_keys: int) -> int | None:
    """The offset of the lower triangle that a mask is, in every batch and head."""
    if value.shape[-2:] != (num_queries, num_keys):
        return None
    for offset in dict.fromkeys((0, num_keys - num_queries)):
        lower = torch.ones(num_queries, num_keys, dtype=torch.bool).tril(offset)
        if bool((value == lower).all()):
            return offset
    return None
