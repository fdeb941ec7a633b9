"""Whose code calls: a script's, torch's, or smpc's."""

from __future__ import annotations

import sys
import warnings
from types import FrameType

from torch.overrides import handle_torch_function

_OWN = ("torch", "smpc")
_PROGRAMS = "<smpc stage "  # in names of their files
# What scripts could have written themselves; of it, what is smpc's where ranks have slices.
_TORCH_SCRIPTS, _CLIPPING = "torch.nn.utils.", "torch.nn.utils.clip_grad"


def is_script() -> bool:
    """Whether the code that calls the caller is neither torch's nor ours."""
    frame: FrameType | None = sys._getframe(2)
    if frame is not None and frame.f_code is handle_torch_function.__code__:
        frame = frame.f_back and frame.f_back.f_back  # a function of torch's that is written in Python asks by this
    return frame is None or not is_own(frame) or _is_script_of_torch(frame)


def is_own(frame: FrameType) -> bool:
    """Whether its code is torch's, smpc's, or a program that smpc has written."""
    return _module(frame) in _OWN or frame.f_code.co_filename.startswith(_PROGRAMS)


def line_of_script() -> str:
    """Where the script is, for people."""
    frame = _frame_of_script()
    return "the script" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def warn_at_script(text: str) -> None:
    """A warning at the line of the script, once for each."""
    frame = _frame_of_script()
    if frame is not None:
        shown = frame.f_globals.setdefault("__warningregistry__", {})
        warnings.warn_explicit(text, UserWarning, frame.f_code.co_filename, frame.f_lineno, registry=shown)


def _frame_of_script() -> FrameType | None:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and is_own(frame):
        frame = frame.f_back
    return frame


def _is_script_of_torch(frame: FrameType) -> bool:
    name: str = frame.f_globals.get("__name__", "")
    return name.startswith(_TORCH_SCRIPTS) and name != _CLIPPING


def _module(frame: FrameType) -> str:
    name: str = frame.f_globals.get("__name__", "")
    return name.partition(".")[0]


def is_script_beyond_torch() -> bool:
    """The same, where code of torch's may be between: its functions of collectives call each other."""
    frame: FrameType | None = sys._getframe(3)
    while frame is not None and _module(frame) == "torch":
        frame = frame.f_back
    return frame is not None and not is_own(frame)
