"""Python's clocks, years ahead for the code of a model: what it does then, it will do some time.

A recording is made once more where the model reads a clock. Was it a deadline, or the time of the day, then the second trace is another one
under a moved clock; where the model only measures how long something takes, it is the same.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import BuiltinFunctionType
from typing import Any

from smpc.tracer.environment.reached import is_trusted

_AHEAD_NS = 315_360_001_370_000_007  # ten years, and no multiple of what a model may divide by
_COUNTING = ("time", "perf_counter", "monotonic", "process_time", "thread_time", "clock_gettime")
CLOCKS: tuple[Any, ...] = tuple(
    getattr(time, name) for clock in _COUNTING for name in (clock, f"{clock}_ns") if hasattr(time, name)
)
DATES: tuple[Any, ...] = (time.localtime, time.gmtime, time.ctime, time.asctime, time.strftime)  # of now, if not told


@contextmanager
def ahead(namespaces: Iterable[dict[str, Any]]) -> Iterator[None]:
    """Moves the clocks in module `time` and in these namespaces, for what this thread's code reads, Python's and torch's aside."""
    thread = threading.get_ident()
    moved = {clock: partial(_count, clock, thread) for clock in CLOCKS}
    moved |= {date: partial(_date, date, thread) for date in DATES}
    places = [
        (space, name)
        for space in (vars(time), *namespaces)
        for name, value in list(space.items())
        if type(value) is BuiltinFunctionType and value in moved
    ]
    before = [space[name] for space, name in places]
    for (space, name), clock in zip(places, before, strict=True):
        space[name] = _function(moved[clock])
    try:
        yield
    finally:
        for (space, name), clock in zip(places, before, strict=True):
            space[name] = clock


def _function(call: Callable[..., Any]) -> Callable[..., Any]:
    """As a function of this module: guards know these for smpc's own."""

    def clock(*args: Any) -> Any:
        return call(sys._getframe(1).f_globals, *args)

    return clock


def _is_models(thread: int, caller: dict[str, Any]) -> bool:
    return threading.get_ident() == thread and not is_trusted(str(caller.get("__name__", "")))


def _count(clock: Any, thread: int, caller: dict[str, Any], *args: Any) -> Any:
    now = clock(*args)
    if not _is_models(thread, caller):
        return now
    return now + (_AHEAD_NS if isinstance(now, int) else _AHEAD_NS / 1e9)


def _date(date: Any, thread: int, caller: dict[str, Any], *args: Any) -> Any:
    is_told = len(args) == (2 if date is _STRFTIME else 1)
    if is_told or not _is_models(thread, caller):
        return date(*args)
    seconds = _TIME() + _AHEAD_NS / 1e9
    return date(*args, _LOCALTIME(seconds) if date in (_ASCTIME, _STRFTIME) else seconds)


_TIME, _LOCALTIME, _ASCTIME, _STRFTIME = (
    time.time,
    time.localtime,
    time.asctime,
    time.strftime,
)  # as they are outside `ahead`
