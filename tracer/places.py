"""Which line of the user's code something happened on, as file.py:line without folders."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType


def is_users(frame: FrameType) -> bool:
    """Whether a frame runs code that is neither torch's nor ours."""
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] not in ("torch", "smpc", "contextlib")


def innermost_line(error: BaseException) -> str:
    """file.py:line of the innermost frame of the model's code in a traceback."""
    found, traceback = "", error.__traceback__
    while traceback is not None:
        if is_users(traceback.tb_frame):
            found = f"{Path(traceback.tb_frame.f_code.co_filename).name}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return found


def current_line() -> str:
    """The innermost line on the stack that is neither torch's nor ours; "" if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_users(frame):
            return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
