"""Output of the commands on a terminal: messages, and the progress of long ones.

`clear_lines` makes messages: whatever names and values they quote, they are lines of bounded length that steer nothing.

`progress` tells what a long command is doing, on stderr: on a terminal as below, else by a line every ten seconds.

    with progress() as show:
        show("Tracing")
        ...
        show("Solving")

A line with a spinner, the phase and its time so far, which disappears at the end. Other output appears above it. A phase of known
length, `show("Planning", 3, 40)`, has a bar.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from typing import Protocol

from smpc.errors import printable

_MOST_LINES = 50
_LONGEST = 4000  # characters
_EVERY = 10.0  # seconds between lines of progress


def clear_lines(text: str) -> Iterator[str]:
    """The lines of a message, control characters as escapes, what is too long in the middle left out."""
    lines = text.split("\n")
    for line in lines[:_MOST_LINES]:
        shown = printable(line[: 2 * _LONGEST])
        if len(shown) > _LONGEST or len(line) > 2 * _LONGEST:
            shown = f"{shown[: _LONGEST - 500]} ... {printable(line[-400:])}"
        yield shown
    if len(lines) > _MOST_LINES:
        yield f"... and {len(lines) - _MOST_LINES} more"


class Show(Protocol):
    """Names the phase that starts now, or says how much of it is done."""

    def __call__(self, phase: str, done: int = 0, total: int = 0, /) -> None: ...  # noqa: D102


@contextlib.contextmanager
def progress(every: float = _EVERY) -> Iterator[Show]:
    """A function that names the phase which starts now. `every`: seconds between lines where stderr is no terminal."""
    if not sys.stderr.isatty():
        with _lines_of_progress(every) as show_line:
            yield show_line
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(file=sys.stderr)
    plain = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    counted = (*plain, BarColumn(), MofNCompleteColumn())
    with Progress(*plain, console=console, transient=True) as display:
        task = display.add_task("", total=None)
        last = ""

        def show(phase: str, done: int = 0, total: int = 0, /) -> None:
            nonlocal last
            display.columns = counted if total > 1 else plain
            if phase != last:
                display.reset(task, description=phase)
                last = phase
            display.update(task, completed=done, total=total or None)
            display.refresh()  # short phases are seen too

        yield show


@contextlib.contextmanager
def _lines_of_progress(seconds: float) -> Iterator[Show]:
    """A function that names the phase which starts now, for a line on stderr every so many seconds; quick commands print none."""
    start, ended, doing = time.monotonic(), threading.Event(), [""]

    def show(phase: str, done: int = 0, total: int = 0, /) -> None:
        doing[0] = f"{phase} ({done} of {total})" if total > 1 else phase

    def tell() -> None:
        while not ended.wait(seconds):
            if doing[0]:
                print(
                    f"smpc: {printable(doing[0])}, {time.monotonic() - start:.0f} s so far", file=sys.stderr, flush=True
                )

    thread = threading.Thread(target=tell, daemon=True, name="smpc progress")
    thread.start()
    try:
        yield show
    finally:
        ended.set()
        thread.join()
