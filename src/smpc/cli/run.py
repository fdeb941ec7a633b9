"""`smpc run`: start a script on several ranks of this host, or of this host and others."""

from __future__ import annotations

import dataclasses
import os
from typing import Annotated

import typer

from smpc.cli.observe import ObserveOptions, observed
from smpc.launch import Job, launch
from smpc.launch_nodes import NodeOptions
from smpc.launch_output import OutputOptions

_NODES = "Several nodes"
_LOGS = "Output"
_OBSERVE = "Observation"


def run_command(
    script: Annotated[str, typer.Argument(help="The Python script to run on every rank.", show_default=False)],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[ARGS]...", help="Its arguments, passed on as they are.")
    ] = None,
    num_ranks: Annotated[
        int,
        typer.Option(
            "-n", "--nproc", "--nproc-per-node", metavar="N", help="How many ranks (processes) to start on this node."
        ),
    ] = 1,
    module: Annotated[
        bool, typer.Option("-m", "--module", help="SCRIPT is the name of a module, as for python -m.")
    ] = False,
    grace: Annotated[
        float, typer.Option(metavar="SECONDS", help="How long ranks have to end after SIGTERM, before SIGKILL.")
    ] = 3.0,
    stdout: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            rich_help_panel=_LOGS,
            show_default=False,
            help="Write every rank's stdout to a file as well; FILE has {rank}, and may have {local_rank}, {world_size}, "
            "{local_world_size} and {node_rank}.",
        ),
    ] = None,
    stderr: Annotated[
        str | None,
        typer.Option(metavar="FILE", rich_help_panel=_LOGS, show_default=False, help="The same for stderr."),
    ] = None,
    console: Annotated[
        str,
        typer.Option(
            metavar="WHICH",
            rich_help_panel=_LOGS,
            help="Whose output is shown here: that of all ranks, of the first one of this node, or of none.",
        ),
    ] = "all",
    prefix: Annotated[
        bool,
        typer.Option("--prefix/--no-prefix", rich_help_panel=_LOGS, help="Begin lines with the rank that wrote them."),
    ] = True,
    report: Annotated[
        bool,
        typer.Option(
            "--report",
            rich_help_panel=_OBSERVE,
            help="Print predicted against measured memory and time when the job has ended.",
        ),
    ] = False,
    report_to: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            rich_help_panel=_OBSERVE,
            show_default=False,
            help="Write that report to a file; as JSON if its name ends with .json.",
        ),
    ] = None,
    trace: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            rich_help_panel=_OBSERVE,
            show_default=False,
            help="Write a trace of every rank's instructions for https://ui.perfetto.dev, with the predicted step.",
        ),
    ] = None,
    trace_steps: Annotated[
        str | None,
        typer.Option(
            metavar="FIRST:LAST",
            rich_help_panel=_OBSERVE,
            show_default=False,
            help="The steps that --trace and --report look at, from 0; 5:8 is 5, 6 and 7. 2:5 by default, 2:102 without --trace.",
        ),
    ] = None,
    num_nodes: Annotated[
        int | None,
        typer.Option(
            "--nnodes", "--nodes", metavar="N", rich_help_panel=_NODES, show_default=False, help="How many nodes."
        ),
    ] = None,
    node_rank: Annotated[
        int | None,
        typer.Option(
            "--node-rank",
            "--node_rank",
            metavar="N",
            rich_help_panel=_NODES,
            show_default=False,
            help="The number of this node, from 0; NODE_RANK in the environment.",
        ),
    ] = None,
    world_size: Annotated[
        int | None,
        typer.Option(
            "--world-size",
            "--world_size",
            metavar="N",
            rich_help_panel=_NODES,
            show_default=False,
            help="Ranks of all nodes together, where nodes have different numbers of them; WORLD_SIZE in the environment.",
        ),
    ] = None,
    base_rank: Annotated[
        int | None,
        typer.Option(
            "--base-rank",
            "--base_rank",
            metavar="N",
            rich_help_panel=_NODES,
            show_default=False,
            help="The lowest rank of this node; BASE_RANK in the environment.",
        ),
    ] = None,
    master_addr: Annotated[
        str | None,
        typer.Option(
            "--master-addr",
            "--master_addr",
            metavar="HOST",
            rich_help_panel=_NODES,
            show_default=False,
            help="The address of node 0; MASTER_ADDR in the environment.",
        ),
    ] = None,
    master_port: Annotated[
        int | None,
        typer.Option(
            "--master-port",
            "--master_port",
            metavar="PORT",
            rich_help_panel=_NODES,
            show_default=False,
            help="A free port of node 0; MASTER_PORT in the environment. A job of one node picks one.",
        ),
    ] = None,
) -> None:
    """Start a script on N ranks of this host.

    The script finds its place in RANK, WORLD_SIZE and so on, as under torchrun.
    A job on one node listens on loopback only. If a rank fails, all end, and the
    command shows that rank's traceback and exits with its status.
    """
    nodes = NodeOptions(num_nodes, node_rank, world_size, base_rank, master_addr, master_port)
    output = OutputOptions(stdout, stderr, console, prefix)
    job = Job(script, tuple(arguments or ()), num_ranks, module, nodes, output, grace)
    options = ObserveOptions(report, report_to, trace, trace_steps)
    is_first_node = options.is_wanted and job.check(os.environ).node_rank == 0
    with observed(options, is_first_node=is_first_node) as variables:
        status = launch(dataclasses.replace(job, variables=variables))
    raise typer.Exit(status)
