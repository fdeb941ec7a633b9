"""The options of `smpc run`, one name each: what typer shows and parses."""

from __future__ import annotations

from typing import Annotated

import typer

_NODES = "Several nodes"
_LOGS = "Output"
_OBSERVE = "Observation"

Script = Annotated[str, typer.Argument(help="The Python script to run on every rank.", show_default=False)]
Arguments = Annotated[
    list[str] | None, typer.Argument(metavar="[ARGS]...", help="Its arguments, passed on as they are.")
]
NumRanks = Annotated[
    int,
    typer.Option(
        "-n", "--nproc", "--nproc-per-node", metavar="N", help="How many ranks (processes) to start on this node."
    ),
]
Module = Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is the name of a module, as for python -m.")]
Grace = Annotated[
    float, typer.Option(metavar="SECONDS", help="How long ranks have to end after SIGTERM, before SIGKILL.")
]
Stdout = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        rich_help_panel=_LOGS,
        show_default=False,
        help="Write every rank's stdout to a file as well; FILE has {rank}, and may have {local_rank}, {world_size}, "
        "{local_world_size} and {node_rank}.",
    ),
]
Stderr = Annotated[
    str | None,
    typer.Option(metavar="FILE", rich_help_panel=_LOGS, show_default=False, help="The same for stderr."),
]
Console = Annotated[
    str,
    typer.Option(
        metavar="WHICH",
        rich_help_panel=_LOGS,
        help="Whose output is shown here: that of all ranks, of the first one of this node, or of none.",
    ),
]
Prefix = Annotated[
    bool,
    typer.Option("--prefix/--no-prefix", rich_help_panel=_LOGS, help="Begin lines with the rank that wrote them."),
]
Report = Annotated[
    bool,
    typer.Option(
        "--report",
        rich_help_panel=_OBSERVE,
        help="Print predicted against measured memory and time when the job has ended.",
    ),
]
ReportTo = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        rich_help_panel=_OBSERVE,
        show_default=False,
        help="Write that report to a file; as JSON if its name ends with .json.",
    ),
]
Trace = Annotated[
    str | None,
    typer.Option(
        metavar="DIR",
        rich_help_panel=_OBSERVE,
        show_default=False,
        help="Write a trace of every rank's instructions for https://ui.perfetto.dev, with the predicted step.",
    ),
]
TraceSteps = Annotated[
    str | None,
    typer.Option(
        metavar="FIRST:LAST",
        rich_help_panel=_OBSERVE,
        show_default=False,
        help="The steps that --trace and --report look at, from 0; 5:8 is 5, 6 and 7. 2:5 by default, 2:102 without --trace.",
    ),
]
NumNodes = Annotated[
    int | None,
    typer.Option(
        "--nnodes", "--nodes", metavar="N", rich_help_panel=_NODES, show_default=False, help="How many nodes."
    ),
]
NodeRank = Annotated[
    int | None,
    typer.Option(
        "--node-rank",
        "--node_rank",
        metavar="N",
        rich_help_panel=_NODES,
        show_default=False,
        help="The number of this node, from 0; NODE_RANK in the environment.",
    ),
]
WorldSize = Annotated[
    int | None,
    typer.Option(
        "--world-size",
        "--world_size",
        metavar="N",
        rich_help_panel=_NODES,
        show_default=False,
        help="Ranks of all nodes together, where nodes have different numbers of them; WORLD_SIZE in the environment.",
    ),
]
BaseRank = Annotated[
    int | None,
    typer.Option(
        "--base-rank",
        "--base_rank",
        metavar="N",
        rich_help_panel=_NODES,
        show_default=False,
        help="The lowest rank of this node; BASE_RANK in the environment.",
    ),
]
MasterAddr = Annotated[
    str | None,
    typer.Option(
        "--master-addr",
        "--master_addr",
        metavar="HOST",
        rich_help_panel=_NODES,
        show_default=False,
        help="The address of node 0; MASTER_ADDR in the environment.",
    ),
]
MasterPort = Annotated[
    int | None,
    typer.Option(
        "--master-port",
        "--master_port",
        metavar="PORT",
        rich_help_panel=_NODES,
        show_default=False,
        help="A free port of node 0; MASTER_PORT in the environment. A job of one node picks one.",
    ),
]
