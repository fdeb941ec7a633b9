"""The `smpc` command: its subcommands, and how errors look.

Exit status: 0 when all went well; 2 when what the user gave is wrong (one line for each violation on stderr, each
starting `smpc: error:`, no traceback); of `smpc diff`, 1 when the plans differ; of
`smpc compile --verify`, 1 when the programs do not do what the model does; of `smpc checkpoint verify`, 1 when
something is damaged; of `smpc run`, otherwise, what `smpc.launch.job` says. An error that is smpc's own fault shows
its traceback. With SMPC_DEBUG=1 in the environment the user's errors show theirs as well.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import gc
import io
import itertools
import os
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

import typer

from smpc.cli.lazy import LazyGroup
from smpc.cli.terminal import clear_lines
from smpc.errors import SmpcError, VerificationError

_OUTPUT_GONE = (errno.ENOSPC, errno.EPIPE, errno.EIO, errno.EDQUOT)

app = typer.Typer(
    name="smpc",
    cls=LazyGroup,
    help="Model-parallel training for PyTorch: plan, cut, schedule and run a model over several ranks.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def _global_options(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        from importlib.metadata import version as installed

        typer.echo(f"smpc {installed('smpc')}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status. `arguments`: None for the process's own, which then ends here."""
    status = _exit_status(arguments)
    if arguments is None:
        _end_of_app(status)
    return status


def _end_of_app(status: int) -> None:
    """End the process: threads are waited for, functions of `atexit` called, and open files written, as Python does; the rest is dropped.

    Temporary files are removed, too. Python would take all modules apart: with torch and transformers that is a second, a sixth of the
    time of a small plan.
    """
    wait: Callable[[], None] | None = getattr(threading, "_shutdown", None)
    call: Callable[[], None] | None = getattr(atexit, "_run_exitfuncs", None)
    if wait is None or call is None or sys.getprofile() is not None:
        return  # another Python, or one that is measured, ends in its own way
    wait()
    call()
    objects = gc.get_objects()  # a million
    kinds = list(map(type, objects))
    classes = dict(zip(map(id, kinds), kinds, strict=True))  # few
    files = {number for number, kind in classes.items() if _is_file(kind)}
    open_files = itertools.compress(objects, map(files.__contains__, map(id, kinds)))
    for each in list(open_files):  # a model's own code may have left them open
        with contextlib.suppress(OSError, ValueError):
            if issubclass(type(each), io.IOBase):
                each.flush()
            else:
                each.close()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def _is_file(kind: type) -> bool:
    """Whether objects of a class are open files. io.IOBase itself would ask all its subclasses, of every class that there is."""
    return issubclass(kind, io.IOBase.__mro__[1]) or kind is tempfile._TemporaryFileWrapper


def _exit_status(arguments: Sequence[str] | None) -> int:
    """Runs a command and returns its exit status."""
    _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a path that is not UTF-8 can be shown
    try:
        with _rare_collections():
            status = app(args=arguments, prog_name="smpc", standalone_mode=False)
        sys.stdout.flush()
    except VerificationError as error:
        _print_error(error, str(error))
        return 1
    except SmpcError as error:
        return _print_error(error, str(error))
    except MemoryError as error:
        return _print_error(error, "out of memory; try smaller inputs or fewer microbatches")
    except RecursionError as error:
        return _print_error(error, "nested too deeply; SMPC_DEBUG=1 shows where")
    except OSError as error:
        if error.filename is not None or error.errno not in _OUTPUT_GONE:
            raise
        _drop_output()
        return _print_error(error, f"cannot write the result: {error.strerror}")
    except typer.Abort:
        return 130
    except Exception as error:
        # click's UsageError. By name: typer brings its own click, or depends on it, according to its version.
        if "UsageError" not in [cls.__name__ for cls in type(error).__mro__]:
            raise
        usage: Any = error
        return _print_error(error, usage.format_message())
    return status if isinstance(status, int) else 0


@contextlib.contextmanager
def _rare_collections() -> Iterator[None]:
    """Fewer searches for garbage: importing torch and transformers makes objects that stay, and a sixth of the time went there."""
    before = gc.get_threshold()
    gc.set_threshold(1_000_000, 20, 20)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _open_closed_streams() -> None:
    """If the caller has closed stdout or stderr (a daemon, `>&-`), Python has None for them; their output is dropped."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115, until the process ends
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115


def _drop_output() -> None:
    """Redirects buffered output of stdout to nowhere: Python would otherwise report the error once more at its end."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print_error(error: Exception, text: str) -> int:
    """Prints an error, a line each, and returns its exit status."""
    if os.environ.get("SMPC_DEBUG", "0") not in ("", "0"):
        traceback.print_exception(error)
    for line in clear_lines(text):
        print(f"smpc: error: {line}", file=sys.stderr)
    return 2
