"""`smpc run`: start a script on several ranks of this host, or of this host and others."""

from __future__ import annotations

import dataclasses
import os

import typer

from smpc.cli import run_options as opt
from smpc.cli.observe import ObserveOptions, observed
from smpc.launch import Job, launch
from smpc.launch_nodes import NodeOptions
from smpc.launch_output import OutputOptions


def run_command(
    script: opt.Script,
    arguments: opt.Arguments = None,
    num_ranks: opt.NumRanks = 1,
    module: opt.Module = False,
    grace: opt.Grace = 3.0,
    stdout: opt.Stdout = None,
    stderr: opt.Stderr = None,
    console: opt.Console = "all",
    prefix: opt.Prefix = True,
    report: opt.Report = False,
    report_to: opt.ReportTo = None,
    trace: opt.Trace = None,
    trace_steps: opt.TraceSteps = None,
    num_nodes: opt.NumNodes = None,
    node_rank: opt.NodeRank = None,
    world_size: opt.WorldSize = None,
    base_rank: opt.BaseRank = None,
    master_addr: opt.MasterAddr = None,
    master_port: opt.MasterPort = None,
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
