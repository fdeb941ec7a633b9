"""Pickles, read without calling, importing or hashing anything that they name: what comes out are records.

    parse(data)              the object: plain values, lists and tuples as they are, dicts as `PickledPairs`, all else as a `PickledRecord`
    expanded(value)          how many objects it would be if nothing were shared; CheckpointError for more than `most`, or a circle

Terms
    record      represents an object: the name of its class or function, its arguments, its state and items
    pairs       represents a dict: keys and values in order; a key may be anything, so none is hashed

The cost of reading a pickle is bounded by its length: memory is proportional to it, whatever sizes and positions it mentions. Python's own
unpickler allocates a memo for the highest number mentioned, and hashing a tuple of tuples of tuples may take for ever. Persistent
references (the storages of torch.save) are records as well. Supported is what torch and Python's pickler write for plain data from protocol
2 on.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from smpc.errors import CheckpointError

REFERENCE = "persistent reference"
_MARK = object()


class PickledRecord:
    """An object of a pickle; nothing of it runs."""

    __slots__ = ("args", "items", "name", "state")

    def __init__(self, name: str, args: Any = None) -> None:
        self.name, self.args, self.state = name, args, None
        self.items = PickledPairs()

    def fields(self, name: str) -> dict[str, Any]:
        """What is in its `__dict__`, if its class is `name`."""
        if self.name != name:
            raise CheckpointError(f"expected a {name}, found {self.name[:80]!r}")
        return self.state.by_name() if isinstance(self.state, PickledPairs) else {}


class PickledPairs(list[tuple[Any, Any]]):
    """Keys and values of a dict."""

    def by_name(self) -> dict[str, Any]:
        """As a dict, if all keys are texts."""
        if any(type(key) is not str for key, _ in self):
            raise CheckpointError("expected names as the keys of a dict")
        return dict(self)


def parse(data: bytes, knows: Callable[[str], bool] = lambda name: True) -> Any:
    """The object of a pickle. Raises CheckpointError if it is damaged, made of other things than those above, or of names not known."""
    reader = _PickleReader(data, knows)
    try:
        return reader.read()
    except (IndexError, ValueError, TypeError, KeyError, struct.error) as error:
        raise CheckpointError(
            f"no pickle, or damaged at byte {reader.position}: {type(error).__name__}: {error}"
        ) from error


def expanded(value: Any, most: int) -> int:
    """How many objects a value is, with those that are shared counted every time."""
    sizes: dict[int, int] = {}
    pending: list[tuple[Any, list[Any] | None]] = [(value, None)]
    open_: set[int] = set()
    while pending:
        each, inner = pending.pop()
        if inner is None:
            inner = _inner_values(each)
            if not inner or id(each) in sizes:
                continue
            if id(each) in open_:
                raise CheckpointError("it contains itself")
            open_.add(id(each))
            pending.append((each, inner))
            pending += [(other, None) for other in inner]
            continue
        size = 1 + sum(sizes.get(id(other), 1) for other in inner)
        if size > most:
            raise CheckpointError(f"it is made of more than {most} objects")
        sizes[id(each)] = size
        open_.discard(id(each))
    return sizes.get(id(value), 1)


def _inner_values(value: Any) -> list[Any]:
    """The values inside of an unpickled value."""
    if isinstance(value, PickledPairs):
        return [each for pair in value for each in pair]
    if isinstance(value, (list, tuple)):
        return list(value)
    return [value.args, value.state, value.items] if isinstance(value, PickledRecord) else []


class _PickleReader:
    """One pickle; `position`: of the next byte."""

    def __init__(self, data: bytes, knows: Callable[[str], bool]) -> None:
        self._data, self._knows, self.position = data, knows, 0
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def read(self) -> Any:
        data, stack = self._data, self._stack
        while True:
            code = data[self.position]
            self.position += 1
            if code == 0x2E:  # STOP
                (found,) = stack
                if found is _MARK:
                    raise ValueError("a mark, and no object")
                return found
            work = _CODES.get(code)
            if work is None:
                raise ValueError(f"{bytes([code])!r} is nothing that belongs there")
            work(self)

    def take(self, count: int) -> bytes:
        found = self._data[self.position : self.position + count]
        if len(found) != count:
            raise ValueError("truncated")
        self.position += count
        return found

    def number(self, form: struct.Struct) -> int:
        found: int = form.unpack_from(self._data, self.position)[0]
        self.position += form.size
        return found

    def text(self, form: struct.Struct) -> None:
        self._stack.append(str(self.take(self.number(form)), "utf-8", "surrogatepass"))

    def long(self) -> None:
        self._stack.append(int.from_bytes(self.take(self.number(_U1)), "little", signed=True))

    def line(self) -> str:
        end = self._data.index(b"\n", self.position)
        found = self._data[self.position : end].decode()
        self.position = end + 1
        return found

    def push(self, value: Any) -> None:
        self._stack.append(value)

    def marked(self) -> list[Any]:
        """The values on the stack above the last mark."""
        stack = self._stack
        index = len(stack) - 1
        while stack[index] is not _MARK:
            index -= 1
            if index < 0:
                raise ValueError("no mark")
        found = stack[index + 1 :]
        del stack[index:]
        return found

    def tuple_of(self, count: int) -> None:
        if len(self._stack) < count:
            raise ValueError("too few values")
        self._stack[-count:] = [tuple(self._stack[-count:])]

    def append(self, values: list[Any]) -> None:
        if type(self._stack[-1]) is not list:
            raise TypeError("expected a list")
        self._stack[-1].extend(values)

    def set_items(self, values: list[Any]) -> None:
        target = self._stack[-1]
        pairs = target.items if isinstance(target, PickledRecord) else target
        if not isinstance(pairs, PickledPairs) or len(values) % 2:
            raise TypeError("expected a dict, with keys and values")
        pairs.extend(zip(values[::2], values[1::2], strict=True))

    def add(self, values: list[Any]) -> None:
        target = self._stack[-1]
        if not isinstance(target, PickledRecord):
            raise TypeError("expected a set")
        target.items.extend((value, None) for value in values)

    def call(self) -> None:
        args, function = self._stack.pop(), self._stack.pop()
        if not isinstance(function, PickledRecord) or type(args) is not tuple:
            raise TypeError("expected a name and what it is called with")
        self._stack.append(PickledRecord(function.name, args))

    def build(self) -> None:
        state, target = self._stack.pop(), self._stack[-1]
        if not isinstance(target, PickledRecord):
            raise TypeError("expected an object")
        target.state = state

    def name(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        if type(name) is not str or type(module) is not str:
            raise TypeError("expected a name")
        self.named(f"{module}.{name}")

    def named(self, name: str) -> None:
        if not self._knows(name):
            raise CheckpointError(f"it names {name[:200]}, which does not belong there")
        self._stack.append(PickledRecord(name))

    def refer(self) -> None:
        self._stack.append(PickledRecord(REFERENCE, self._stack.pop()))

    def put(self, index: int) -> None:
        self._memo[index] = self._stack[-1]

    def get(self, index: int) -> None:
        self._stack.append(self._memo[index])

    def single(self, work: Callable[[list[Any]], None], count: int) -> None:
        if len(self._stack) <= count:
            raise ValueError("too few values")
        values = self._stack[-count:]
        del self._stack[-count:]
        work(values)


_U1, _U2, _I4, _U4, _U8 = (struct.Struct(form) for form in ("<B", "<H", "<i", "<I", "<Q"))
_F8 = struct.Struct(">d")
_CODES: dict[int, Callable[[_PickleReader], Any]] = {
    ord(code): work
    for code, work in {
        "\x80": lambda r: r.take(1),  # PROTO
        "\x95": lambda r: r.take(8),  # FRAME
        "(": lambda r: r.push(_MARK),
        "N": lambda r: r.push(None),
        "\x88": lambda r: r.push(True),
        "\x89": lambda r: r.push(False),
        "J": lambda r: r.push(r.number(_I4)),
        "K": lambda r: r.push(r.number(_U1)),
        "M": lambda r: r.push(r.number(_U2)),
        "\x8a": _PickleReader.long,
        "G": lambda r: r.push(_F8.unpack(r.take(8))[0]),
        "X": lambda r: r.text(_U4),
        "\x8c": lambda r: r.text(_U1),
        "C": lambda r: r.push(r.take(r.number(_U1))),  # SHORT_BINBYTES
        "B": lambda r: r.push(r.take(r.number(_U4))),  # BINBYTES
        "U": lambda r: r.push(r.take(r.number(_U1))),  # SHORT_BINSTRING
        ")": lambda r: r.push(()),
        "\x85": lambda r: r.tuple_of(1),
        "\x86": lambda r: r.tuple_of(2),
        "\x87": lambda r: r.tuple_of(3),
        "t": lambda r: r.push(tuple(r.marked())),
        "]": lambda r: r.push([]),
        "a": lambda r: r.single(r.append, 1),
        "e": lambda r: r.append(r.marked()),
        "}": lambda r: r.push(PickledPairs()),
        "s": lambda r: r.single(r.set_items, 2),
        "u": lambda r: r.set_items(r.marked()),
        "\x8f": lambda r: r.push(PickledRecord("builtins.set")),  # EMPTY_SET
        "\x90": lambda r: r.add(r.marked()),  # ADDITEMS
        "c": lambda r: r.named(f"{r.line()}.{r.line()}"),
        "\x93": _PickleReader.name,
        "R": _PickleReader.call,
        "\x81": _PickleReader.call,  # NEWOBJ
        "b": _PickleReader.build,
        "Q": _PickleReader.refer,
        "\x94": lambda r: r.put(len(r._memo)),
        "q": lambda r: r.put(r.number(_U1)),
        "r": lambda r: r.put(r.number(_U4)),
        "h": lambda r: r.get(r.number(_U1)),
        "j": lambda r: r.get(r.number(_U4)),
    }.items()
}
