"""Random numbers of shared operations as one process draws them: every rank draws for the whole, and keeps its slice.

    dropout(x, p)                          x * dropout_noise(shape of x, p)
    scaled_dot_product_attention(...)      attention_with_noise(..., dropout_noise(queries x keys, p)); what hides the future becomes a mask

The noise depends on no parameter, so that it is whole on every rank, and cut where slices meet it (`Facts.constants`); `RULES` say how
attention is shared then. Everything else that draws and depends on parameters runs whole (`Facts.draws_whole`). It costs memory and time:
noise is as large as on one process until it is cut, and attention with dropout keeps its weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

import torch

from smpc.codegen.rewrite.kernels.pattern_graph import KernelCall, Replacement
from smpc.codegen.rewrite.kernels.rewrite import Measurer, splice
from smpc.codegen.rewrite.tensor_parallel.strategy import Facts, Rule, Strategy, argument, operands, short_name
from smpc.tracer.constants import Ref, TraceDevice
from smpc.tracer.ir import Node, NodeKind, Trace, contiguous_stride
from smpc.tracer.targets import TENSOR_OPS

_HALF = (torch.float16, torch.bfloat16)


def draw_whole(trace: Trace) -> Trace:
    """The trace with dropouts as products of values and of noise."""
    measurer = Measurer(trace)
    found = []
    for replacement in _dropout_replacements(trace):
        nodes = measurer.nodes(replacement)
        if isinstance(nodes, tuple):
            found.append((replacement, nodes))
    return splice(trace, found, measurer.storages) if found else trace


def _dropout_replacements(trace: Trace) -> Iterator[Replacement]:
    """Replacements of operations with dropout, whose noise is drawn whole."""
    for node in trace.nodes:
        if not node.random or node.kind is not NodeKind.CALL_FUNCTION or node.mutates or node.autocast is not None:
            continue
        calls = {"dropout": _dropout_by_noise, "scaled_dot_product_attention": _attention_by_noise}.get(
            short_name(node.target)
        )
        found = None if calls is None else calls(trace, node)
        if found is not None:
            yield Replacement("draw_whole", (node.name,), found)


def _dropout_by_noise(trace: Trace, node: Node) -> tuple[KernelCall, ...] | None:
    """A dropout as a product with noise that is drawn whole."""
    given, p = argument(node, 0, "input"), argument(node, 1, "p", 0.5)
    spec = trace.node(given.name).spec if isinstance(given, Ref) else None
    if spec is None or not isinstance(p, (int, float)):
        return None
    return (_whole_noise(spec.shape, spec.stride, p, spec.torch_dtype), KernelCall("torch.mul", (given, Ref("#0"))))


def _attention_by_noise(trace: Trace, node: Node) -> tuple[KernelCall, ...] | None:
    """Attention with dropout, whose noise is drawn whole."""
    tensors = [argument(node, place, name) for place, name in enumerate(("query", "key", "value"))]
    mask, p = argument(node, 3, "attn_mask"), argument(node, 4, "dropout_p", 0.0)
    if not all(isinstance(each, Ref) for each in tensors) or not isinstance(p, (int, float)):
        return None
    query, key = (trace.node(each.name).spec for each in tensors[:2])
    if query is None or key is None or not (mask is None or isinstance(mask, Ref)):
        return None
    if len(query.shape) != len(key.shape) or query.shape[:-3] != key.shape[:-3]:
        return None
    rows, columns = query.shape[-2], key.shape[-2]
    calls = []
    if argument(node, 5, "is_causal", False):
        ones = KernelCall("torch.ones", (rows, columns), (("dtype", torch.bool), ("device", TraceDevice())))
        calls += [ones, KernelCall("torch.tril", (Ref("#0"),))]
        mask = Ref("#1")
    shape = (*query.shape[:-1], columns)
    wide = torch.float32 if query.torch_dtype in _HALF else query.torch_dtype
    calls.append(_whole_noise(shape, contiguous_stride(shape), p, wide))
    options = tuple(
        (name, value)
        for place, name, default in ((6, "scale", None), (7, "enable_gqa", False))
        if (value := argument(node, place, name, default)) != default
    )
    calls.append(KernelCall(f"{TENSOR_OPS}.attention_with_noise", (*tensors, mask, Ref(f"#{len(calls) - 1}")), options))
    return tuple(calls)


def _whole_noise(shape: tuple[int, ...], stride: tuple[int, ...], p: float, dtype: torch.dtype) -> KernelCall:
    options = (("dtype", dtype), ("device", TraceDevice()))
    return KernelCall(f"{TENSOR_OPS}.dropout_noise", (shape, stride, p), options)


def _attention_with_noise(facts: Facts, node: Node) -> Iterator[Strategy]:
    """Along samples and heads, or along the queries, whose rows of the mask and of the noise go with them."""
    names = operands(*(arg for arg in node.args if isinstance(arg, Ref)))
    if names is None:
        return
    query, key, value, *weights = names
    out = facts.shape(node.name)
    rank = len(out)
    for dim in range(rank - 1):
        shared = dim if dim < rank - 2 else None
        dims: dict[str, int | None] = {query: dim, key: shared, value: shared}
        if any(facts.shape(name)[place] % facts.degree for name, place in dims.items() if place is not None):
            continue
        for name in weights:
            own = facts.shape(name)
            at = dim - (rank - len(own))
            dims[name] = at if at >= 0 and own[at] == out[dim] else None
        yield from (found for found in facts.along(node, dims, dim, out[dim]) if not found.output.blocks)


RULES: Mapping[str, Rule] = MappingProxyType({f"{TENSOR_OPS}.attention_with_noise": _attention_with_noise})  # by target
