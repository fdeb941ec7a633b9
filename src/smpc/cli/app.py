"""The `smpc` command: its subcommands, and how errors look.

Exit status: 0 when all went well; 2 when what the user gave is wrong (one line for each violation on stderr, each
starting `smpc: error:`, no traceback); of `smpc diff`, 1 when the plans differ; of `smpc checkpoint
verify`, 1 when something is damaged; of `smpc run`, otherwise, what
`smpc.launch` says. An error that is smpc's own fault shows its traceback. With SMPC_DEBUG=1 in the environment the
user's errors show theirs as well.
"""

from __future__ import annotations

import io
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from smpc.cli.checkpoint import checkpoint_app
from smpc.cli.compile import compile_command
from smpc.cli.diff import diff_command
from smpc.cli.env import env_command
from smpc.cli.run import run_command
from smpc.cli.simulate import simulate_command
from smpc.errors import SmpcError

app = typer.Typer(
    name="smpc",
    help="Model-parallel training for PyTorch: plan, cut, schedule and run a model over several ranks.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("compile")(compile_command)
app.command("simulate")(simulate_command)
app.command("diff")(diff_command)
# What follows the script belongs to it, also `--help`.
app.command("run", context_settings={"allow_interspersed_args": False})(run_command)
app.command("env")(env_command)
app.add_typer(checkpoint_app, name="checkpoint")


@app.callback(invoke_without_command=True)
def _options(
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
    """Run the command line; `arguments` are those of the process if None. Returns the exit status."""
    _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a path that is not UTF-8 can be shown
    try:
        status = app(args=arguments, prog_name="smpc", standalone_mode=False)
    except SmpcError as error:
        return _complain(error, str(error))
    except typer.Abort:
        return 130
    except Exception as error:
        # click's UsageError. By name: typer brings its own click, or depends on it, according to its version.
        if "UsageError" not in [cls.__name__ for cls in type(error).__mro__]:
            raise
        usage: Any = error
        return _complain(error, usage.format_message())
    return status if isinstance(status, int) else 0


def _open_closed_streams() -> None:
    """Where the caller has closed stdout or stderr (a daemon, `>&-`), Python has None for them: what goes there is dropped."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115, until the process ends
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115


def _complain(error: Exception, text: str) -> int:
    if os.environ.get("SMPC_DEBUG", "0") not in ("", "0"):
        traceback.print_exception(error)
    for line in text.splitlines():
        print(f"smpc: error: {line}", file=sys.stderr)
    return 2
