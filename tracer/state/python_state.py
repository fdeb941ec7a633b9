"""Python objects that a model holds, as they are before a recording: what the recording's run of forward changes is put back afterwards.

    state = PythonState(model)
    ...                             # self.settings.factor *= 1.1; self.history.append(1); self.table[0] += 1; next(self.steps)
    state.restore()

Lists, dicts, sets, deques, attributes of objects, arrays of numpy, bytearrays, locks, open files and iterators that can be copied are put
back in place, wherever they are reached from the model's attributes. Tensors, modules, functions and classes are looked after elsewhere. A
module that is called whole is the case in point: its Python runs as it is, and nothing else notes what it does.
`Running`: generators and queues of C that the model had before a recording, and that forward goes on with. Nobody can put them back
where they were.
"""

from __future__ import annotations

import copy
import dis
import functools
import inspect
import io
import threading
from _multiprocessing import SemLock  # type: ignore[import-not-found]
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from operator import is_
from queue import SimpleQueue
from types import CodeType, FrameType, GeneratorType
from typing import Any

import numpy as np
import torch
from torch import nn

from smpc.tracer.environment.reachable_values import is_looked_into, slots_of

_MOST = 200_000  # values that are looked at
_LONGEST = 10_000  # of the containers that are looked into
_ITERATORS = ("itertools", "builtins")
_KINDS = (list, OrderedDict, dict, set, deque)
_OF_MODULES = frozenset(vars(nn.Module()))  # tables, which recordings put back by themselves


class PythonState:
    """See the module's docstring."""

    def __init__(self, model: nn.Module) -> None:
        self._undo: list[Callable[[], None]] = []
        self._seen: dict[int, Any] = {}
        self._queue: list[Any] = []
        self._waiting: list[GeneratorType[Any, Any, Any]] = []  # generators that have not begun
        for module in model.modules():
            if not isinstance(module, torch.jit.ScriptModule):
                self._attributes(vars(module))
        while self._queue and len(self._seen) < _MOST:
            self._look(self._queue.pop())

    def begun(self) -> str:
        """The name of a generator that has begun to run meanwhile, which nobody can put back; "" if none has."""
        waiting = (each for each in self._waiting if inspect.getgeneratorstate(each) != inspect.GEN_CREATED)
        return next((f"generator {each.__qualname__}" for each in waiting), "")

    def restore(self) -> None:
        """Puts everything back, and lets go of it: somebody may look whether it is still held."""
        for undo in self._undo:
            undo()
        vars(self).clear()

    def _attributes(self, attributes: dict[str, Any]) -> None:
        """A module's objects; the references are restored with the module, and may be iterators."""
        for name, value in attributes.items():
            copied = _copied_iterator(value) if name not in _OF_MODULES else value
            if copied is not value:
                self._undo.append(partial(attributes.__setitem__, name, copied))
            elif name not in _OF_MODULES:
                self._queue.append(value)

    def _look(self, value: Any) -> None:
        if id(value) in self._seen or isinstance(value, (torch.Tensor, nn.Module)):
            return
        self._seen[id(value)] = value
        if isinstance(value, _KINDS):
            self._container(value)
        elif isinstance(value, (tuple, frozenset)):
            self._queue += value if len(value) <= _LONGEST else ()
        elif isinstance(value, np.ndarray):
            before = value.copy()
            self._undo.append(lambda: _write_array(value, before))
        elif isinstance(value, io.IOBase):
            with suppress(OSError, ValueError):  # closed, or a pipe
                self._undo.append(partial(_seek, value, value.tell()))
        elif isinstance(value, GeneratorType):
            self._waiting += [value] if inspect.getgeneratorstate(value) == inspect.GEN_CREATED else []
        elif is_lock(value):
            self._undo.append(partial(put_back, value, is_held(value)))
        elif isinstance(value, bytearray):
            data = bytes(value)
            self._undo.append(lambda: value.__setitem__(slice(None), data) if value != data else None)
        if is_looked_into(value):
            self._object(value)

    def _container(self, value: Any) -> None:
        kind: Any = next(kind for kind in _KINDS if isinstance(value, kind))
        if kind.__len__(value) > _LONGEST:
            return
        if issubclass(kind, dict):
            entries = {key: _copied_iterator(item) for key, item in kind.items(value)}
            self._queue += entries.values()
            self._undo.append(lambda: _write_dict(kind, value, entries))
            return
        items = [_copied_iterator(item) for item in kind.__iter__(value)]
        self._queue += items
        self._undo.append(lambda: _write_items(kind, value, items))

    def _object(self, value: Any) -> None:
        attributes = getattr(value, "__dict__", None)
        if type(attributes) is dict and id(attributes) not in self._seen:
            self._seen[id(attributes)] = attributes
            entries = {key: _copied_iterator(item) for key, item in attributes.items()}
            self._queue += entries.values()
            self._undo.append(lambda: _write_dict(dict, attributes, entries))
        for name in (name for cls in type(value).__mro__ for name in slots_of(cls)):
            with suppress(AttributeError):
                found = getattr(value, name)
                self._queue.append(found)
                self._undo.append(partial(_write_slot, value, name, _copied_iterator(found)))


def _copied_iterator(value: Any) -> Any:
    """An iterator as it is now; anything else itself."""
    if isinstance(value, Iterator) and type(value).__module__ in _ITERATORS:
        with suppress(TypeError):  # a generator, or an iterator over what has none
            return copy.copy(value)
    return value


def _seek(file: io.IOBase, position: int) -> None:
    file.seek(position)


def _write_dict(kind: Any, value: Any, before: dict[Any, Any]) -> None:
    """By the methods of `kind`: a derived class's methods are the script's, and dict's own lose the order of an OrderedDict."""
    now = dict(kind.items(value))
    if len(now) == len(before) and all(map(is_, now, before)) and all(map(is_, now.values(), before.values())):
        return
    kind.clear(value)
    for key, item in before.items():
        kind.__setitem__(value, key, item)


def _write_items(kind: Any, value: Any, before: list[Any]) -> None:
    now = list(kind.__iter__(value))
    if len(now) == len(before) and all(map(is_, now, before)):
        return
    kind.clear(value)
    (kind.update if kind is set else kind.extend)(value, before)


def _write_array(value: Any, before: Any) -> None:
    if not np.array_equal(value, before) and value.shape == before.shape and value.flags.writeable:
        value[...] = before


def _write_slot(value: Any, name: str, before: Any) -> None:
    if getattr(value, name, None) is not before:
        setattr(value, name, before)


_LOCK, _RLOCK = type(threading.Lock()), type(threading.RLock())
_ASKING = ("acquire", "locked", "_is_owned", "_is_mine", "_is_zero", "_get_value", "_count")


def is_lock(value: Any) -> bool:
    """Whether it is a C lock, as used inside `threading` and `multiprocessing`."""
    return type(value) in (_LOCK, _RLOCK, SemLock)


def asks_lock(function: Any) -> bool:
    """Whether a C function is a method of a lock that tells whether it is free. `with lock` tells nothing: it waits."""
    return is_lock(getattr(function, "__self__", None)) and function.__name__ in _ASKING


def is_held(lock: Any) -> bool:
    """Whether anybody holds it now."""
    if isinstance(lock, SemLock):
        return bool(lock._is_zero())
    return bool(lock.locked()) if type(lock) is _LOCK else not repr(lock).startswith("<unlocked")


def put_back(lock: Any, was_held: bool) -> None:
    """Takes it, or gives it away, where that was otherwise before."""
    if was_held and not is_held(lock):
        lock.acquire(False)
    elif is_held(lock) and not was_held:
        lock.release()


class Running:
    """Notes which of them a run goes on with. `found`: what the first one is called; empty if there is none."""

    def __init__(self) -> None:
        self.found = ""
        self._own: set[int] = set()  # frames of the generators that began to run in this run

    def resumed(self, frame: FrameType) -> None:
        """A generator's code starts, or goes on."""
        if _is_first(frame):
            self._own.add(id(frame))
        elif id(frame) not in self._own and not self.found:
            self.found = f"generator {frame.f_code.co_qualname}"

    def used(self, owner: Any) -> None:
        """A method of C is called, of something that the model holds."""
        if type(owner) is SimpleQueue and not self.found:
            self.found = "a SimpleQueue"


def is_generator(code: CodeType) -> bool:
    """Whether calls of this code may wait in the middle."""
    return bool(code.co_flags & inspect.CO_GENERATOR)


def _is_first(frame: FrameType) -> bool:
    return frame.f_lasti <= _first(frame.f_code)


@functools.lru_cache(maxsize=4096)
def _first(code: CodeType) -> int:
    """The offset of the instruction that a generator begins with."""
    return next((step.offset for step in dis.get_instructions(code) if step.opname == "RESUME"), 0)
