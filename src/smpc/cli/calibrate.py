"""`smpc calibrate`: measure this machine, and describe it in a file that `--device` takes."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from smpc.config.numbers import MAX_LOCAL_RANKS, shown
from smpc.config.user_files import output_violation
from smpc.errors import ConfigError

_SECONDS = (5.0, 3600.0)


def calibrate_command(
    out: Annotated[str, typer.Option(metavar="FILE.toml", help="Where the description goes.", show_default=False)],
    ranks: Annotated[
        int | None,
        typer.Option(
            "-n",
            "--ranks",
            metavar="N",
            help="Measure with N processes at once, which share cores and memory as ranks of a job do, and what they send each other.",
        ),
    ] = None,
    seconds: Annotated[float, typer.Option(metavar="S", help="How long to measure, about.")] = 60.0,
) -> None:
    """Measure this machine, and describe it in a file that --device takes.

    Products of matrices, operations that move bytes, convolutions, views, an optimizer's step, each by size; with ranks, also messages and
    collectives. On GPUs if there are some. Ranks may also come from a launcher: smpc run -n 2 -c smpc calibrate --out FILE.toml.
    """
    _check_arguments(out, ranks, seconds)
    if ranks is not None and ranks > 1:
        from smpc.launch.job import Job, launch

        job = Job("smpc.calibration.worker", (os.path.abspath(out), str(seconds)), num_ranks=ranks, is_module=True)
        status = launch(job)
        if status:
            raise typer.Exit(status)
    else:
        from smpc.calibration.measure_device import calibrate_to
        from smpc.cli.terminal import progress

        with progress() as show:
            calibrate_to(out, seconds, show)
    if os.environ.get("RANK", "0") == "0":
        print(f"wrote {shown(out)[1:-1]}; predict times for this machine with --device {shown(out)[1:-1]}")


def _check_arguments(out: str, ranks: int | None, seconds: float) -> None:
    """Raise ConfigError for wrong arguments, before anything is measured."""
    wrong = []
    if not out.lower().endswith(".toml"):
        wrong.append(f"--out {shown(out)}: expected a file name that ends in .toml, which is how --device knows it")
    elif violation := output_violation(out):
        wrong.append(f"--out {shown(out)}: {violation}")
    if ranks is not None and not 1 <= ranks <= MAX_LOCAL_RANKS:
        wrong.append(f"--ranks: expected 1 to {MAX_LOCAL_RANKS}, found {shown(ranks)}")
    if ranks is not None and os.environ.get("WORLD_SIZE", "1") != "1":
        wrong.append(
            "--ranks: this is a rank of a job already, which measures with the job's other ranks; leave it out"
        )
    if not _SECONDS[0] <= seconds <= _SECONDS[1]:
        wrong.append(f"--seconds: expected {_SECONDS[0]:g} to {_SECONDS[1]:g}, found {shown(seconds)}")
    if wrong:
        raise ConfigError("\n".join(wrong))
