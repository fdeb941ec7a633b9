"""Fewer outputs: unwanted outputs of a model become None, and operations that only they needed are dropped.

    before    CausalLMOutput(loss=loss, logits=logits)
    after     CausalLMOutput(loss=loss, logits=None)              keep_outputs(trace, ("loss",))

A tensor-parallel rank returns whole tensors, so logits that are returned must be gathered, even if the loss is computed of slices.
An output is named as Python reaches it: `loss`, `[0]`, `encoder[1]`; a name includes everything below it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from smpc.errors import ConfigError
from smpc.tracer.constants import references
from smpc.tracer.ir import Trace


def keep_outputs(trace: Trace, names: Sequence[str]) -> Trace:
    """The trace with no other tensors than these among its outputs. ConfigError for names that it does not have."""
    paths = [_plain_output_name(path) for path in trace.output.paths()]
    unknown = [name for name in names if not any(_is_below(path, name) for path in paths)]
    tensors = [path for path, leaf in zip(paths, trace.output_leaves, strict=True) if references(leaf)]
    if unknown or not names:
        raise ConfigError(
            f"tensor_parallel_outputs: expected names among {', '.join(tensors) or 'none'}, found {', '.join(unknown) or 'no name'}"
        )
    leaves = tuple(
        leaf if not references(leaf) or any(_is_below(path, name) for name in names) else None
        for path, leaf in zip(paths, trace.output_leaves, strict=True)
    )
    return dataclasses.replace(trace, output_leaves=leaves)


def loss_outputs(trace: Trace) -> tuple[str, ...] | None:
    """The outputs needed for training: the model's `loss`, a number, and other numbers. None: all, since the loss is unknown."""
    specs = {node.name: node.spec for node in trace.nodes}
    names = []
    for path, leaf in zip(trace.output.paths(), trace.output_leaves, strict=True):
        found = [specs[name] for name in references(leaf)]
        if found and all(spec is not None and spec.shape == () for spec in found):
            names.append(_plain_output_name(path))
    return tuple(names) if "loss" in names else None


def _plain_output_name(path: str) -> str:
    """ "loss" of ".loss" and of "['loss']"; "[0]" stays."""
    return path.replace("['", ".").replace("']", "").lstrip(".")


def _is_below(path: str, name: str) -> bool:
    return path == name or path.startswith((f"{name}.", f"{name}["))
