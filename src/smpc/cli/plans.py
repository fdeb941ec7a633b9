"""Plans that the user names on the command line: files written by `smpc compile`, or the folders they are in.

A plan is checked before it is used: that it is JSON, that every field has its type, that stages, ranks and edges fit
together, and that nothing was changed since it was written. Whatever is wrong is a ConfigError of one line.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from smpc.errors import ConfigError
from smpc.partitioner.plan import INPUTS, PLAN_VERSION, Plan

_REMEDY = "write it again with `smpc compile ... --out DIR`"


def load_plan(name: str) -> Plan:
    """The plan of a file, or of a folder that holds plan.json."""
    text = _read(name)
    try:
        data = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name!r}: expected a plan, found no JSON ({error})") from error
    if not isinstance(data, dict) or "stages" not in data or "fingerprint" not in data:
        raise ConfigError(f"{name!r}: expected a plan as `smpc compile` writes it, found other JSON")
    if data.get("version") != PLAN_VERSION:
        found = data.get("version")
        raise ConfigError(f"{name!r}: expected a plan of version {PLAN_VERSION}, found version {found!r}; {_REMEDY}")
    _check_types(name, data)
    try:
        plan = Plan.from_json(text)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{name!r}: {error}; {_REMEDY}") from error
    problem = next(_problems(plan), None)
    if problem is not None:
        raise ConfigError(f"{name!r}: {problem}; {_REMEDY}")
    return plan


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is no number of JSON")


def _read(name: str) -> str:
    path = Path(name)
    try:
        if path.is_dir():
            path = path / "plan.json"
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{str(path)!r}: cannot read the plan: {error.strerror}") from error
    except ValueError as error:  # bytes that are no text, or a name that no file can have
        raise ConfigError(f"{str(path)!r}: expected a plan, found no text in UTF-8 ({error})") from error


def _check_types(name: str, data: dict[str, Any]) -> None:
    fields = {key: value for key, value in data.items() if key != "fingerprint"}
    try:
        TypeAdapter(Plan).validate_json(json.dumps(fields), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{name!r}: {where}: {first['msg']}; {_REMEDY}") from error


def _problems(plan: Plan) -> Iterator[str]:
    """What is wrong with a plan whose fields have their types."""
    num_stages, num_ranks = len(plan.stages), plan.pipeline_parallel_degree
    if not plan.stages:
        yield "expected at least one stage, found none"
    for index, stage in enumerate(plan.stages):
        if stage.index != index:
            yield f"stages.{index}: expected index {index}, found {stage.index}"
        if not 0 <= stage.rank < num_ranks:
            yield f"stages.{index}: expected a rank from 0 to {num_ranks - 1}, found {stage.rank}"
        numbers = (stage.forward_time, stage.backward_time, stage.cost, stage.peak_memory_bytes)
        if not all(math.isfinite(number) and number >= 0 for number in numbers):
            yield f"stages.{index}: expected times, cost and memory of at least 0, found {numbers}"
    for index, edge in enumerate(plan.edges):
        if not INPUTS <= edge.source < edge.destination < num_stages:
            yield f"edges.{index}: expected an edge to a later stage, found {edge.source} to {edge.destination}"
    if plan.schedule.num_microbatches < 1 or plan.schedule.active_microbatches < 1:
        yield "schedule: expected at least one microbatch"
    if not (plan.schedule.link_bandwidth > 0 and plan.schedule.link_latency >= 0):
        yield "schedule: expected a link of some bandwidth"
