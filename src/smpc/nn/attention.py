"""Attention split over tensor-parallel ranks by heads: `DistributedAttentionLayer`.

    inside hidden state -> [layer norm] -> query, key, value by columns -> heads / tp heads of attention -> dense by rows
                        -> dropout -> + residual -> [layer norm]

A mask that is no floating-point tensor says 1 (true) where a key must not be attended to; a floating-point mask is added to the scores.

Source: "DistributedAttentionLayer" in the public tensor-parallelism reference of SMP v1.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from smpc.nn.layer_norm import DistributedLayerNorm
from smpc.nn.linear import ColumnLinear, RowLinear
from smpc.nn.parallel import DistributedModule, TensorParallel, current_parallel


class DistributedAttentionLayer(DistributedModule):
    """Self- or cross-attention with its output layer, dropout, residual connection and layer normalization.

    The arguments are global quantities and those of DistributedTransformerLayer; with `cross_attention` keys and values come from the
    `cross_states`. `is_inside` (not in the reference): inputs and output are as they are between distributed layers.
    """

    def __init__(
        self,
        num_attention_heads: int = 32,
        attention_head_size: int = 32,
        hidden_size: int = 1024,
        attention_dropout_prob: float = 0.1,
        hidden_dropout_prob: float = 0.1,
        layernorm_epsilon: float = 1e-5,
        initializer_range: float = 0.02,
        use_normal_initialization: bool = False,
        cross_attention: bool = False,
        causal_mask_size: int | None = None,
        pre_layernorm: bool = False,
        post_layernorm: bool = True,
        *,
        is_inside: bool = False,
        parallel: TensorParallel | None = None,
    ) -> None:
        super().__init__(parallel or current_parallel())
        check_layer_norms("DistributedAttentionLayer", pre_layernorm, post_layernorm)
        self._check_sizes(num_attention_heads, hidden_size)
        self.head_size, self.cross_attention = attention_head_size, cross_attention
        self.causal_mask_size, self.is_inside = causal_mask_size, is_inside
        self.attention_dropout_prob, self.hidden_dropout_prob = attention_dropout_prob, hidden_dropout_prob
        channels = num_attention_heads * attention_head_size
        split = self.parallel

        def columns() -> ColumnLinear:
            return ColumnLinear(
                hidden_size,
                channels,
                initializer_range=initializer_range,
                use_normal_initialization=use_normal_initialization,
                parallel=split,
            )

        def norm(wanted: bool) -> DistributedLayerNorm | None:
            return DistributedLayerNorm(hidden_size, layernorm_epsilon, parallel=split) if wanted else None

        self.pre_layernorm = norm(pre_layernorm)
        self.query, self.key, self.value = columns(), columns(), columns()
        self.dense = RowLinear(
            channels,
            hidden_size,
            initializer_range=initializer_range,
            use_normal_initialization=use_normal_initialization,
            parallel=split,
        )
        self.layernorm = norm(post_layernorm)

    def forward(self, inputs: tuple[Tensor | None, ...]) -> Tensor:
        """(hidden_states [N, S, H], mask [N, 1, 1, S] or None) to [N, S, H]; with cross-attention (hidden_states, cross_states, mask)."""
        hidden, cross, mask = self._arguments(inputs)
        if not self.is_inside:
            hidden = self.parallel.enter(hidden)
            cross = None if cross is None else self.parallel.enter(cross)
            mask = None if mask is None else self.parallel.enter_whole(mask)
        residual = hidden
        if self.pre_layernorm is not None:
            hidden = self.pre_layernorm(hidden)
        whole = self.parallel.before_columns(hidden)
        source = whole if cross is None else self.parallel.before_columns(cross)
        context = self._attend(self.query(whole), self.key(source), self.value(source), mask)
        output = residual + hidden_dropout(self, self.dense(context), self.hidden_dropout_prob)
        if self.layernorm is not None:
            output = self.layernorm(output)
        return output if self.is_inside else self.parallel.leave(output)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Attention of this rank's heads: [N, S, channels / tp] each, to [N, S, channels / tp]."""
        q, k, v = (tensor.view(*tensor.shape[:2], -1, self.head_size).transpose(1, 2) for tensor in (query, key, value))
        dropout = self.attention_dropout_prob if self.training else 0.0
        bias, is_causal = self._bias(q, k, mask)
        if dropout and not is_fake(q):
            with self.parallel.streams.split(q.device):
                context = F.scaled_dot_product_attention(q, k, v, bias, dropout, is_causal)
        else:
            context = F.scaled_dot_product_attention(q, k, v, bias, dropout, is_causal)
        return context.transpose(1, 2).flatten(2)

    def _bias(self, query: Tensor, key: Tensor, mask: Tensor | None) -> tuple[Tensor | None, bool]:
        """What is added to the scores, and whether they are causal by shape alone."""
        queries, keys = query.shape[-2], key.shape[-2]
        is_causal = self.causal_mask_size is not None and not self.cross_attention
        if is_causal and self.causal_mask_size is not None and keys > self.causal_mask_size:
            raise ValueError(
                f"{type(self).__name__}: expected at most causal_mask_size = {self.causal_mask_size} positions, found {keys}"
            )
        if mask is None:
            return None, is_causal
        if mask.shape[-1] != keys:
            raise ValueError(
                f"{type(self).__name__}: expected a mask [N, 1, 1, {keys}], found shape {tuple(mask.shape)}"
            )
        bias = mask.to(query.dtype)
        if not mask.is_floating_point():
            bias = torch.zeros_like(bias).masked_fill(mask.bool(), torch.finfo(query.dtype).min)
        if is_causal:
            later = torch.ones(queries, keys, dtype=torch.bool, device=query.device).triu(1)
            bias = bias.expand(-1, -1, queries, keys).masked_fill(later, torch.finfo(query.dtype).min)
        return bias, False

    def _arguments(self, inputs: tuple[Tensor | None, ...]) -> tuple[Tensor, Tensor | None, Tensor | None]:
        names = (
            ("hidden_states", "cross_states", "attention_mask")
            if self.cross_attention
            else ("hidden_states", "attention_mask")
        )
        found = tuple_of(self, inputs, names)
        hidden = found[0]
        cross = found[1] if self.cross_attention else None
        assert hidden is not None
        return hidden, cross, found[-1]

    def _check_sizes(self, num_attention_heads: int, hidden_size: int) -> None:
        sizes = {"num_attention_heads": num_attention_heads}
        if self.parallel.splits_hidden:
            sizes["hidden_size"] = hidden_size
        self.parallel.check_divides(type(self).__name__, **sizes)


def hidden_dropout(module: DistributedModule, hidden: Tensor, probability: float) -> Tensor:
    """Dropout of a hidden state inside: the same on all ranks where it is replicated, different where it is split."""
    if not module.training or not probability or is_fake(hidden):
        return F.dropout(hidden, probability, module.training)
    streams = module.parallel.streams
    stream = streams.split if module.parallel.splits_hidden else streams.replicated
    with stream(hidden.device):
        return F.dropout(hidden, probability, True)


def check_layer_norms(owner: str, pre_layernorm: bool, post_layernorm: bool) -> None:
    """Raises ValueError unless one of the two is set."""
    if not (pre_layernorm or post_layernorm):
        raise ValueError(f"{owner}: expected pre_layernorm or post_layernorm to be True, found both False")


def tuple_of(module: DistributedModule, inputs: object, names: tuple[str, ...]) -> tuple[Tensor | None, ...]:
    """The inputs of a module that takes one tuple; ValueError unless it has one tensor (or, after the first, None) for each name."""
    found = tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)
    is_right = len(found) == len(names) and isinstance(found[0], Tensor)
    if not is_right or not all(value is None or isinstance(value, Tensor) for value in found):
        kinds = ", ".join(type(value).__name__ for value in found)
        raise ValueError(f"{type(module).__name__}: expected one tuple ({', '.join(names)}), found ({kinds})")
    return found
