"""Python's profile function, for the time of a recording."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType, MappingProxyType
from typing import Any

# Types whose methods tell nothing of the process. Most of the half a million calls in a recording of 32 layers are of these.
PLAIN = frozenset({dict, list, tuple, set, frozenset, str, bytes, int, float, MappingProxyType})


class CallHook:
    """Has a function called for every call of a Python function, between `resume` and `pause`; pauses nest."""

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
