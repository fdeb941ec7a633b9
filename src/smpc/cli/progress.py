"""What a long command is doing, on stderr if that is a terminal, else nowhere.

    with progress() as show:
        show("Tracing")
        ...
        show("Solving")

A line with a spinner, the phase and its time so far; it is gone at the end. Whatever is printed meanwhile stands above it.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """A function that names the phase which starts now."""
    if not sys.stderr.isatty():
        yield _ignore
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(file=sys.stderr)
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as display:
        task = display.add_task("", total=None)

        def show(phase: str) -> None:
            display.reset(task, description=phase, total=None)
            display.refresh()  # short phases are seen too

        yield show


def _ignore(phase: str) -> None:
    """Nobody is looking."""
