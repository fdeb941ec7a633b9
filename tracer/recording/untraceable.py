"""Operations that a recording cannot hold: where they happened, what they are, and the way out.

`current_line` and `innermost_line`: which line of the model's code something happened on, as file.py:line without folders.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any, Self

from torch import nn

from smpc.errors import TraceError

BUILD_WHOLE = "what to do: run the model once by itself, or change its settings, so that all its modules are there before it is distributed"
CALL_WHOLE = (
    "what to do: compute the value outside the model and pass it in, "
    "or have the module called whole (leaf_modules=[...], smpc.mark_leaf)"
)


class UntraceableError(TraceError):
    """A TraceError inside `module`, the innermost one that was being called; None if that was the model itself."""

    def __init__(self, text: str, module: nn.Module | None) -> None:
        super().__init__(text)
        self.module = module

    @classmethod
    def inside(cls, module: nn.Module | None, fqn: str, line: str, what: str, way_out: str = CALL_WHOLE) -> Self:
        """An error that happened in a module, "" being the model itself."""
        where = f"module {fqn!r} ({type(module).__name__})" if fqn else "the model itself"
        return cls(f"cannot trace {where}{', ' if line else ''}{line}: {what}; {way_out}", module if fqn else None)


def is_users(frame: FrameType) -> bool:
    """Whether a frame runs code that is neither torch's nor ours."""
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] not in ("torch", "smpc", "contextlib")


def calling_frame() -> FrameType:
    """The frame that has made the torch call which `__torch_function__` is asked to run."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_name != "__torch_function__":
        frame = frame.f_back
    return frame.f_back or frame


def innermost_line(error: BaseException) -> str:
    """file.py:line of the innermost frame of the model's code in a traceback."""
    found, traceback = "", error.__traceback__
    while traceback is not None:
        if is_users(traceback.tb_frame):
            found = f"{Path(traceback.tb_frame.f_code.co_filename).name}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return found


def call_model(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The call that is recorded. The recording's caller is not code of the model, so its line is in no trace: see `current_line`."""
    return model(*args, **kwargs)


def current_line() -> str:
    """The innermost line on the stack that is neither torch's nor ours, inside of `call_model` if that is there; "" if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not call_model.__code__:
        if is_users(frame):
            return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
