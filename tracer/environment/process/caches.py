"""What the caches of functools have kept: whoever calls such a function finds it, without any code that runs."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from smpc.tracer.environment.frozen import MISSING
from smpc.tracer.environment.guarded import GuardSource, Question

CACHE: Any = type(functools.lru_cache(lambda: None))


def kept(function: Callable[..., Any]) -> dict[Any, Any]:
    """What the cache of a function has kept, by the key that it has made of the arguments.

    Python tells by its garbage collector alone: a cache without a bound is a dict, one with a bound a list of keys and results, and a dict.
    """
    held = gc.get_referents(function)
    dicts = [each for each in held if type(each) is dict and each is not vars(function)]
    table: dict[Any, Any] = dicts[-1] if dicts else {}
    if function.cache_parameters()["maxsize"] is None:  # type: ignore[attr-defined]
        return dict(table)
    ids, found, position = {id(key) for key in table}, dict[Any, Any](), 0
    while position + 1 < len(held):
        is_key = id(held[position]) in ids
        if is_key:
            found[held[position]] = held[position + 1]
        position += 2 if is_key else 1
    return found


def question(function: Callable[..., Any], keys: Sequence[Any]) -> GuardSource:
    """The guarded place of what it has kept for these keys."""
    asked = Question(("cache", id(function), tuple(map(id, keys))), partial(_kept_for, function, keys), about=function)
    return asked.place(f"what the cache of {function.__qualname__} has kept")


def _kept_for(function: Callable[..., Any], keys: Sequence[Any]) -> tuple[Any, ...]:
    now = kept(function)
    return tuple(now.get(key, MISSING) for key in keys)
