"""Differences between releases of transformers.

    4.30      a layer returns a tuple: its hidden states; its keys and values, where it is asked to use a cache; the rest
    4.5x      a tuple, too; caches are objects that the caller has
    5         the hidden states, or a tuple where there is more to it

Which of them holds is read from the arguments of the layer's forward where they tell, else from the release.
"""

from __future__ import annotations

import functools
import importlib.metadata
import re
from collections.abc import Callable, Mapping
from inspect import Parameter
from typing import Any

from torch import Tensor

Signature = Mapping[str, Parameter]
Result = Callable[
    ..., Any
]  # of the layer's parameters, new hidden states, biases by position, and the cache where one is returned


def is_before(major: int, minor: int = 0) -> bool:
    """Whether the transformers that is installed is older than a release; none at all is not."""
    return _installed_release() < (major, minor)


@functools.cache
def _installed_release() -> tuple[float, ...]:
    try:
        version = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        return (float("inf"),)
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def hidden_only(parameters: Signature, hidden: Tensor, bias: Tensor | None, *cache: Any) -> Any:
    """The result of layers that return hidden states alone, in a tuple where they could be asked for attention weights."""
    return (hidden, *cache) if "output_attentions" in parameters else hidden


def without_weights(parameters: Signature, hidden: Tensor, bias: Tensor | None, *cache: Any) -> tuple[Any, ...]:
    """The result of layers that return their attention weights besides, which distributed ones do not have."""
    return (hidden, *cache) if is_before(4, 54) else (hidden, None)


def with_biases(parameters: Signature, hidden: Tensor, bias: Tensor | None, *cache: Any) -> tuple[Any, ...]:
    """The result of layers that return their position biases, and None for cross-attention's."""
    return hidden, *cache, bias, None


def until_positions(parameters: Signature) -> bool:
    """Whether layers return their caches: in releases that do not pass them cache positions."""
    return "output_attentions" in parameters and "cache_position" not in parameters


def until_keywords(parameters: Signature) -> bool:
    """Whether layers return their caches: in releases whose layers take no further keyword arguments."""
    return not any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters.values())


def until_objects(parameters: Signature) -> bool:
    """Layers return their caches until 4.54."""
    return is_before(4, 54)
