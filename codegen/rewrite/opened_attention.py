"""Attention of torch.nn as the operations that it is made of, so that sharding rules can cut its heads and its sequence.

    before    y, weights = multi_head_attention_forward(q, k, v, 32, 4, in_proj_weight, in_proj_bias, ...)      [L, N, E] each
    after     linear, chunk               one product where q, k and v are one tensor, else one for each
              view, permute               [N, heads, L, E / heads]: torch joins samples and heads, which hides the heads from the rules
              scaled_dot_product_attention, or what it does one by one where the weights are wanted
              permute, reshape, linear    [L, N, E]

torch.nn.MultiheadAttention and the Transformer layers of torch.nn call it. Masks, `bias_k` and `bias_v`, a zero for every head, separate
projections, samples alone and dropout are as torch has them; the averaged weights are computed if something reads them. Keys and values
that are given (`static_k`) stay one call. Recordings have the call: only what ranks are to share is opened.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass, field
from typing import Any

from torch.nn import functional

from smpc.codegen.rewrite.kernels.pattern_graph import KernelCall, NodeUsers, Replacement
from smpc.codegen.rewrite.kernels.rewrite import Measurer, splice
from smpc.tracer.constants import Ref, TraceDevice
from smpc.tracer.ir import Node, TensorSpec, Trace
from smpc.tracer.targets import GETITEM

TARGET = "torch.nn.functional.multi_head_attention_forward"


def open_attention(trace: Trace) -> Trace:
    """The trace with such calls opened; the very same if there are none."""
    if not any(node.target == TARGET for node in trace.nodes):
        return trace
    graph, measurer = NodeUsers(trace), Measurer(trace)
    found = []
    for node in trace.nodes:
        replacement = _replacement(graph, node) if node.target == TARGET else None
        nodes = None if replacement is None else measurer.nodes(replacement)
        if replacement is not None and isinstance(nodes, tuple):
            found.append((replacement, nodes))
    return splice(trace, found, measurer.storages)


def _replacement(graph: NodeUsers, node: Node) -> Replacement | None:
    """A call and the reads of its results as other calls; None for one that stays."""
    given = inspect.signature(functional.multi_head_attention_forward).bind(*node.args, **dict(node.kwargs))
    given.apply_defaults()
    options = given.arguments
    if options["static_k"] is not None or options["static_v"] is not None:
        return None
    users = graph.users(node.name)
    reads = {graph.node(name).args[1]: name for name in users if graph.op(name) == "getitem"}
    if 0 not in reads or len(reads) < len(users):
        return None
    has_weights = 1 in reads and bool(graph.users(reads[1]))
    opened = _Opened(graph.trace, options, [])
    weights = opened.attention(has_weights=has_weights)
    others = (name for place, name in reads.items() if place)
    also = () if weights is None else ((reads[1], weights.name),)
    return Replacement("open_attention", (node.name, *others, reads[0]), tuple(opened.calls), also=also)


@dataclass(slots=True)
class _Opened:
    """The calls of one attention, as they are added; `options`: its arguments by name."""

    trace: Trace
    options: dict[str, Any]
    calls: list[KernelCall]
    sizes: tuple[int, int, int] = field(init=False)  # samples, heads, elements of each
    is_batched: bool = field(init=False)

    def __post_init__(self) -> None:
        shape = self._spec(self.options["query"]).shape
        self.is_batched = len(shape) == 3
        heads = self.options["num_heads"]
        self.sizes = (shape[1] if self.is_batched else 1, heads, shape[-1] // heads)

    def attention(self, *, has_weights: bool) -> Ref | None:
        """Adds all calls, of which the last gives the result; the one that gives the weights, if they are wanted."""
        samples, heads, each = self.sizes
        projected = [self._in_heads(value) for value in self._extended(self._projected())]
        mask, is_causal = self._mask()
        if self.options["add_zero_attn"]:
            projected[1:] = [self._with_zeros(value) for value in projected[1:]]
            mask = self._padded(mask)
        dropout = self.options["dropout_p"] if self.options["training"] else 0.0
        weights = None
        if self.options["need_weights"]:
            weights = self._weights(projected[0], projected[1], mask, dropout)
            found = self._add("torch.matmul", weights, projected[2])
            weights = self._returned(weights) if has_weights else None
        else:
            found = self._add("torch.nn.functional.scaled_dot_product_attention", *projected, mask, dropout, is_causal)
        found = self._add("torch.Tensor.permute", found, 2, 0, 1, 3)
        found = self._add(
            "torch.Tensor.reshape", found, self._spec(self.options["query"]).shape[0], samples, heads * each
        )
        found = self._linear(found, self.options["out_proj_weight"], self.options["out_proj_bias"])
        if not self.is_batched:
            self._add("torch.Tensor.squeeze", found, 1)
        return weights

    # -- projections ---------------------------------------------------------------------------------------------------

    def _projected(self) -> list[Ref]:
        """Query, key and value, [L, N, E]."""
        names = ("query", "key", "value")
        given = [self.options[name] for name in names]
        inputs = given if self.is_batched else [self._add("torch.Tensor.unsqueeze", value, 1) for value in given]
        bias = self.options["in_proj_bias"]
        separate = self.options["use_separate_proj_weight"]
        if not separate and given[0] == given[1] == given[2]:
            return self._parts(self._linear(inputs[0], self.options["in_proj_weight"], bias), -1)
        weights = [self.options[f"{name[0]}_proj_weight"] for name in names]
        if not separate:
            weights = self._parts(self.options["in_proj_weight"], 0)
        biases = [None] * 3 if bias is None else self._parts(bias, 0)
        return [self._linear(*each) for each in zip(inputs, weights, biases, strict=True)]

    def _extended(self, projected: list[Ref]) -> list[Ref]:
        """With `bias_k` and `bias_v` as a last key and value."""
        query, *others = projected
        biases = [self.options[name] for name in ("bias_k", "bias_v")]
        if None in biases:
            return projected
        size = (1, self.sizes[0], self.sizes[1] * self.sizes[2])
        more = [self._add("torch.Tensor.expand", bias, *size) for bias in biases]
        return [query, *(self._add("torch.cat", pair) for pair in zip(others, more, strict=True))]

    def _in_heads(self, value: Ref) -> Ref:
        """[L, N, E] as [N, heads, L, E / heads]."""
        samples, heads, each = self.sizes
        return self._add(
            "torch.Tensor.permute", self._add("torch.Tensor.view", value, -1, samples, heads, each), 1, 2, 0, 3
        )

    def _with_zeros(self, value: Ref) -> Ref:
        samples, heads, each = self.sizes
        options = (("dtype", self._spec(self.options["query"]).torch_dtype), ("device", TraceDevice()))
        zeros = self._add("torch.zeros", (samples, heads, 1, each), kwargs=options)
        return self._add("torch.cat", (value, zeros), 2)

    # -- masks ---------------------------------------------------------------------------------------------------------

    def _mask(self) -> tuple[Ref | None, bool]:
        """What is added to scores [N, heads, L, S], and whether the attention hides the future itself."""
        samples, heads, _ = self.sizes
        hidden, added, is_causal = (self.options[name] for name in ("key_padding_mask", "attn_mask", "is_causal"))
        has_bias = self.options["bias_k"] is not None
        if is_causal and hidden is None and not self.options["need_weights"]:
            return None, True
        if added is not None:
            shape = self._spec(added).shape
            added = self._as_numbers(added)
            sizes = (samples, heads, *shape[1:]) if len(shape) == 3 else (1, 1, *shape)
            added = self._add("torch.Tensor.view", added, *sizes)
            added = self._padded(added) if has_bias else added
        if hidden is not None:
            keys = self._spec(hidden).shape[-1]
            hidden = self._add("torch.Tensor.view", self._as_numbers(hidden), samples, 1, 1, keys)
            hidden = self._padded(hidden) if has_bias else hidden
        if added is None or hidden is None:
            return hidden if added is None else added, False
        return self._add("torch.add", added, hidden), False

    def _as_numbers(self, mask: Ref) -> Ref:
        """A mask of truth values as 0 and -inf."""
        if self._spec(mask).dtype != "bool":
            return mask
        zeros = self._add("torch.zeros_like", mask, kwargs=(("dtype", self._spec(self.options["query"]).torch_dtype),))
        return self._add("torch.Tensor.masked_fill", zeros, mask, -math.inf)

    def _padded(self, mask: Ref | None) -> Ref | None:
        """With a column of zeros for one key more."""
        return None if mask is None else self._add("torch.nn.functional.pad", mask, (0, 1))

    # -- attention -----------------------------------------------------------------------------------------------------

    def _weights(self, query: Ref, key: Ref, mask: Ref | None, dropout: float) -> Ref:
        scaled = self._add("torch.mul", query, math.sqrt(1.0 / self.sizes[2]))
        scores = self._add("torch.matmul", scaled, self._add("torch.Tensor.transpose", key, -2, -1))
        if mask is not None:
            scores = self._add("torch.add", scores, mask)
        weights = self._add("torch.nn.functional.softmax", scores, kwargs=(("dim", -1),))
        return self._add("torch.nn.functional.dropout", weights, dropout) if dropout > 0.0 else weights

    def _returned(self, weights: Ref) -> Ref:
        """The weights as the call returns them."""
        if self.options["average_attn_weights"]:
            total = self._add("torch.sum", weights, 1)
            weights = self._add("torch.div", total, self.sizes[1])
        return weights if self.is_batched else self._add("torch.Tensor.squeeze", weights, 0)

    # -- calls ---------------------------------------------------------------------------------------------------------

    def _linear(self, value: Ref, weight: Ref, bias: Ref | None) -> Ref:
        return self._add("torch.nn.functional.linear", value, weight, bias)

    def _parts(self, value: Ref, dim: int) -> list[Ref]:
        """Three equal parts."""
        parts = self._add("torch.chunk", value, 3, dim)
        return [self._add(GETITEM, parts, i) for i in range(3)]

    def _add(self, target: str, *args: Any, kwargs: tuple[tuple[str, Any], ...] = ()) -> Ref:
        self.calls.append(KernelCall(target, args, kwargs))
        return Ref(f"#{len(self.calls) - 1}")

    def _spec(self, value: Ref) -> TensorSpec:
        spec = self.trace.node(value.name).spec
        assert spec is not None, "it is one tensor"
        return spec
