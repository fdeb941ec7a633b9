"""`smpc solve`: an instance of a placement problem from a file, solved and shown; no model is needed."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer


def solve_command(
    path: Annotated[
        str,
        typer.Argument(
            metavar="FILE", help="An instance in JSON: smpc's own form, or a published problem.", show_default=False
        ),
    ],
    split: Annotated[
        str | None,
        typer.Option(metavar="row|contiguous|free", help="How nodes may be split; wins over the file's."),
    ] = None,
    gap: Annotated[float, typer.Option(metavar="G", help="Be content this near to the proven bound.")] = 1e-3,
    time_limit: Annotated[float, typer.Option(metavar="S", help="Seconds for the integer program.")] = 40.0,
    json_only: Annotated[bool, typer.Option("--json", help="Print the solution as JSON and nothing else.")] = False,
) -> None:
    """Place the nodes of a graph on devices, so that the largest load is smallest, with a proven bound.

    Takes the published device-placement problems (Tarnawski et al., NeurIPS 2020) as they are; docs/planner.md has both forms.
    """
    from smpc.partitioner import read_instance, solve_instance

    instance = read_instance(path, split)
    found = solve_instance(instance, gap, time_limit)
    is_proven = found.lower_bound > 0 or found.bottleneck == 0
    if json_only:
        fields = {name: getattr(found, name) for name in found.__dataclass_fields__}
        fields["gap"] = found.gap if is_proven else None
        sys.stdout.write(json.dumps(fields, indent=1, allow_nan=False) + "\n")
        return
    from smpc.report.tables import TextTable
    from smpc.report.terminal import stdout_console, text_table

    numbers = list(found.stage_of.values())
    rows = tuple(
        (
            str(i),
            device.kind,
            f"{numbers.count(i):,}",
            f"{found.times[i]:.6g}",
            f"{found.memory[i]:.6g}",
            "any" if device.memory_limit is None else f"{device.memory_limit:.6g}",
        )
        for i, device in enumerate(instance.devices)
    )
    console = stdout_console()
    typer.echo(f"{len(instance.nodes):,} nodes, {len(instance.edges):,} edges, {instance.split} splits")
    headers = ("Device", "Kind", "Nodes", "Time", "Memory", "Limit")
    console.print(text_table(TextTable(headers, rows, left=("Kind",)), console.width))
    proven = f"at most {found.gap:.3%} above the optimum" if is_proven else "nothing proven"
    typer.echo(f"largest time {max(found.times):.6g}; largest load {found.bottleneck:.6g}, {proven}, by {found.solver}")
    if found.note:
        typer.echo(found.note)
