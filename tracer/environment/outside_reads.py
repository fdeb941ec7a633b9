"""Reads of forward from outside the process (the clock, entropy, files), and work that it gives to other threads, whose code is not
recorded.

    the clock, entropy      a number that is another one in every run. Often only measured and logged: so the model is recorded once more,
                            under a clock that is years ahead, and where both traces are the same, it does not matter
    the date                as `datetime` tells it, which nobody can move: as with files
    files                   may hold something else in the next step
    memory (`id`)           a fake is another object than its original tensor
    text of a tensor        its values are not known: as with the clock
    threads, processes      compute what is not recorded

A module whose trace depends on one of them is called whole, and so is one that hands work to others. Reads are seen as calls of C
functions by code of the model, directly or through Python's standard library. Reads by torch itself, by loggers' prefixes and by
imports are left out.

`ahead`: Python's clocks, years ahead for the code of a model. What the code does then, it will do at some time. If it depends on a deadline
or the time of day, the second trace differs; if the model only measures durations, it is the same.
"""

from __future__ import annotations

import datetime
import gc
import io
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures.thread import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.process import BaseProcess
from types import BuiltinFunctionType, CodeType, FrameType, MappingProxyType
from typing import Any

from smpc.tracer.environment.reachable_values import is_trusted

_COUNTING = ("time", "perf_counter", "monotonic", "process_time", "thread_time", "clock_gettime")
_CLOCKS: tuple[Any, ...] = tuple(
    getattr(time, name) for clock in _COUNTING for name in (clock, f"{clock}_ns") if hasattr(time, name)
)
_DATES: tuple[Any, ...] = (time.localtime, time.gmtime, time.ctime, time.asctime, time.strftime)  # of now, if not told

_CLOCK, _DATE = "reads the clock", "asks for the date"
_ENTROPY, _FILE = "draws from the system's entropy", "opens a file"
_MEMORY = "asks where objects are in memory, or who holds them"
_OF_FILES = (
    "open", "read", "pread", "stat", "lstat", "fstat", "statvfs", "access", "readlink", "listdir", "scandir", "getxattr", "getloadavg",
)  # fmt: skip
_COLLECTOR = "asks the garbage collector, which rests while a model is recorded"
_TEXT = "makes text of a tensor's values"
_FUNCTIONS: dict[Any, str] = {
    **dict.fromkeys((*_CLOCKS, *_DATES), _CLOCK),
    **dict.fromkeys(
        (datetime.datetime.now, datetime.datetime.utcnow, datetime.date.today, datetime.datetime.today, os.times), _DATE
    ),
    **{getattr(os, name): _ENTROPY for name in ("urandom", "getrandom") if hasattr(os, name)},
    **dict.fromkeys((io.open, io.open_code), _FILE),
    **dict.fromkeys((id, sys.getrefcount, gc.get_objects, gc.get_referrers, gc.get_count), _MEMORY),
    **dict.fromkeys((gc.isenabled, gc.get_threshold, gc.get_stats, gc.get_debug), _COLLECTOR),
    **{getattr(os, name): _FILE for name in _OF_FILES if hasattr(os, name)},
}
_CONNECTED = frozenset({"sqlite3", "_socket", "socket", "select"})  # modules of types
PARALLEL = "hands work to another thread or process"
_PARALLEL: frozenset[CodeType] = frozenset(
    function.__code__
    for function in (
        threading.Thread.start, threading.Condition.wait, queue.Queue.put, queue.Queue.get,
        ThreadPoolExecutor.submit, BaseProcess.start,
    )
)  # fmt: skip
_ALONE = frozenset({"torch", "smpc", "logging", "importlib", "_frozen_importlib", "warnings"})  # nothing of the model's
_PASSING = ("torch.serialization", "numpy")  # read what they are told to
_FOR_ITSELF = frozenset(
    {"torch", "smpc", "logging", "warnings", "importlib", "_frozen_importlib", "threading", "linecache", "traceback", "tokenize",
     "sysconfig", "platform", "multiprocessing", "concurrent", "asyncio"}
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class OutsideRead:
    """A read from outside, in the module `fqn`, by code with these globals."""

    fqn: str
    line: str
    what: str
    namespace: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def is_of_files(self) -> bool:
        """Whether it may give something else in the next step, though a second run gives the same."""
        return self.what not in (_CLOCK, _ENTROPY, _TEXT)


def is_parallel(code: CodeType) -> bool:
    """Whether a function of Python hands work to another thread or process, or waits for one."""
    return code in _PARALLEL


def handed_over(frame: FrameType, fqn: str) -> OutsideRead | None:
    """The call of such a function for the model's code; None if torch, a logger or an import has called it."""
    origin = frame.f_back
    while origin is not None and is_trusted(name := str(origin.f_globals.get("__name__", ""))):
        if name.partition(".")[0] in _ALONE:
            return None
        origin = origin.f_back
    if origin is None:
        return None
    return _at(origin, fqn, PARALLEL)


def is_outside(function: Any) -> bool:
    """Whether a C function, or a method of a C type, reads something from outside."""
    return function in _FUNCTIONS or type(getattr(function, "__self__", None)).__module__ in _CONNECTED


def read_of(function: Any, frame: FrameType, fqn: str) -> OutsideRead | None:
    """The outside read of a coming call of a C function by the model's code; None if there is none."""
    what = _FUNCTIONS.get(function)
    if what == _MEMORY and is_trusted(str(frame.f_globals.get("__name__", ""))):
        return None  # Python's own code asks for more than it tells
    origin = model_frame(frame)
    if origin is None:
        return None
    if what is None:
        what = f"calls {function.__name__} of a {type(function.__self__).__qualname__}, which others may change"
    return _at(origin, fqn, what)


def text_of(frame: FrameType, fqn: str) -> OutsideRead | None:
    """Text of a tensor; None if it is not for the model's code. `frame`: a function of torch that makes it."""
    maker: FrameType | None = frame
    while maker is not None and maker.f_globals.get("__name__") in ("torch.overrides", "torch._tensor"):
        maker = maker.f_back
    origin = model_frame(maker)
    return None if origin is None else _at(origin, fqn, _TEXT)


def _at(origin: FrameType, fqn: str, what: str) -> OutsideRead:
    return OutsideRead(fqn, f"{os.path.basename(origin.f_code.co_filename)}:{origin.f_lineno}", what, origin.f_globals)


def model_frame(frame: FrameType | None) -> FrameType | None:
    """The frame of the model's code for which this one runs; None if it runs for torch, for a logger, or for an import."""
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if not is_trusted(name):
            return frame
        if name.partition(".")[0] in _FOR_ITSELF and not name.startswith(_PASSING):
            return None
        frame = frame.f_back
    return None


_AHEAD_NS = 315_360_001_370_000_007  # ten years, and no multiple of what a model may divide by


@contextmanager
def ahead(namespaces: Iterable[dict[str, Any]]) -> Iterator[None]:
    """Moves the clocks in module `time` and in these namespaces, for this thread's code, except Python's and torch's."""
    thread = threading.get_ident()
    moved = {clock: partial(_clock_ahead, clock, thread) for clock in _CLOCKS}
    moved |= {date: partial(_date_ahead, date, thread) for date in _DATES}
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


def _clock_ahead(clock: Any, thread: int, caller: dict[str, Any], *args: Any) -> Any:
    """A clock's reading, years ahead for the model's own code."""
    now = clock(*args)
    if not _is_models(thread, caller):
        return now
    return now + (_AHEAD_NS if isinstance(now, int) else _AHEAD_NS / 1e9)


def _date_ahead(date: Any, thread: int, caller: dict[str, Any], *args: Any) -> Any:
    """A date, years ahead for the model's own code unless it gives the time itself."""
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


class CallHook:
    """Has a function called for every call of a Python function, between `resume` and `pause`; pauses nest."""

    # Types whose methods tell nothing of the process. Most of the half a million calls in a recording of 32 layers are of these.
    PLAIN = frozenset({dict, list, tuple, set, frozenset, str, bytes, int, float, MappingProxyType})

    def __init__(self, function: Callable[[FrameType, str, Any], None]) -> None:
        self._function = function
        is_free = sys.getprofile() is None
        self._set: Callable[[Any], None] = sys.setprofile if is_free else sys.settrace
        self._before: Any = None if is_free else sys.gettrace()
        self._pauses = 1

    def __enter__(self) -> None:
        self.resume()

    def __exit__(self, *exception: object) -> None:
        self._pauses = 1
        self._set(self._before)

    def resume(self) -> None:
        """The end of a pause."""
        self._pauses -= 1
        if not self._pauses:
            self._set(self._function)

    def pause(self) -> None:
        """Calls are not told until `resume`."""
        self._pauses += 1
        if self._pauses == 1:
            self._set(self._before)
