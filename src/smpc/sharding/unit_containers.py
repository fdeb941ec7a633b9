"""What a unit writes into the lists, dictionaries and dataclasses that it is given reaches the caller.

torch's `fully_shard` gives a unit copies of containers in whose place it puts other tensors (through which it learns that a backward has
ended, or of another dtype). A block that keeps keys and values for a later one would write into a copy that nobody else sees:

    caller      cache {"kv": a}  ----------------------.
    unit            copy {"kv": a'}  -> {"kv": b}      | after the unit: {"kv": b}; what it has left alone stays the caller's own

`keep_containers(module)`, once `fully_shard` has taken it, carries such changes over.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from torch import nn

_State = dict[Any, Any] | list[Any]
_Given = list[tuple[Any, Any]]  # (the caller's container, the unit's copy of it), inner ones too


def keep_containers(module: nn.Module) -> None:
    """Have changes in the unit's copies of containers made in the containers that it was called with."""
    calls: list[tuple[Any, Any]] = []  # arguments of the calls that have begun, as the caller gave them
    copies: list[tuple[_Given, dict[int, Any], list[_State], Any]] = []

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append((args, kwargs))

    def inside(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given: _Given = []
        originals: dict[int, Any] = {}
        for own, copied in zip(calls.pop(), (args, kwargs), strict=True):
            _compare(own, copied, given, originals)
        alive = (args, kwargs) if given else None  # no other value takes the identity of one of these
        copies.append((given, originals, [_content(copied) for _, copied in given], alive))

    def after(*_: Any) -> None:
        if not copies:  # the call has ended before it began
            return
        given, originals, contents, _ = copies.pop()
        for (own, copied), content in zip(given, contents, strict=True):
            found = _content(copied)
            if not _is_same(found, content):
                _write(own, _with_originals(found, originals))

    module.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
    module.register_forward_pre_hook(inside, with_kwargs=True)
    module.register_forward_hook(after, always_call=True)


def _compare(own: Any, copied: Any, given: _Given, originals: dict[int, Any]) -> None:
    """Notes the copies in a tree of arguments, and what they have in place of which of the caller's values."""
    if own is copied:
        return
    originals[id(copied)] = own
    if type(own) is not type(copied):
        return
    if _is_container(own):
        given.append((own, copied))
    for mine, its in zip(_items(own), _items(copied), strict=False):
        _compare(mine, its, given, originals)


def _is_container(value: Any) -> bool:
    """Whether somebody may write into it."""
    return isinstance(value, (dict, list)) or (dataclasses.is_dataclass(value) and not isinstance(value, type))


def _items(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        yield from value
    elif _is_container(value):
        yield from _fields(value).values() if dataclasses.is_dataclass(value) else value.values()


def _fields(value: Any) -> dict[str, Any]:
    """The values of a dataclass."""
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if hasattr(value, field.name)}


def _content(value: Any) -> _State:
    """What a container has now."""
    if dataclasses.is_dataclass(value):
        return _fields(value)
    return dict(value) if isinstance(value, dict) else list(value)


def _is_same(a: _State, b: _State) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        return list(a) == list(b) and all(a[key] is b[key] for key in a)
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))


def _with_originals(content: _State, originals: dict[int, Any]) -> _State:
    """The content with the caller's own values where the unit has left them alone."""
    if isinstance(content, dict):
        return {key: originals.get(id(value), value) for key, value in content.items()}
    return [originals.get(id(value), value) for value in content]


def _write(own: Any, content: _State) -> None:
    if isinstance(own, list):
        own[:] = content
        return
    assert isinstance(content, dict)
    if dataclasses.is_dataclass(own):
        for name, value in content.items():
            if getattr(own, name, None) is not value:
                setattr(own, name, value)
        return
    own.clear()
    own.update(content)
