"""Sample inputs: the batch that a model is compiled for, in the forms that users may give it, and the first microbatch of it.

    a tensor                        model(tensor)
    a tuple or list                 positional arguments
    a dict                          keyword arguments
    a (tuple, dict) pair            both

They are one whole batch. Every tensor of at least one dimension is split along axis 0 into microbatches; all else goes to each of them.

    >>> first_microbatch(as_inputs({"ids": torch.zeros(8, 3), "scale": 2.0}), 4)[1]["ids"].shape
    torch.Size([2, 3])
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from smpc.errors import ConfigError
from smpc.tracer.structure import flatten, input_path

Inputs = tuple[tuple[Any, ...], dict[str, Any]]  # args, kwargs


def as_inputs(sample_inputs: Any) -> Inputs:
    """Sample inputs in one of their forms as (args, kwargs)."""
    if isinstance(sample_inputs, torch.Tensor):
        return (sample_inputs,), {}
    if isinstance(sample_inputs, Mapping):
        return (), _named_sample_inputs(sample_inputs)
    if isinstance(sample_inputs, (tuple, list)):
        if (
            len(sample_inputs) == 2
            and isinstance(sample_inputs[0], (tuple, list))
            and isinstance(sample_inputs[1], dict)
        ):
            return tuple(sample_inputs[0]), _named_sample_inputs(sample_inputs[1])
        return tuple(sample_inputs), {}
    raise ConfigError(
        "sample inputs: expected a tensor, a tuple or list of arguments, a dict of keyword arguments or a (tuple, dict) "
        f"pair, found {type(sample_inputs).__name__}"
    )


def _named_sample_inputs(inputs: Mapping[Any, Any]) -> dict[str, Any]:
    """Keyword arguments; ConfigError for names that are no strings."""
    wrong = [key for key in inputs if not isinstance(key, str)]
    if wrong:
        raise ConfigError(f"sample inputs: expected names of keyword arguments as keys, found {wrong[0]!r}")
    return {str.__str__(key): value for key, value in inputs.items()}


def first_microbatch(inputs: Inputs, microbatches: int) -> Inputs:
    """The first of `microbatches` equal parts along axis 0 of every tensor that has an axis. Raises as `microbatch` does."""
    return microbatch(inputs, microbatches, 0)


def microbatch(inputs: Inputs, microbatches: int, number: int) -> Inputs:
    """One of `microbatches` equal parts along axis 0 of every tensor that has an axis; `number` counts from 0.

    Raises ConfigError, naming every input whose size the number of microbatches does not divide.
    """
    leaves, structure = flatten(inputs)
    parts, wrong = [], []
    for leaf, path in zip(leaves, structure.paths(), strict=True):
        if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0:
            parts.append(leaf)
            continue
        size, rest = divmod(leaf.shape[0], microbatches)
        if rest or not size:
            wrong.append(
                f"input {input_path(path)}: batch size {leaf.shape[0]} (axis 0) is not divisible by microbatches = {microbatches}"
            )
        parts.append(leaf.narrow(0, number * size, size))
    if wrong:
        raise ConfigError("\n".join(wrong))
    args, kwargs = structure.unflatten(parts)
    return args, kwargs
