"""One word of memory in each of many objects, read in one go, at about 1 ns for each; nothing else of their memory is touched.

Where a word is, CPython's source says and no function of Python. So whoever uses one tries out first whether it is what it should be.

`DictVersions` finds which of many dicts have been written to. CPython counts the writes to a dict in a word of the dict itself
(`ma_version_tag`, PEP 509). The words of all dicts are read in one go (`reader`). Where dicts have no such word, which is tried out
before it is relied on, torch's `dict_version` is asked for each dict, at about 30 ns.

    versions = DictVersions()
    position = versions.watch(vars(module))
    before = versions.generation
    module.beta = 0.7
    versions.poll()
    versions.changed_in[position] > before              # True

`type_reader` and `function_reader` read the addresses of the classes of many objects, and of one attribute of many functions.

`trained_reader` reads `requires_grad` of many parameters at 10 ns for each, where reading the attribute takes 45. No function of torch
gives it for a list. It is a byte in the autograd metadata of the C++ tensor that a Python tensor stands for:

    Parameter (PyObject) --word--> TensorImpl --word, 0 if there is none--> AutogradMeta: a byte, 0 or 1

The three offsets are found by experiment, once in a process: the byte, and no other, has to follow `requires_grad` of a tensor made for
that. If an experiment fails, the attribute is read. The byte is valid for a leaf: a parameter that was frozen and then written with a
value that requires grad is no leaf any more, and its attribute would say True.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch._C._dynamo.guards import dict_version

BYTES = 8  # of a word
_TYPE = BYTES  # offset of the type in an object, behind the count of references

Words = npt.NDArray[np.uint64]


def reader(objects: Sequence[Any], offset: int) -> Callable[[], Words]:
    """A function that reads the words `offset` bytes behind the addresses of objects, which must stay alive.

    The array that it gives is written again by the next call.
    """
    addresses = np.array([id(found) for found in objects], np.int64) + offset
    first = int(addresses.min())
    indices = (addresses - first) // BYTES
    span = (ctypes.c_uint64 * (int(indices.max()) + 1)).from_address(first)
    memory, found = np.ctypeslib.as_array(span), np.empty(len(indices), np.uint64)

    def read() -> Words:
        np.take(memory, indices, out=found, mode="clip")  # "raise" would copy `out`
        return found

    return read


def type_reader(objects: Sequence[Any]) -> Callable[[], Words]:
    """A function that reads the ids of the objects' types; the objects must stay alive."""
    if _has_type():
        return reader(objects, _TYPE)
    kept = list(objects)
    return lambda: np.fromiter(map(id, map(type, kept)), np.uint64, len(kept))


class _First:
    """Tried out: an object of this class becomes one of the next."""


class _Second:
    """See `_First`."""


@functools.cache
def _has_type() -> bool:
    """Whether the word is the address of the type in this Python."""
    changed: Any = _First()
    read = reader([changed, 0.5], _TYPE)
    if read().tolist() != [id(_First), id(float)]:
        return False
    changed.__class__ = _Second
    found: list[int] = read().tolist()
    return found == [id(_Second), id(float)]


def function_reader(functions: Sequence[FunctionType], name: str) -> Callable[[], Words] | None:
    """What reads the ids of an attribute of plain functions, which must stay alive; None where no word of a function is its address."""
    offset = _offset_in_function(name)
    return None if offset is None else reader(functions, offset)


@functools.cache
def _offset_in_function(name: str) -> int | None:
    """Of the word that is the address of the attribute `name`: the only one that is, before and after a write to it."""

    def tried() -> None: ...

    def other() -> None: ...

    if name not in ("__code__", "__name__", "__qualname__"):  # __defaults__ may be an address of nothing
        return None
    places = list(range(BYTES, FunctionType.__basicsize__, BYTES))
    for value in (getattr(tried, name), getattr(other, name)):
        setattr(tried, name, value)
        places = [place for place in places if reader([tried], place)().tolist() == [id(value)]]
    return places[0] if len(places) == 1 else None


_OFFSET = object.__basicsize__ + BYTES  # of the count in a dict, behind the number of its items


class DictVersions:
    """Watches dicts for writes. `generation` counts the polls that found some; `changed_in`, by position, is the last such poll."""

    def __init__(self) -> None:
        self.generation = 0
        self.changed_in: list[int] = []
        self._dicts: list[dict[Any, Any]] = []  # alive as long as this, so their addresses stay theirs
        self._positions: dict[int, int] = {}
        self._counts: list[int] = []  # of those that are new since the last poll
        self._known: Words = np.empty(0, np.uint64)
        self._read: Callable[[], Words] = lambda: self._known

    def watch(self, watched: dict[Any, Any]) -> int:
        """The position of a dict, which is watched from now on."""
        known = self._positions.get(id(watched))
        if known is not None:
            return known
        position = self._positions[id(watched)] = len(self._dicts)
        self._dicts.append(watched)
        self._counts.append(int(_reader([watched])()[0]))
        self.changed_in.append(self.generation)
        return position

    def poll(self) -> None:
        """Looks which dicts were written to since the last poll."""
        if self._counts:
            self._known = np.concatenate([self._known, np.array(self._counts, np.uint64)])
            self._counts.clear()
            self._read = _reader(self._dicts)
        found = self._read()
        if np.array_equal(found, self._known):
            return
        self.generation += 1
        for position in np.flatnonzero(found != self._known).tolist():
            self.changed_in[position] = self.generation
        self._known = found.copy()


def _reader(dicts: Sequence[dict[Any, Any]]) -> Callable[[], Words]:
    """A function that returns the counts of these dicts, which must stay alive; its next call overwrites the returned array."""
    if _has_word():
        return reader(dicts, _OFFSET)
    watched = list(dicts)
    return lambda: np.fromiter(map(dict_version, watched), np.uint64, len(watched))


@functools.cache
def _has_word() -> bool:
    """Whether the word behind the number of items counts writes in this Python: tried out on two dicts."""
    written: dict[int, int] = {}
    other = {0: 0}
    read, seen, before = reader([written, other], _OFFSET), set(), 0
    for step in range(100):
        written[step % 7] = step
        other.get(0)
        mine, others = read().tolist()
        if mine in seen or (step and others != before):
            return False
        seen.add(mine)
        before = others
    written.pop(3)
    return read().tolist()[0] not in seen


_ADDRESSES = 2**48  # bytes of memory that a process can address
_IMPLEMENTATION, _METADATA = 64, 160  # bytes in which the word and the byte are looked for; both objects are longer
_NOTHING = np.zeros(_METADATA // BYTES, np.uint64)  # in place of metadata that is not there


def trained_reader(parameters: Sequence[nn.Parameter]) -> Callable[[], bytes]:
    """A function that reads `requires_grad` of all these, a byte for each; they must stay alive."""
    kept, offsets = list(parameters), _offsets()
    if offsets is None or not kept:
        return lambda: _attributes(kept)
    implementations = reader(kept, offsets.implementation)
    word, shift = divmod(offsets.flag, BYTES)

    def read() -> bytes:
        metadata = _words_at(implementations() + np.uint64(offsets.metadata))
        if not metadata.all():
            metadata[metadata == 0] = _NOTHING.ctypes.data
        flags = _words_at(metadata + np.uint64(word * BYTES)) >> np.uint64(8 * shift)
        return flags.astype(np.uint8).tobytes()

    return read


def _attributes(parameters: Sequence[Tensor]) -> bytes:
    with torch._C.DisableTorchFunctionSubclass():  # parameters of other ranks have one
        return bytes([parameter.requires_grad for parameter in parameters])


def _words_at(addresses: Words) -> Words:
    return np.take(_memory(), ((addresses - np.uint64(BYTES)) >> np.uint64(3)).view(np.int64), mode="clip")


@functools.cache
def _memory() -> Words:
    """All memory from the second word on, as one array; nothing is read before it is asked for."""
    span = (ctypes.c_uint64 * (_ADDRESSES // BYTES - 1)).from_address(BYTES)
    return np.ctypeslib.as_array(span)


@dataclass(frozen=True, slots=True)
class _Offsets:
    """Offsets in bytes: the TensorImpl's address in the Python object, the metadata's in the TensorImpl, the flag in the metadata."""

    implementation: int
    metadata: int
    flag: int


@functools.cache
def _offsets() -> _Offsets | None:
    """Where things are in this build of torch; None if that is not clear."""
    if sys.byteorder != "little" or sys.maxsize != 2**63 - 1 or sys.implementation.name != "cpython":
        return None
    probe = torch.empty(0)
    object_ = _copy_of(id(probe), Tensor.__basicsize__, ctypes.c_uint64)
    places = [position for position, word in enumerate(object_) if word == probe._cdata]
    before = _copy_of(probe._cdata, _IMPLEMENTATION, ctypes.c_uint64)
    probe.requires_grad_(True)
    after = _copy_of(probe._cdata, _IMPLEMENTATION, ctypes.c_uint64)
    grown = [position for position, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
    if len(places) != 1 or len(grown) != 1 or before[grown[0]] != 0:
        return None
    states = []
    for value in (True, False, True):
        probe.requires_grad_(value)
        states.append(_copy_of(after[grown[0]], _METADATA, ctypes.c_uint8))
    flags = [position for position, seen in enumerate(zip(*states, strict=True)) if len(set(seen)) > 1]
    if len(flags) != 1 or [state[flags[0]] for state in states] != [1, 0, 1]:
        return None
    return _Offsets(places[0] * BYTES, grown[0] * BYTES, flags[0])


def _copy_of(address: int, size: int, kind: type[ctypes.c_uint64] | type[ctypes.c_uint8]) -> list[int]:
    """`size` bytes of memory, as numbers of a kind."""
    return list((kind * (size // ctypes.sizeof(kind))).from_address(address))
