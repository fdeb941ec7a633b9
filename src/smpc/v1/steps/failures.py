"""Errors that one rank finds and all ranks of its pipeline raise.

An error travels as a description: its class and text if it is one of smpc's, so that it is raised as the same class
everywhere; of any other exception the whole traceback, in a PeerError.
"""

from __future__ import annotations

import traceback
from typing import NoReturn

from smpc import errors
from smpc.errors import PeerError, SmpcError
from smpc.executor.reports import Report
from smpc.launch_worker import write_report

Description = tuple[str, str]  # class name, text


def tell_launcher(report: Report) -> None:
    """Leave the report of a failure that ends this process from outside for `smpc run`, if that has started it."""
    write_report(report.headline, report.text, report.rank)


def describe(error: BaseException | None) -> Description | None:
    """What is sent of an error."""
    if error is None:
        return None
    if isinstance(error, SmpcError):
        return type(error).__name__, str(error)
    return PeerError.__name__, "another rank failed first; its report:\n" + "".join(traceback.format_exception(error))


def raise_everywhere(description: Description, own: BaseException | None) -> NoReturn:
    """Raise this rank's own error if it has one, else the described one."""
    if own is not None:
        raise own
    name, text = description
    cls = vars(errors)[name]
    assert issubclass(cls, SmpcError), name
    raise cls(text)


def raise_first(descriptions: list[Description | None], own: BaseException | None) -> None:
    """Raise if any rank has an error: its own, else that of the lowest rank."""
    for description in descriptions:
        if description is not None:
            raise_everywhere(description, own)
