"""Models that ask for activation checkpointing in every way, with dropout, and the same plan without it."""

from __future__ import annotations

import dataclasses

import torch
import zoo
from torch import nn
from torch.utils import checkpoint

import smpc.v1 as smp
from smpc.compile import Compilation, compile_plan

RATE = 0.2


class ConvNet(nn.Module):
    """Convolutions with BatchNorm, in-place activations and dropout; `how` says who checkpoints the blocks."""

    def __init__(self, how: str, num_blocks: int = 6) -> None:
        super().__init__()
        self.how = how
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.Sequential(*(self._block() for _ in range(num_blocks)))
        self.out = nn.Conv2d(8, 2, 1)
        if how.startswith("list "):
            self.blocks = nn.ModuleList(self.blocks)
            smp.set_activation_checkpointing(self.blocks, strategy=how.removeprefix("list "))
        if how.startswith("mark "):
            smp.set_activation_checkpointing(self.blocks, strategy=how.removeprefix("mark "))

    @staticmethod
    def _block() -> nn.Module:
        inner = (nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Dropout(RATE))
        return nn.Sequential(*inner, nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        if self.how.startswith("sequential "):
            x = smp.checkpoint_sequential(self.blocks, x, strategy=self.how.removeprefix("sequential "))
        elif self.how.startswith("list "):
            for block in self.blocks:
                x = block(x)
        elif self.how == "smp":
            for block in self.blocks:
                x = x + smp.checkpoint(block, x)
        elif self.how in ("reentrant", "not reentrant"):
            for block in self.blocks:
                x = x + checkpoint.checkpoint(self._function(block), x, use_reentrant=self.how == "reentrant")
        else:
            x = self.blocks(x)
        return self.out(x)

    @staticmethod
    def _function(block):
        return lambda x: block(x).relu()


class Nested(nn.Module):
    """Regions inside regions, a weight used inside and outside, keyword arguments, autocast, a frozen layer, a buffer that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(Nested.Layer() for _ in range(4))
        self.norm = nn.LayerNorm(8)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.frozen = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 8)
            self.frozen.requires_grad_(False)
            self.register_buffer("calls", torch.zeros(()))

        def inner(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.dropout(torch.tanh(self.first(x)), RATE, self.training)

        def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> torch.Tensor:
            self.calls = self.calls + 1.0
            h = checkpoint.checkpoint(self.inner, x, use_reentrant=False)
            with torch.autocast("cpu", torch.bfloat16):
                h = self.second(h)
            return x + nn.functional.dropout(self.frozen(h.float()) * scale * self.calls, RATE, self.training)

    def body(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[1:]:
            x = checkpoint.checkpoint(layer, x, use_reentrant=False, scale=scale)
        return nn.functional.linear(self.norm(x), self.embed.weight[:8])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        scale = (ids > 3).float().mean(1)[:, None, None]
        x = self.layers[0](self.embed(ids), scale=scale)
        return checkpoint.checkpoint(self.body, x, scale, use_reentrant=False)


def build(name: str):
    """A model in training mode, with dropout, and a batch of 8."""
    torch.manual_seed(0)
    if name == "nested":
        return Nested(), ((torch.randint(0, 16, (8, 5)),), {})
    if name not in ("gpt2", "t5", "bert", "unet"):
        return ConvNet(name), ((torch.randn(8, 3, 6, 6),), {})
    model, batch = zoo.build(name)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = RATE
    return model.train(), batch


def without(compilation: Compilation) -> Compilation:
    """The same stages and schedule, with nothing computed again and nothing offloaded."""
    trace = dataclasses.replace(compilation.trace, regions=())
    stages = tuple(dataclasses.replace(stage, checkpoints=()) for stage in compilation.plan.stages)
    plan = dataclasses.replace(compilation.plan, stages=stages, loading_horizon=0, trace_fingerprint=trace.fingerprint)
    return compile_plan(trace, plan)
