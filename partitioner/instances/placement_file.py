"""Instances from files: this package's JSON, and the JSON of the published device-placement problems.

The latter are the workloads of Tarnawski et al., "Efficient Algorithms for Device Placement of DNN Graph Operators", NeurIPS 2020: layer
and operator graphs for inference and training, on accelerators (there: FPGAs) with memory of their own, and CPUs.

    {"maxSizePerFPGA": 16e9, "maxFPGAs": 6, "maxCPUs": 1,
     "nodes": [{"id": 0, "supportedOnFpga": 1, "cpuLatency": 4.5, "fpgaLatency": 0.5, "isBackwardNode": 0, "colorClass": 7, "size": 1e6}],
     "edges": [{"sourceId": 0, "destId": 1, "cost": 0.25}]}

    node        takes `fpgaLatency` on an accelerator, where it must be supported, and `cpuLatency` on a CPU; it holds `size`
    edge        moving what the source makes takes an accelerator `cost`, once to send it and once to receive it; CPUs take no time for it
    colorClass  nodes of the same one share a device; a backward node has its forward node's. May be left out, or null
    maxSize...  what an accelerator may hold; CPUs hold any amount

Other keys are left alone. Devices may stay empty. The published load of a placement is the largest of `InstanceSolution.times`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from smpc.config.numbers import shown
from smpc.config.user_files import MAX_PLAN_BYTES, parse_json, read_text
from smpc.errors import PartitionError, printable
from smpc.partitioner.instances.instance import Instance, Link, Node, Processor

_MOST_DEVICES = 128
_SHOWN = 5
_FLAGS = (0, 1, False, True)
Row = Mapping[str, Any]


def read_instance(path: str | Path, split: str | None = None) -> Instance:
    """The instance of a file in either format; `split` wins over the file's, which for published problems is "contiguous".

    Raises ConfigError for another kind of file, PartitionError for another kind of instance; each is one line with the name of the file.
    """
    name = shown(str(path))
    text = read_text(path, name, most=MAX_PLAN_BYTES)
    data = parse_json(text, name)
    try:
        if "maxFPGAs" in data or "maxCPUs" in data:
            return _published_placement(data, split or "contiguous")
        return Instance.from_object(data if split is None else {**data, "split": split})
    except PartitionError as error:
        raise PartitionError(f"{name}: {printable(str(error))}") from None


def _published_placement(data: Row, split: str) -> Instance:
    """A problem of the paper."""
    wrong = list(_wrong_in_placement_file(data))
    if wrong:
        more = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise PartitionError(f"expected a device-placement problem, found: {'; '.join(wrong[:_SHOWN])}{more}")
    accelerator = Processor(memory_limit=data.get("maxSizePerFPGA"), kind="accelerator", bandwidth=1.0)
    devices = (accelerator,) * data.get("maxFPGAs", 0) + (Processor(kind="cpu"),) * data.get("maxCPUs", 0)
    groups: dict[Any, list[str]] = {}
    for row in data["nodes"]:
        if row.get("colorClass") is not None:
            groups.setdefault(row["colorClass"], []).append(str(row["id"]))
    return Instance.of(
        (_node_of_row(row) for row in data["nodes"]),
        (Link(str(row["sourceId"]), str(row["destId"]), row.get("cost") or 0.0) for row in data["edges"]),
        devices,
        together=(group for group in groups.values() if len(group) > 1),
        split=split,
        may_idle=True,
    )


def _node_of_row(row: Row) -> Node:
    """The node that a row of the file describes."""
    on_accelerator = row.get("fpgaLatency") if row.get("supportedOnFpga", 1) else None
    on_cpu = row.get("cpuLatency")
    time = next((value for value in (on_accelerator, on_cpu) if value is not None), 0.0)
    return Node(
        str(row["id"]),
        time,
        row.get("size") or 0.0,
        time_on={"accelerator": on_accelerator, "cpu": on_cpu},
        backward=bool(row.get("isBackwardNode", 0)),
    )


def _wrong_in_placement_file(data: Row) -> Iterator[str]:
    """Rejects anything that is not a field of a problem; `Instance` checks amounts."""
    for name in ("maxFPGAs", "maxCPUs"):
        count = data.get(name, 0)
        if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count <= _MOST_DEVICES:
            yield f"{name} {shown(count)}, which must be a whole number from 0 to {_MOST_DEVICES}"
    if (limit := data.get("maxSizePerFPGA")) is not None and not _is_number(limit):
        yield f"maxSizePerFPGA {shown(limit)}, which must be a number"
    for key, ids, numbers, flags in (
        ("nodes", ("id",), ("cpuLatency", "fpgaLatency", "size"), ("supportedOnFpga", "isBackwardNode")),
        ("edges", ("sourceId", "destId"), ("cost",), ()),
    ):
        rows = data.get(key)
        if not isinstance(rows, list):
            yield f"{key} {shown(rows)}, which must be a list"
            continue
        for i, row in enumerate(rows):
            if not isinstance(row, dict):
                yield f"{key}.{i} {shown(row)}, which must be an object"
                continue
            colors = [] if row.get("colorClass") is None else ["colorClass"]
            for name in (*ids, *colors):
                if not isinstance(row.get(name), (int, str)) or isinstance(row.get(name), bool):
                    yield f"{key}.{i}.{name} {shown(row.get(name))}, which must be a whole number or a name"
            for name in numbers:
                if row.get(name) is not None and not _is_number(row[name]):
                    yield f"{key}.{i}.{name} {shown(row[name])}, which must be a number"
            for name in flags:
                if row.get(name, 0) not in _FLAGS:
                    yield f"{key}.{i}.{name} {shown(row[name])}, which must be 0 or 1"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
