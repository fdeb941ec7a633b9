"""Generators and queues of C that the model had before a recording, and that forward goes on with.

Nobody can put them back where they were, as `smpc.tracer.state.python_state` does with other iterators.
"""

from __future__ import annotations

import dis
import functools
import inspect
from queue import SimpleQueue
from types import CodeType, FrameType
from typing import Any


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
