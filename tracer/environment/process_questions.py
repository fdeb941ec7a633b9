"""Questions of the model's code to Python, numpy or torch about the process: each answer is guarded.

    torch.get_default_dtype(), os.getcwd()                    a setting
    os.environ["SCALE"]                                       an environment variable
    isinstance(layer, Sparse), with an ABC                    `Sparse.register` may say otherwise later
    Base.__subclasses__()                                     another class may be derived
    logger.isEnabledFor(DEBUG)                                the logger's level, or a parent's
    Decimal(1) / 3                                            the precision of decimal's context
    lock.acquire(blocking=False)                              whether the lock is free
    a function under functools.lru_cache                      what its cache has kept: whoever calls it finds that, and no code runs
    warnings.warn("slow path")                                an error, if a filter says so

Such calls are seen by a profile function. Questions by torch itself, by a logger or by an import are left out.
"""

from __future__ import annotations

import abc
import decimal
import functools
import gc
import inspect
import logging
import multiprocessing.process
import os
import signal
import sys
import threading
import typing
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import CodeType, FrameType, FunctionType
from typing import Any

import numpy
import torch

from smpc.tracer.environment.environment_guards import GuardSource, Question
from smpc.tracer.environment.outside_reads import model_frame
from smpc.tracer.environment.reachable_values import is_trusted, is_trusted_class
from smpc.tracer.environment.value_snapshots import MISSING
from smpc.tracer.state.python_state import asks_lock, is_held, put_back


def setting(name: str, ask: Callable[[], Any]) -> GuardSource:
    """The guarded place of a setting."""
    return Question((name,), ask).place(name)


_OF_TORCH: dict[Any, str] = {
    getattr(home, name): name
    for home in (torch, torch._C)
    for name in (
        "get_default_dtype", "get_num_threads", "get_num_interop_threads", "_get_float32_matmul_precision",
        "_get_deterministic_algorithms", "_get_deterministic_algorithms_warn_only", "_get_mkldnn_enabled", "_get_cudnn_enabled",
        "_get_cudnn_benchmark", "_get_cudnn_deterministic", "_get_cudnn_allow_tf32", "_get_cublas_allow_tf32", "_get_flash_sdp_enabled",
        "_get_math_sdp_enabled", "_get_mem_efficient_sdp_enabled", "_get_cudnn_sdp_enabled", "_get_default_device",
    )
    if hasattr(home, name)
}  # fmt: skip
_OF_PYTHON: dict[Any, str] = {
    os.getcwd: "os.getcwd()",
    sys.getrecursionlimit: "sys.getrecursionlimit()",
    sys.getswitchinterval: "sys.getswitchinterval()",
}
DECIMAL = setting("decimal's context", lambda: repr(decimal.getcontext()))


DEFAULT_DTYPE = setting("torch's setting default_dtype", torch.get_default_dtype)


def _filters() -> tuple[Any, ...]:
    """The filters of warnings, and who shows them."""
    shown = [
        (action, getattr(text, "pattern", ""), repr(category), getattr(module, "pattern", ""), line)
        for action, text, category, module, line in warnings.filters
    ]
    return (*shown, warnings.showwarning)


FILTERS = replace(setting("the filters of warnings", _filters), is_shown=False)  # too many
_WARNS = (warnings.warn, warnings.warn_explicit)


def depends_on_decimal(value: Any) -> bool:
    """Whether what is computed with a value depends on decimal's context."""
    return value is decimal or value is decimal.Decimal or isinstance(value, decimal.Decimal)


def is_question(function: Any) -> bool:
    """Whether a C function answers a question about the process."""
    return (
        function in _OF_TORCH
        or function in _OF_PYTHON
        or function in _WARNS
        or (getattr(function, "__name__", "") == "__subclasses__" and isinstance(function.__self__, type))
        or asks_lock(function)
    )


def question_of(function: Any, frame: FrameType) -> GuardSource | None:
    """The question in a coming call of a C function; None if the model's code does not ask it."""
    if function in _OF_TORCH:
        name = _OF_TORCH[function].removeprefix("_get_").removeprefix("get_")
        return setting(f"torch's setting {name}", function) if _asks_torch(frame) else None
    if model_frame(frame) is None:
        return None
    if function in _OF_PYTHON:
        return setting(_OF_PYTHON[function], function)
    if function in _WARNS:
        return FILTERS
    if asks_lock(function):
        return _of_lock(function.__self__)
    cls = function.__self__
    question = Question(("subclasses", id(cls)), partial(_subclasses, cls))
    return question.place(f"the classes derived from {cls.__qualname__}")


def _subclasses(cls: type) -> tuple[type, ...]:
    return tuple(type.__subclasses__(cls))


def _of_lock(lock: Any) -> GuardSource:
    question = Question(("lock", id(lock)), partial(is_held, lock), partial(put_back, lock), lock)
    return question.place(f"whether a {type(lock).__qualname__} is held")


def _asks_torch(frame: FrameType | None) -> bool:
    """Whether code of the model asks torch, by no more than torch's functions for that."""
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if not is_trusted(module):
            return True
        if module not in ("torch", "torch.utils.deterministic") and not module.startswith("torch.backends"):
            return False
        frame = frame.f_back
    return False


# -- functions of Python that are asked --------------------------------------------------------------------------------


def _of_variable(frame: FrameType) -> GuardSource | None:
    """The environment variable that is about to be read; `os.environb`, on systems that have it, has the same data."""
    environment: Any = frame.f_locals.get("self")
    if not _is_environment(environment):
        return None
    try:
        key = environment.encodekey(frame.f_locals["key"])
    except TypeError:
        return None  # the call will say so
    text = f"environment variable {os.fsdecode(key)!r}"
    return GuardSource(vars(environment)["_data"], key, text, is_shown=False)


def _of_environment(frame: FrameType) -> GuardSource | None:
    environment: Any = frame.f_locals.get("self")
    if not _is_environment(environment):
        return None
    return GuardSource(vars(environment), "_data", "the environment", is_shown=False)


def _is_environment(value: Any) -> bool:
    return value is not None and vars(value).get("_data") is vars(os.environ)["_data"]


def _of_instance(frame: FrameType) -> GuardSource | None:
    """Whether an object's class counts as derived from an abstract one."""
    return _of_classes(frame, type(frame.f_locals.get("instance")))


def _of_subclass(frame: FrameType) -> GuardSource | None:
    return _of_classes(frame, frame.f_locals.get("subclass"))


def _of_classes(frame: FrameType, other: Any) -> GuardSource | None:
    cls, asker = frame.f_locals.get("cls"), frame.f_back
    if asker is None or is_trusted(str(asker.f_globals.get("__name__", ""))):
        return None
    if not (isinstance(cls, type) and isinstance(other, type)) or (is_trusted_class(cls) and is_trusted_class(other)):
        return None
    question = Question(("instance", id(cls), id(other)), partial(issubclass, other, cls))
    return question.place(f"whether a {other.__qualname__} is a {cls.__qualname__}")


def _of_logger(frame: FrameType) -> GuardSource | None:
    logger: Any = frame.f_locals.get("self")
    if not isinstance(logger, logging.Logger):
        return None
    return Question(("logger", id(logger)), partial(_level, logger)).place(f"the level of logger {logger.name}")


def _level(logger: logging.Logger) -> tuple[int, int, bool]:
    return logging.Logger.getEffectiveLevel(logger), logger.manager.disable, logger.disabled


def _of_signal(frame: FrameType) -> GuardSource | None:
    number: Any = frame.f_locals.get("signalnum")
    return setting(f"signal.getsignal({number!r})", partial(signal.getsignal, number))


def _of_numpy(_: FrameType) -> GuardSource | None:
    return setting("numpy.geterr()", numpy.geterr)


def _of_thread(_: FrameType) -> GuardSource | None:
    return setting("the current thread", lambda: _public(threading.current_thread()))


def _of_process(_: FrameType) -> GuardSource | None:
    return setting("the current process", lambda: _public(multiprocessing.process.current_process()))


def _of_function(frame: FrameType) -> GuardSource | None:
    """The answer of inspect or typing about a function."""
    function: Any = frame.f_locals.get("obj")
    function = getattr(function, "__func__", function)
    if not isinstance(function, FunctionType):
        return None
    question = Question(("function", id(function)), partial(_told_of, function))
    return question.place(f"the signature of {function.__qualname__}")


def _told_of(function: FunctionType) -> tuple[Any, ...]:
    return function.__code__, function.__defaults__, function.__kwdefaults__, function.__annotations__


def _public(worker: Any) -> dict[str, Any]:
    """The name of a thread or process, and the attributes that a script has given it."""
    return {"name": worker.name, **{name: value for name, value in vars(worker).items() if not name.startswith("_")}}


_QUESTIONS: dict[CodeType, Callable[[FrameType], GuardSource | None]] = {
    type(os.environ).__getitem__.__code__: _of_variable,
    type(os.environ).__iter__.__code__: _of_environment,
    type(os.environ).copy.__code__: _of_environment,
    abc.ABCMeta.__instancecheck__.__code__: _of_instance,
    abc.ABCMeta.__subclasscheck__.__code__: _of_subclass,
    logging.Logger.isEnabledFor.__code__: _of_logger,
    logging.Logger.getEffectiveLevel.__code__: _of_logger,
    signal.getsignal.__code__: _of_signal,
    numpy.geterr.__code__: _of_numpy,
    inspect._signature_from_callable.__code__: _of_function,  # type: ignore[attr-defined]
    inspect.get_annotations.__code__: _of_function,
    typing.get_type_hints.__code__: _of_function,
    threading.current_thread.__code__: _of_thread,
    multiprocessing.process.current_process.__code__: _of_process,
}


def is_asked(code: CodeType) -> bool:
    """Whether a function of Python answers a question about the process."""
    return code in _QUESTIONS


def asked(frame: FrameType) -> GuardSource | None:
    """The question in a call of such a function; None if the model's code does not ask it."""
    return None if model_frame(frame.f_back) is None else _QUESTIONS[frame.f_code](frame)


CACHE: Any = type(functools.lru_cache(lambda: None))


def kept_by_cache(function: Callable[..., Any]) -> dict[Any, Any]:
    """The cached result of a function, by the key that it has made of the arguments.

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


def question_of_cache(function: Callable[..., Any], keys: Sequence[Any]) -> GuardSource:
    """The guarded place of the cached results for these keys."""
    asked = Question(
        ("cache", id(function), tuple(map(id, keys))), partial(_kept_for_keys, function, keys), about=function
    )
    return asked.place(f"what the cache of {function.__qualname__} has kept")


def _kept_for_keys(function: Callable[..., Any], keys: Sequence[Any]) -> tuple[Any, ...]:
    now = kept_by_cache(function)
    return tuple(now.get(key, MISSING) for key in keys)
