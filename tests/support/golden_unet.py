"""A U-Net whose compilation is held byte for byte. The names and the line numbers of this file are in its plan: leave them as they are."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class UNet(nn.Module):
    """Two levels down, two up, skip connections across."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = self._block(1, 8), self._block(8, 16)
        self.bottom = self._block(16, 16)
        self.up2, self.up1 = self._block(32, 8), self._block(16, 8)
        self.out = nn.Conv2d(8, 1, 1)

    @staticmethod
    def _block(inputs: int, outputs: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(2, outputs), nn.GELU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        c = self.bottom(F.max_pool2d(b, 2))
        d = self.up2(torch.cat([F.interpolate(c, scale_factor=2), b], dim=1))
        return self.out(self.up1(torch.cat([F.interpolate(d, scale_factor=2), a], dim=1)))
