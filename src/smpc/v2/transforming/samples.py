"""A batch to record a model with before there is one: what layouts of weights are chosen by.

It is made of `dummy_inputs`, which Hugging Face's models have, with longer sequences and with labels; or given by the script, as
`transform(model, config={"sample_inputs": batch})`.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from smpc.errors import UsageError
from smpc.sample_inputs import Inputs, as_inputs

SAMPLE = "sample_inputs"
_LENGTH = 512


def samples_of(model: nn.Module, config: Any) -> list[Inputs]:
    """Batches to try in turn. UsageError if there is none."""
    if isinstance(config, dict) and SAMPLE in config:
        return [as_inputs(config[SAMPLE])]
    dummy = getattr(model, "dummy_inputs", None)
    if not isinstance(dummy, dict) or not all(isinstance(value, Tensor) for value in dummy.values()):
        raise UsageError(
            f"transform: expected a model with dummy_inputs, as Hugging Face's have, found {type(model).__name__}; pass one batch, as "
            f"config={{{SAMPLE!r}: batch}}"
        )
    longer = _longer(model, dummy)
    ids = longer.get("input_ids")
    accepts = "labels" in inspect.signature(type(model).forward).parameters
    with_labels = [{**longer, "labels": ids}] if accepts and ids is not None else []
    return [as_inputs(each) for each in (*with_labels, longer, dummy)]


def _longer(model: nn.Module, dummy: dict[str, Tensor]) -> dict[str, Tensor]:
    """Token ids of a length as models are trained with, one sequence."""
    limit = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    length = min(_LENGTH, limit if isinstance(limit, int) and limit > 0 else _LENGTH)
    return {
        name: torch.ones(1, length, dtype=value.dtype) if value.dim() == 2 and value.dtype is torch.int64 else value
        for name, value in dummy.items()
    }
