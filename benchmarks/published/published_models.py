"""The models of the published runs, as plain PyTorch on the meta device: GPT as Megatron-LM trained it, and Llama 3.

A GPT's attention is made of two products and a softmax over scores in memory, with a dropout, as kernels of 2021 did it; a Llama's is one
fused kernel. Both return the loss of the next token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Sizes:
    """What a model is made of; a family is "gpt" or "llama"."""

    family: str
    layers: int
    width: int
    heads: int
    vocabulary: int
    sequence: int
    kv_heads: int = 0
    hidden: int = 0


class Attention(nn.Module):
    """Self-attention over all tokens before."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads, self.width = sizes.heads, sizes.width // sizes.heads
        self.kv_heads, self.is_fused = sizes.kv_heads or sizes.heads, sizes.family == "llama"
        own, shared, bias = sizes.width, self.kv_heads * self.width, not self.is_fused
        self.q, self.k, self.v = (nn.Linear(own, outputs, bias=bias) for outputs in (own, shared, shared))
        self.out = nn.Linear(own, own, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.split(part(x)) for part in (self.q, self.k, self.v))
        if self.is_fused:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.kv_heads != self.heads)
        else:
            scores = torch.softmax(torch.matmul(q, k.transpose(-1, -2)), -1)
            mixed = torch.matmul(F.dropout(scores, 0.1, self.training), v)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def split(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], x.shape[1], -1, self.width).transpose(1, 2)


class GPTBlock(nn.Module):
    """Attention and two linear layers, each after a LayerNorm and before a dropout."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(sizes.width), nn.LayerNorm(sizes.width)
        self.attention = Attention(sizes)
        self.up, self.down = nn.Linear(sizes.width, 4 * sizes.width), nn.Linear(4 * sizes.width, sizes.width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.dropout(self.attention(self.ln_1(x)), 0.1, self.training)
        return x + F.dropout(self.down(F.gelu(self.up(self.ln_2(x)), approximate="tanh")), 0.1, self.training)


class LlamaBlock(nn.Module):
    """Attention and a gated feed-forward layer, each after an RMSNorm."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(sizes.width), nn.RMSNorm(sizes.width)
        self.attention = Attention(sizes)
        self.gate, self.up = (nn.Linear(sizes.width, sizes.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(sizes.hidden, sizes.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        y = self.norm_2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class LanguageModel(nn.Module):
    """Embeddings, blocks and the loss; a GPT's head shares the embedding's weight."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        is_gpt = sizes.family == "gpt"
        block, norm = (GPTBlock, nn.LayerNorm) if is_gpt else (LlamaBlock, nn.RMSNorm)
        self.embed = nn.Embedding(sizes.vocabulary, sizes.width)
        self.positions = nn.Embedding(sizes.sequence, sizes.width) if is_gpt else None
        self.layers = nn.ModuleList(block(sizes) for _ in range(sizes.layers))
        self.norm = norm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)
        if is_gpt:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        if self.positions is not None:
            x = x + self.positions.weight
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), ids.flatten())
