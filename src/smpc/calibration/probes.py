"""Models of the operations that training spends its time in, at growing sizes.

    for probe in probes(torch.float32): probe.model(), probe.inputs()

`TextProbe` is a transformer block in several fashions, so that each operation occurs: LayerNorm and RMS norm in parts, fused attention and
one in parts, rotations, masks, dropout, GELU (fused and in parts), SiLU, ReLU, an embedding, a loss. `ImageProbe` is a level of a
convolutional network.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_WIDTHS = (64, 128, 256, 512, 1024, 2048, 4096)
_CHANNELS = (8, 16, 32, 64, 128, 256, 512)
_HEAD = 32
_LONGEST = 1024  # tokens of a sequence


@dataclass(frozen=True)
class ProbeModel:
    """A model to be measured, and what it is given; `family` and `size`: its place among others."""

    family: str
    size: int
    model: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Any, ...]]


def probes(dtype: torch.dtype, device: torch.device) -> Iterator[ProbeModel]:
    """All of them, the smallest of each family first."""
    for width in _WIDTHS:
        yield _text_probe(width, dtype, device)
    for channels in _CHANNELS:
        yield _image_probe(channels, dtype, device)


def _text_probe(width: int, dtype: torch.dtype, device: torch.device) -> ProbeModel:
    """A probe of operations on text."""
    tokens = 2 * width
    length = min(tokens // 2, _LONGEST)

    def inputs() -> tuple[Any, ...]:
        return (torch.randint(0, 4 * width, (tokens // length, length), device=device),)

    return ProbeModel("text", width, lambda: TextProbe(width).to(device, dtype), inputs)


def _image_probe(channels: int, dtype: torch.dtype, device: torch.device) -> ProbeModel:
    """A probe of operations on images."""
    return ProbeModel(
        "image",
        channels,
        lambda: ImageProbe(channels).to(device, dtype),
        lambda: (torch.randn(2, channels, 32, 32, device=device, dtype=dtype),),
    )


class TextProbe(nn.Module):
    """A block of a language model, [batch, length] of int64 to a loss."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // (_HEAD if width < 512 else 2 * _HEAD))
        self.embedding = nn.Embedding(4 * width, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(4))
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(4))
        self.outs = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(4))
        self.ups = nn.ModuleList(nn.Linear(width, 4 * width, bias=i < 2) for i in range(3))
        self.downs = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(2))
        self.head = nn.Linear(width, 4 * width, bias=False)
        self.weights = nn.ParameterList(torch.ones(width) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        """The loss."""
        x = F.dropout(self.embedding(ids), 0.1)
        x = x + self.outs[0](self._fused(self.qkv[0](self.norms[0](x)), is_causal=True))
        x = x + self.outs[1](self._fused(self.qkv[1](self.norms[1](x)), dropout=0.1))
        x = x + self.outs[2](self._fused(self.qkv[2](self.norms[2](x))))
        x = x + F.dropout(self.outs[3](self._in_parts(self.qkv[3](self._rms(x, 0)))), 0.1)
        h = self.ups[0](self.norms[3](x))
        h = F.gelu(h) + 0.5 * h * (1.0 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * torch.pow(h, 3.0))))
        x = x + self.downs[0](h)
        x = x + self.downs[1](F.silu(self.ups[2](x)) * F.relu(self.ups[1](x)))
        logits = self.head(self._rms(x, 1))
        loss: Tensor = F.cross_entropy(logits.view(-1, logits.shape[-1]).float(), ids.view(-1))
        return loss

    def _rms(self, x: Tensor, index: int) -> Tensor:
        wide = x.to(torch.float32)
        found: Tensor = self.weights[index] * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(
            x.dtype
        )
        return found

    def _heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        batch, length, _ = qkv.shape
        query, key, value = qkv.chunk(3, dim=-1)
        shape = batch, length, self.heads, -1
        return query.view(shape).transpose(1, 2), key.view(shape).transpose(1, 2), value.view(shape).transpose(1, 2)

    def _joined(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2).contiguous().view(x.shape[0], x.shape[2], -1)

    def _fused(self, qkv: Tensor, dropout: float = 0.0, *, is_causal: bool = False) -> Tensor:
        query, key, value = self._heads(qkv)
        query, key = _turned_in_text_probe(query), _turned_in_text_probe(key)
        return self._joined(F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=is_causal))

    def _in_parts(self, qkv: Tensor) -> Tensor:
        query, key, value = self._heads(qkv)
        scores = torch.matmul(query, key.transpose(-1, -2)) / math.sqrt(query.shape[-1])
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=qkv.device).triu(1)
        scores = scores.masked_fill(hidden, -10000.0)
        return self._joined(torch.matmul(F.dropout(F.softmax(scores, dim=-1), 0.1), value))


def _turned_in_text_probe(x: Tensor) -> Tensor:
    """A rotation by halves, as of positions."""
    half = x.shape[-1] // 2
    other = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * 0.5 + other * 0.5


class ImageProbe(nn.Module):
    """A level down and up, [batch, channels, height, width] to a loss."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, 2 * channels, 3, padding=1)
        self.third = nn.Conv2d(3 * channels, channels, 3, padding=1)
        self.each = nn.Conv2d(channels, channels, 3, padding=1, groups=channels)
        self.last = nn.Conv2d(channels, channels, 1)
        self.batch, self.group = nn.BatchNorm2d(channels), nn.GroupNorm(4, 2 * channels)

    def forward(self, x: Tensor) -> Tensor:
        """The loss."""
        wide = F.relu(self.batch(self.first(x)), inplace=True)
        deep = F.gelu(self.group(self.second(F.max_pool2d(wide, 2))))
        joined = torch.cat([F.interpolate(deep, scale_factor=2.0), wide], 1)
        out = self.last(self.each(F.silu(self.third(joined))))
        loss: Tensor = (out + F.adaptive_avg_pool2d(out, 1)).square().mean()
        return loss
