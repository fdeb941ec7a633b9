"""`smpc run`: start a script on several ranks of this host, or of this host and others.

Its options have one name each: what typer shows and parses.

`observed` is what `--report` and `--trace` do: it asks the ranks for their records, and turns those into a report and a trace when they
have ended.

Every rank writes its measurements to a folder (`smpc.v1.session.supervision`): the one of `--trace`, or a temporary one. Launchers of
several nodes write to the same folder if it is on a shared disk, and the last one to end makes the trace of all ranks; otherwise each
makes the trace of its own ranks. Files of an earlier job in the folder are removed first, by the launcher of node 0.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from smpc.aliasing import VARIABLE
from smpc.config.numbers import shown
from smpc.config.user_files import output_violation
from smpc.errors import ConfigError
from smpc.launch.job import Job, default_num_ranks, launch
from smpc.launch.nodes import NodeOptions
from smpc.launch.output import OutputOptions
from smpc.observe.window import Observation, Window

if TYPE_CHECKING:
    from smpc.observe.observer import RankRecord
    from smpc.partitioner.graph.plan import Plan


_NODES = "Several nodes"
_LOGS = "Output"
_OBSERVE = "Observation"

Script = Annotated[str, typer.Argument(help="The Python script to run on every rank.", show_default=False)]
Arguments = Annotated[
    list[str] | None, typer.Argument(metavar="[ARGS]...", help="Its arguments, passed on as they are.")
]
NumRanks = Annotated[
    int | None,
    typer.Option(
        "-n",
        "--nproc",
        "--nproc-per-node",
        metavar="N",
        show_default=False,
        help="How many ranks (processes) to start on this node; LOCAL_WORLD_SIZE in the environment, else one for each GPU.",
    ),
]
Module = Annotated[
    bool,
    typer.Option("-m", "--module", "--module_mode", help="SCRIPT is the name of a module, as for python -m."),
]
Command = Annotated[bool, typer.Option("-c", "--command_mode", help="SCRIPT is a program, which runs without Python.")]
Verbose = Annotated[
    bool,
    typer.Option("-v", "--verbose", help="Tell on stderr when each rank starts, with what command, and how it ends."),
]
ExpandArgs = Annotated[
    bool,
    typer.Option(
        "--expand-args", help="Replace $NAME, ${NAME} and a leading ~ in ARGS by the values in each rank's environment."
    ),
]
MaxRestarts = Annotated[
    int,
    typer.Option(
        "--max-restarts",
        metavar="N",
        help="Start all ranks again, N times at most, after a failure with another status than 2.",
    ),
]
Alias = Annotated[
    bool,
    typer.Option(
        "--alias",
        help="Let the script's imports of `smdistributed.modelparallel.torch`, `torch.sagemaker` and `composer` find smpc; as "
        "SMPC_ALIAS=1 does under any launcher.",
    ),
]
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
        help="Whose output is shown here: all ranks', this node's first rank's, or none. A failed rank's is shown at the end.",
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
        help="The steps that --trace and --report look at, from 0; 5:8 is 5, 6 and 7 (memory in 4). 2:5 by default, 2:102 without --trace.",
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
        help="The address of node 0; MASTER_ADDR in the environment. A job of one node meets on loopback.",
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


def run_command(
    script: Script,
    arguments: Arguments = None,
    num_ranks: NumRanks = None,
    module: Module = False,
    command: Command = False,
    verbose: Verbose = False,
    expand_args: ExpandArgs = False,
    max_restarts: MaxRestarts = 0,
    alias: Alias = False,
    grace: Grace = 3.0,
    stdout: Stdout = None,
    stderr: Stderr = None,
    console: Console = "first",
    prefix: Prefix = True,
    report: Report = False,
    report_to: ReportTo = None,
    trace: Trace = None,
    trace_steps: TraceSteps = None,
    num_nodes: NumNodes = None,
    node_rank: NodeRank = None,
    world_size: WorldSize = None,
    base_rank: BaseRank = None,
    master_addr: MasterAddr = None,
    master_port: MasterPort = None,
) -> None:
    """Start a script on N ranks of this host.

    The script finds its place in RANK, WORLD_SIZE and so on, as under torchrun.
    A job on one node listens on loopback only. If a rank fails, all end, and the
    command shows that rank's traceback and exits with its status.
    """
    nodes = NodeOptions(num_nodes, node_rank, world_size, base_rank, master_addr, master_port)
    output = OutputOptions(stdout, stderr, console, prefix)
    job = Job(
        script,
        tuple(arguments or ()),
        default_num_ranks(os.environ) if num_ranks is None else num_ranks,
        module,
        nodes,
        output,
        grace,
        is_command=command,
        expands=expand_args,
        is_verbose=verbose,
        max_restarts=max_restarts,
    )
    options = ObserveOptions(report, report_to, trace, trace_steps)
    is_first_node = options.is_wanted and job.check(os.environ).node_rank == 0
    with observed(options, is_first_node=is_first_node) as variables:
        if alias:
            variables[VARIABLE] = "1"
        status = launch(dataclasses.replace(job, variables=variables))
    raise typer.Exit(status)


TRACE, PREDICTED = "trace.json", "predicted.json"
_RECORDS = "rank*.json"
_PLAN = "plan.json"


@dataclass(frozen=True, slots=True)
class ObserveOptions:
    """The user's request. `report_to` is a file, JSON if it is named so; `steps` is FIRST:LAST."""

    report: bool = False
    report_to: str | None = None
    trace: str | None = None
    steps: str | None = None

    @property
    def is_wanted(self) -> bool:
        """Whether anything is asked for."""
        return self.report or self.report_to is not None or self.trace is not None

    def check(self) -> Window:
        """The steps to record. Raises ConfigError, all violations together."""
        violations = []
        window = Window() if self.trace is None else Window(2, 5)
        if self.steps is not None:
            try:
                window = Window.parse(self.steps)
            except ConfigError as error:
                violations.append(f"--trace-steps: {error}")
            if not self.is_wanted:
                violations.append("--trace-steps: expected --trace or --report as well")
        if self.trace is not None and os.path.lexists(self.trace) and not os.path.isdir(self.trace):
            violations.append(f"--trace: expected a folder, found the file {shown(self.trace)}")
        if self.report_to is not None and (violation := output_violation(self.report_to)):
            violations.append(f"--report-to: {violation}")
        if violations:
            raise ConfigError("\n".join(violations))
        return window


@contextmanager
def observed(options: ObserveOptions, *, is_first_node: bool) -> Iterator[dict[str, str]]:
    """The variables for the environment of the ranks; afterwards, writes and prints the requested reports. Raises ConfigError before."""
    window = options.check()
    if not options.is_wanted:
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="smpc_observe_") as temporary:
        try:
            folder = Path(options.trace or temporary).resolve()
            folder.mkdir(parents=True, exist_ok=True)
            if is_first_node:
                for old in (*folder.glob(_RECORDS), folder / _PLAN, folder / TRACE, folder / PREDICTED):
                    old.unlink(missing_ok=True)
        except (OSError, RuntimeError, ValueError) as error:  # a link to itself, a NUL in the name
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(f"--trace: cannot use the folder {shown(options.trace)}: {reason}") from None
        yield Observation(str(folder), window).environment()
        _finish_observing(options, window, folder)


def _finish_observing(options: ObserveOptions, window: Window, folder: Path) -> None:
    """Makes the report and the trace of the records that the ranks have left."""
    from smpc.observe.observer import RankRecord
    from smpc.partitioner.graph.plan import Plan

    records = [RankRecord.from_json(path.read_text(encoding="utf-8")) for path in sorted(folder.glob(_RECORDS))]
    path = folder / _PLAN
    plan = Plan.from_json(path.read_text(encoding="utf-8")) if path.exists() else None
    if not any(record.steps for record in records):
        _say_of_run(_why_nothing_recorded(records, window))
        return
    if options.trace is not None:
        _write_trace(plan, records, folder)
        _say_of_run(f"wrote {folder / TRACE}; open it in https://ui.perfetto.dev")
    if options.report or options.report_to is not None:
        _write_report(options, plan, records)


def _write_trace(plan: Plan | None, records: Sequence[RankRecord], folder: Path) -> None:
    from smpc.report.measured import measured_json
    from smpc.report.perfetto import perfetto_json
    from smpc.report.predict import plan_timeline

    (folder / TRACE).write_text(measured_json(plan, records), encoding="utf-8")
    if plan is not None:
        (folder / PREDICTED).write_text(perfetto_json(plan, plan_timeline(plan)), encoding="utf-8")


def _write_report(options: ObserveOptions, plan: Plan | None, records: Sequence[RankRecord]) -> None:
    """Writes or prints the report of the records."""
    from smpc.report.measured import compare, whole_steps

    if plan is None:
        text = f"{whole_steps(records)}\n"
        data = json.dumps({"plan": None, "report": text}, indent=2) + "\n"
    else:
        found = compare(plan, records)
        text, data = f"{found}\n", found.to_json()
    if options.report:
        sys.stdout.write(text)
        sys.stdout.flush()
    if options.report_to is not None:
        try:
            Path(options.report_to).write_text(data if options.report_to.endswith(".json") else text, encoding="utf-8")
        except OSError as error:
            _say_of_run(f"cannot write the report to {options.report_to!r}: {error.strerror}")


def _why_nothing_recorded(records: Sequence[RankRecord], window: Window) -> str:
    """Why there is nothing to report."""
    if not records:
        return (
            "no rank has left a record to report or trace: the script has to call smp.init and make a smp.DistributedModel, and "
            "ranks that are killed leave none before the last step that is recorded"
        )
    ran = max(record.num_steps for record in records)
    return f"nothing was recorded: the ranks ran {ran} steps, steps {window} were to be recorded; see --trace-steps"


def _say_of_run(text: str) -> None:
    print(f"smpc: {text}", file=sys.stderr)
