"""Loss modules over the ops of `smpc.kernels`: cross-entropy, of a vocabulary cut over ranks, and fused with the output layer.

    CrossEntropyLoss()(logits, labels)                       logits [..., classes], labels [...]
    VocabParallelCrossEntropyLoss(group)(logits, labels)     logits [..., classes / ranks], labels [...] of the whole vocabulary
    LinearCrossEntropyLoss()(hidden, weight, labels)         never holds the logits

The classes are in the last dimension, where language models have them; torch's own loss wants them in the second. Losses are
fp32 whatever the dtype of the logits, labels that are all ignored give 0, and on CUDA the kernels compute them.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor, nn

from smpc.kernels.cross_entropy import cross_entropy
from smpc.kernels.linear_cross_entropy import linear_cross_entropy
from smpc.kernels.vocab_parallel_cross_entropy import vocab_parallel_cross_entropy


class _LossSettings(nn.Module):
    """The settings that all three have: see `smpc.kernels.cross_entropy.cross_entropy`."""

    def __init__(self, ignore_index: int, reduction: str, label_smoothing: float, z_loss: float) -> None:
        super().__init__()
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.label_smoothing = label_smoothing
        self.z_loss = z_loss


class CrossEntropyLoss(_LossSettings):
    """Cross-entropy of logits; arguments as `smpc.kernels.cross_entropy.cross_entropy`."""

    def __init__(
        self,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        inplace_backward: bool = False,
    ) -> None:
        super().__init__(ignore_index, reduction, label_smoothing, z_loss)
        self.inplace_backward = inplace_backward

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        """The loss of logits [..., classes] and labels [...]."""
        return cross_entropy(
            logits,
            target,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            reduction=self.reduction,
            inplace_backward=self.inplace_backward,
        )


class VocabParallelCrossEntropyLoss(_LossSettings):
    """Cross-entropy of this rank's columns; arguments as `smpc.kernels.vocab_parallel_cross_entropy`."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        vocab_size: int | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        inplace_backward: bool = False,
    ) -> None:
        super().__init__(ignore_index, reduction, label_smoothing, z_loss)
        self.group = group
        self.vocab_size = vocab_size
        self.inplace_backward = inplace_backward

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        """The loss of this rank's columns [..., classes / ranks] and labels [...] of the whole vocabulary."""
        return vocab_parallel_cross_entropy(
            logits,
            target,
            self.group,
            vocab_size=self.vocab_size,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            reduction=self.reduction,
            inplace_backward=self.inplace_backward,
        )


class LinearCrossEntropyLoss(_LossSettings):
    """Cross-entropy of a linear layer's output; arguments as `smpc.kernels.linear_cross_entropy.linear_cross_entropy`."""

    def __init__(
        self,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        chunk_rows: int | None = None,
        accumulate_fp32: bool = False,
    ) -> None:
        super().__init__(ignore_index, reduction, label_smoothing, z_loss)
        self.chunk_rows = chunk_rows
        self.accumulate_fp32 = accumulate_fp32

    def forward(self, hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None) -> Tensor:
        """The loss of hidden [..., features] @ weight [classes, features].T (+ bias) and labels [...]."""
        return linear_cross_entropy(
            hidden,
            weight,
            target,
            bias,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            reduction=self.reduction,
            chunk_rows=self.chunk_rows,
            accumulate_fp32=self.accumulate_fp32,
        )
