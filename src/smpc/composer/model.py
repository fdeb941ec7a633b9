"""The base class of models for the Trainer: a module with its forward pass, its loss and its evaluation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from torch import nn


class ComposerModel(nn.Module, ABC):
    """Derive from it, and put the model that is to be trained into a child."""

    @abstractmethod
    def forward(self, batch: Any) -> Any:
        """The outputs for a microbatch."""

    @abstractmethod
    def loss(self, outputs: Any, batch: Any) -> Any:
        """The mean loss over the microbatch's samples: a tensor, a tuple of tensors to add, or a dict with `total`."""

    def eval_forward(self, batch: Any, outputs: Any = None) -> Any:
        """The outputs for a batch of the evaluation; `outputs`, if they exist already."""
        return self(batch) if outputs is None else outputs
