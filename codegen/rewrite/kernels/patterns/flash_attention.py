"""`torch.nn.functional.scaled_dot_product_attention` becomes `smpc.kernels.attention.op.flash_attention`.

Key and value heads that were repeated for groups of queries are taken unrepeated. Masks: `read_mask`.

What an attention mask hides, read from how it is made.

`torch.nn.functional.scaled_dot_product_attention` takes any mask [batch, heads, queries, keys]; the kernel hides the future by itself and
keys by a bias [batch or 1, heads or 1, 1, keys]. A mask of the first kind is of the second when it is a conjunction of

    - parts that do not depend on the query (padding)
    - parts without inputs, which are computed here and now: true everywhere, or the lower triangle (aligned with the first or the last key)

Example: Hugging Face's causal mask with padding, `ones & (keys <= queries) & padding[batch, keys]`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from smpc.codegen.rewrite.kernels.pattern_graph import KernelCall, NodeUsers, Refusal, Replacement, Rewrite
from smpc.tracer.constants import Ref
from smpc.tracer.ir import NodeKind
from smpc.tracer.replay import evaluate

_OP = "flash_attention"
_TARGET = "smpc.kernels.attention.op.flash_attention"
_LARGEST_HEAD = 256


def find_flash_attention(graph: NodeUsers) -> Iterator[Replacement | Refusal]:
    """Every attention of a trace."""
    read = functools.cache(functools.partial(read_mask, graph))  # layers share a mask
    for name in graph.find("scaled_dot_product_attention"):
        tensors = [graph.tensor(name, i, word) for i, word in enumerate(("query", "key", "value"))]
        q, k, v = (item for item in tensors)
        if q is None or k is None or v is None:
            continue
        reason = _why_not_flash(graph, name, q, k, v)
        if reason:
            yield Refusal(_OP, name, reason)
            continue
        mask = graph.tensor(name, 3, "attn_mask")
        found: Mask | str = Mask()
        if mask is not None:
            found = read(mask, graph.shape(q)[2], graph.shape(k)[2])
        elif graph.argument(name, 5, "is_causal", False):
            found = Mask(offset=0)
        if isinstance(found, str):
            yield Refusal(_OP, name, found)
        else:
            yield _flash_replacement(graph, name, (q, k, v), mask, found)


REWRITE = Rewrite(_OP, find_flash_attention)


def _why_not_flash(graph: NodeUsers, name: str, q: str, k: str, v: str) -> str:
    """Why flash attention cannot take the place of an attention; empty if it can."""
    shapes = [graph.shape(item) for item in (q, k, v)]
    dropout = graph.argument(name, 4, "dropout_p", 0.0)
    if dropout:
        return f"it has dropout {dropout}, the kernel none"
    if any(len(shape) != 4 for shape in shapes):
        return f"expected q, k and v of 4 dimensions, found {', '.join(str(list(shape)) for shape in shapes)}"
    if shapes[1] != shapes[2]:
        return f"k {list(shapes[1])} and v {list(shapes[2])} differ"
    if shapes[0][3] > _LARGEST_HEAD:
        return f"its head size {shapes[0][3]} is above {_LARGEST_HEAD}"
    if graph.tensor(name, 3, "attn_mask") is not None and graph.argument(name, 5, "is_causal", False):
        return "it has a mask and is causal"
    return ""


def _flash_replacement(
    graph: NodeUsers, name: str, heads: tuple[str, str, str], mask: str | None, found: Mask
) -> Replacement:
    """Flash attention in the place of an attention."""
    q, k, v = heads
    unrepeated = (
        _unrepeated_key_heads(graph, k, graph.shape(q)[1]),
        _unrepeated_key_heads(graph, v, graph.shape(q)[1]),
    )
    if (
        unrepeated[0] is not None
        and unrepeated[1] is not None
        and graph.shape(unrepeated[0]) == graph.shape(unrepeated[1])
    ):
        k, v = unrepeated[0], unrepeated[1]
    calls: list[KernelCall] = []
    for key in found.keys[1:]:
        calls.append(
            KernelCall("torch.Tensor.__and__", (Ref(f"#{len(calls) - 1}" if calls else found.keys[0]), Ref(key)))
        )
    if found.keys:
        visible = Ref(f"#{len(calls) - 1}" if calls else found.keys[0])
        calls.append(KernelCall("torch.where", (visible, 0.0, float("-inf"))))
    bias = Ref(f"#{len(calls) - 1}") if found.keys else None if found.bias is None else Ref(found.bias)
    scale = graph.argument(name, 6, "scale")
    options: list[tuple[str, object]] = [] if scale is None else [("scale", scale)]
    options += [] if found.offset is None else [("causal", True)]
    options += [("causal_offset", found.offset)] if found.offset else []
    calls.append(KernelCall(_TARGET, (Ref(q), Ref(k), Ref(v), *(() if bias is None else (bias,))), tuple(options)))
    inputs = (q, k, v) if mask is None else (q, k, v, mask)
    given = () if mask is None or found.bias is not None else graph.between(mask, found.keys)
    return Replacement(_OP, graph.between(name, inputs), tuple(calls), given)


def _unrepeated_key_heads(graph: NodeUsers, name: str, num_heads: int) -> str | None:
    """The key heads that `x[:, :, None].expand(...).reshape(...)` repeats, if nothing else reads what is repeated."""
    for operation in (("reshape", "flatten"), ("expand",), ("getitem", "unsqueeze")):
        if graph.op(name) not in operation or graph.sole_user(name) is None:
            return None
        name = graph.node(name).inputs[0]
    shape = graph.shape(name)
    return name if len(shape) == 4 and shape[1] and num_heads % shape[1] == 0 else None


_LARGEST = 2**28  # elements of a mask that is computed here
_SAME_VALUES = ("expand", "contiguous", "broadcast_to", "expand_as")


@dataclass(frozen=True, slots=True)
class Mask:
    """The hidden keys: the future of `offset`, unless None, and keys where the conjunction of `keys` is false; or `bias` is added."""

    offset: int | None = None
    keys: tuple[str, ...] = ()
    bias: str | None = None


def read_mask(graph: NodeUsers, mask: str, num_queries: int, num_keys: int) -> Mask | str:
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
    for part in dict.fromkeys(_parts_of_mask(graph, mask)):
        value = _constant_of_mask(graph, part)
        if value is not None and bool(value.all()):
            continue
        shape = graph.shape(part)
        if len(shape) == 4 and shape[2] == 1 and shape[3] == num_keys:
            keys.append(part)
            continue
        found = None if value is None else _triangle_of_mask(value, num_queries, num_keys)
        if found is None or offset not in (None, found):
            return f"its mask {spec} hides other keys of every query"
        offset = found
    return Mask(offset, tuple(keys))


def _parts_of_mask(graph: NodeUsers, name: str) -> Iterator[str]:
    """The parts of a conjunction."""
    if graph.op(name) in _SAME_VALUES and len(graph.node(name).inputs) >= 1:
        yield from _parts_of_mask(graph, graph.node(name).inputs[0])
    elif graph.op(name) == "and" and graph.tensors(name) is not None:
        for operand in graph.tensors(name) or ():
            yield from _parts_of_mask(graph, operand)
    else:
        yield name


def _constant_of_mask(graph: NodeUsers, name: str) -> torch.Tensor | None:
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


def _triangle_of_mask(value: torch.Tensor, num_queries: int, num_keys: int) -> int | None:
    """The offset of the lower triangle that a mask is, in every batch and head."""
    if value.shape[-2:] != (num_queries, num_keys):
        return None
    for offset in dict.fromkeys((0, num_keys - num_queries)):
        lower = torch.ones(num_queries, num_keys, dtype=torch.bool).tril(offset)
        if bool((value == lower).all()):
            return offset
    return None
