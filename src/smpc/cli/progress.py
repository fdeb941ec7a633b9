"""What a long command is doing, on stderr if that is a terminal, else nowhere.

    with progress() as show:
        show("Tracing")
        ...
        show("Solving")

A line with a spinner, the phase and its time so far; it is gone at the end. Whatever is printed meanwhile stands above it. A phase
of which is known how much there is to do, `show("Planning", 3, 40)`, has a bar.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Protocol


class Show(Protocol):
    """Names the phase that starts now, or says how much of it is done."""

    def __call__(self, phase: str, done: int = 0, total: int = 0, /) -> None: ...  # noqa: D102


@contextlib.contextmanager
def progress() -> Iterator[Show]:
    """A function that names the phase which starts now."""
    if not sys.stderr.isatty():
        yield _ignore
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


def _ignore(phase: str, done: int = 0, total: int = 0, /) -> None:
    """Nobody is looking."""
