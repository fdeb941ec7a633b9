"""Errors that one rank finds and all ranks of its pipeline raise.

An error is sent as a description. For an smpc error this is its class and text, so that every rank raises the same
class, with the script's line as a note. For any other exception it is the whole traceback, in a PeerError.

A StepError is about the script, so its traceback has only the lines of the script, without smpc and torch frames in between. The
traceback of an error raised by the script's own code begins with that code.
"""

from __future__ import annotations

import traceback
from types import TracebackType
from typing import NoReturn

from smpc import errors
from smpc.errors import (
    CodegenError,
    ConfigError,
    PartitionError,
    PeerError,
    SmpcError,
    StepError,
    TraceError,
    VerificationError,
)
from smpc.executor.failure.process_reports import ProcessReport
from smpc.launch.worker import write_report

Description = tuple[str, str, str | None]  # class name, text, the line of the script that it comes from
# All ranks of a pipeline raise these together, with no transfer in progress: the next step may run.
AGREED = (StepError, TraceError, PartitionError, CodegenError, ConfigError, VerificationError)
_LIBRARIES = ("smpc", "torch")


def tell_launcher(report: ProcessReport) -> None:
    """Leave the report of a failure that ends this process from outside for `smpc run`, if that has started it."""
    write_report(report.headline, report.text, report.rank)


def describe(error: BaseException | None) -> Description | None:
    """The description of an error that is sent."""
    if error is None:
        return None
    if isinstance(error, SmpcError):
        return type(error).__name__, str(error), user_line(error)
    report = "".join(traceback.format_exception(error))
    return PeerError.__name__, f"another rank failed first; its report:\n{report}", None


def raise_error_on_all_ranks(description: Description, own: BaseException | None) -> NoReturn:
    """Raise the error of a step on this rank: its own if it has one, else the described one of another rank."""
    if own is not None:
        raise own
    name, text, line = description
    cls = vars(errors)[name]
    assert issubclass(cls, SmpcError), name
    error = cls(text)
    if line is not None:
        error.add_note(line)
    raise error


def raise_first_step_error(descriptions: list[Description | None], own: BaseException | None) -> None:
    """Raise if any rank has an error: its own, else the lowest rank's."""
    for description in descriptions:
        if description is not None:
            raise_error_on_all_ranks(description, own)


def user_part(trace: TracebackType | None) -> TracebackType | None:
    """The traceback without the frames of smpc and torch."""
    if trace is None:
        return None
    rest = user_part(trace.tb_next)
    if _is_ours(trace):
        return rest
    return TracebackType(rest, trace.tb_frame, trace.tb_lasti, trace.tb_lineno)


def from_script(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the first frame of the script on; all of it where the script has none."""
    rest = trace
    while rest is not None and _is_ours(rest):
        rest = rest.tb_next
    return rest or trace


def user_line(error: BaseException) -> str | None:
    """The innermost line of the script that an error comes from, as text; None where there is none below the one that caught it."""
    frames = traceback.extract_tb(user_part(error.__traceback__))
    if not frames:
        return None
    found = frames[-1]
    return f"at {found.filename}:{found.lineno}, in {found.name}: {found.line}"


def _is_ours(trace: TracebackType) -> bool:
    return str(trace.tb_frame.f_globals.get("__name__", "")).split(".")[0] in _LIBRARIES
