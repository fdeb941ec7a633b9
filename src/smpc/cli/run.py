"""`smpc run`: start a script on several ranks of this host."""

from __future__ import annotations

from typing import Annotated

import typer

from smpc.launch import Job, launch


def run_command(
    script: Annotated[str, typer.Argument(help="The Python script to run on every rank.", show_default=False)],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[ARGS]...", help="Its arguments, passed on as they are.")
    ] = None,
    num_ranks: Annotated[
        int, typer.Option("-n", "--nproc", metavar="N", help="How many ranks (processes) to start.")
    ] = 1,
) -> None:
    """Start a script on N ranks of this host.

    The script finds its place in RANK, WORLD_SIZE and so on, as under torchrun.
    Nothing listens outside loopback. If a rank fails, all end, and the command
    shows that rank's traceback and exits with its status.
    """
    raise typer.Exit(launch(Job(script, tuple(arguments or ()), num_ranks)))
