"""What forward reads from outside the process: the clock, entropy, files, environment variables.

    the clock, entropy      a number that is another one in every run. Often only measured and logged: so the model is recorded once more,
                            and where both traces are the same, it does not matter
    files                   may hold something else in the next step
    environment variables   guarded, like globals; so are torch's settings, such as its default dtype, that the model's Python asks for

A module whose trace depends on one of the first two is called whole. Reads are seen as calls of C functions by code of the model, directly
or through Python's standard library. What torch reads for itself, what loggers put in front of a line and what an import does is left
out.
"""

from __future__ import annotations

import datetime
import io
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch

from smpc.tracer.environment.guarded import GuardSource
from smpc.tracer.environment.reached import is_trusted

_CLOCK, _ENTROPY, _FILE = "reads the clock", "draws from the system's entropy", "opens a file"
_CLOCKS = ("time", "perf_counter", "monotonic", "process_time", "thread_time")
_FUNCTIONS: dict[Any, str] = {
    **{getattr(time, name): _CLOCK for clock in _CLOCKS for name in (clock, f"{clock}_ns") if hasattr(time, name)},
    **dict.fromkeys((time.localtime, time.gmtime, time.ctime), _CLOCK),
    **dict.fromkeys(
        (datetime.datetime.now, datetime.datetime.utcnow, datetime.date.today, datetime.datetime.today), _CLOCK
    ),
    **{getattr(os, name): _ENTROPY for name in ("urandom", "getrandom") if hasattr(os, name)},
    **dict.fromkeys((io.open, io.open_code, os.open, os.read, os.stat, os.listdir, os.scandir), _FILE),
}
_PASSING = ("torch.serialization", "numpy")  # read what they are told to
_FOR_ITSELF = frozenset(
    {"torch", "smpc", "logging", "warnings", "importlib", "_frozen_importlib", "threading", "linecache", "traceback", "tokenize",
     "sysconfig", "platform", "multiprocessing", "concurrent", "asyncio"}
)  # fmt: skip
_ENVIRONMENT: dict[CodeType, bool] = {  # whether one variable is read
    type(os.environ).__getitem__.__code__: True,
    type(os.environ).__iter__.__code__: False,
    type(os.environ).copy.__code__: False,
}


@dataclass(frozen=True, slots=True)
class OutsideRead:
    """A read from outside, in the module `fqn`."""

    fqn: str
    line: str
    what: str

    @property
    def is_of_files(self) -> bool:
        """Whether it may give something else in the next step, though a second run gives the same."""
        return self.what == _FILE


def is_outside(function: Any) -> bool:
    """Whether a C function reads something from outside."""
    return function in _FUNCTIONS


def is_environment(code: CodeType) -> bool:
    """Whether a Python function reads environment variables."""
    return code in _ENVIRONMENT


def read_of(function: Any, frame: FrameType, fqn: str) -> OutsideRead | None:
    """What a C function that is about to be called reads from outside for the model's code; None if nothing."""
    what = _FUNCTIONS.get(function)
    origin = None if what is None else model_frame(frame)
    if what is None or origin is None:
        return None
    return OutsideRead(fqn, f"{os.path.basename(origin.f_code.co_filename)}:{origin.f_lineno}", what)


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


class Settings:
    """What torch's functions without arguments say of its settings, as attributes: `SETTINGS.get_default_dtype`."""

    def __getattr__(self, name: str) -> Any:
        return _GETTERS[name]()


SETTINGS = Settings()
_GETTERS: dict[str, Callable[[], Any]] = {
    name: getattr(home, name)
    for home in (torch, torch._C)
    for name in (
        "get_default_dtype", "get_num_threads", "get_num_interop_threads", "_get_float32_matmul_precision",
        "_get_deterministic_algorithms", "_get_deterministic_algorithms_warn_only", "_get_mkldnn_enabled", "_get_cudnn_enabled",
        "_get_cudnn_benchmark", "_get_cudnn_deterministic", "_get_cudnn_allow_tf32", "_get_cublas_allow_tf32", "_get_flash_sdp_enabled",
        "_get_math_sdp_enabled", "_get_mem_efficient_sdp_enabled", "_get_cudnn_sdp_enabled", "_get_default_device",
    )
    if hasattr(home, name)
}  # fmt: skip
_SETTING_OF = {function: name for name, function in _GETTERS.items()}


def is_setting(function: Any) -> bool:
    """Whether a C function says what one of torch's settings is."""
    return function in _SETTING_OF


def setting_of(function: Any, frame: FrameType | None) -> GuardSource | None:
    """Where the setting is that the model's code is about to ask for; None where torch asks for itself."""
    name = _SETTING_OF[function]
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if not is_trusted(module):
            return GuardSource(SETTINGS, name, f"torch's setting {name.removeprefix('_get_').removeprefix('get_')}")
        if module not in ("torch", "torch.utils.deterministic") and not module.startswith("torch.backends"):
            return None
        frame = frame.f_back
    return None


def variable_of(frame: FrameType) -> GuardSource | None:
    """Where the environment variable is that a call is about to read, or all of them; None if the call reads none."""
    reads_one = _ENVIRONMENT.get(frame.f_code)
    environment: Any = frame.f_locals.get("self") if reads_one is not None else None
    if (
        environment is None
        or vars(environment).get("_data") is not vars(os.environ)["_data"]
        or model_frame(frame) is None
    ):
        return None  # os.environb, on systems that have it, has the same data
    if not reads_one:
        return GuardSource(vars(environment), "_data", "the environment", is_shown=False)
    try:
        key = environment.encodekey(frame.f_locals["key"])
    except TypeError:
        return None  # the call will say so
    text = f"environment variable {os.fsdecode(key)!r}"
    return GuardSource(vars(environment)["_data"], key, text, is_shown=False)
