"""`torch.nn.functional.scaled_dot_product_attention` becomes `smpc.kernels.attention.op.flash_attention`.

Key and value heads that were repeated for groups of queries are taken unrepeated. Masks: `smpc.codegen.rewrite.kernels.masks`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from smpc.codegen.rewrite.kernels.graph import Graph
from smpc.codegen.rewrite.kernels.masks import Mask, read_mask
from smpc.codegen.rewrite.kernels.replacement import Call, Refusal, Replacement, Rewrite
from smpc.tracer.literals import Ref

_OP = "flash_attention"
_TARGET = "smpc.kernels.attention.op.flash_attention"
_LARGEST_HEAD = 256


def find(graph: Graph) -> Iterator[Replacement | Refusal]:
    """Every attention of a trace."""
    read = functools.cache(functools.partial(read_mask, graph))  # layers share a mask
    for name in graph.find("scaled_dot_product_attention"):
        tensors = [graph.tensor(name, i, word) for i, word in enumerate(("query", "key", "value"))]
        q, k, v = (item for item in tensors)
        if q is None or k is None or v is None:
            continue
        reason = _objection(graph, name, q, k, v)
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
            yield _replacement(graph, name, (q, k, v), mask, found)


REWRITE = Rewrite(_OP, find)


def _objection(graph: Graph, name: str, q: str, k: str, v: str) -> str:
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


def _replacement(graph: Graph, name: str, heads: tuple[str, str, str], mask: str | None, found: Mask) -> Replacement:
    q, k, v = heads
    unrepeated = (_unrepeated(graph, k, graph.shape(q)[1]), _unrepeated(graph, v, graph.shape(q)[1]))
    if (
        unrepeated[0] is not None
        and unrepeated[1] is not None
        and graph.shape(unrepeated[0]) == graph.shape(unrepeated[1])
    ):
        k, v = unrepeated[0], unrepeated[1]
    calls: list[Call] = []
    for key in found.keys[1:]:
        calls.append(Call("torch.Tensor.__and__", (Ref(f"#{len(calls) - 1}" if calls else found.keys[0]), Ref(key))))
    if found.keys:
        visible = Ref(f"#{len(calls) - 1}" if calls else found.keys[0])
        calls.append(Call("torch.where", (visible, 0.0, float("-inf"))))
    bias = Ref(f"#{len(calls) - 1}") if found.keys else None if found.bias is None else Ref(found.bias)
    scale = graph.argument(name, 6, "scale")
    options: list[tuple[str, object]] = [] if scale is None else [("scale", scale)]
    options += [] if found.offset is None else [("causal", True)]
    options += [("causal_offset", found.offset)] if found.offset else []
    calls.append(Call(_TARGET, (Ref(q), Ref(k), Ref(v), *(() if bias is None else (bias,))), tuple(options)))
    inputs = (q, k, v) if mask is None else (q, k, v, mask)
    given = () if mask is None or found.bias is not None else graph.between(mask, found.keys)
    return Replacement(_OP, graph.between(name, inputs), tuple(calls), given)


def _unrepeated(graph: Graph, name: str, num_heads: int) -> str | None:
    """The key heads that `x[:, :, None].expand(...).reshape(...)` repeats, if nothing else reads what is repeated."""
    for operation in (("reshape", "flatten"), ("expand",), ("getitem", "unsqueeze")):
        if graph.op(name) not in operation or graph.sole_user(name) is None:
            return None
        name = graph.node(name).inputs[0]
    shape = graph.shape(name)
    return name if len(shape) == 4 and shape[1] and num_heads % shape[1] == 0 else None
