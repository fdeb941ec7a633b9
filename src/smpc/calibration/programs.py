"""What running a step takes beside its operations and messages: the runtime's own work, measured on models of a few blocks.

    found = measure_programs(ranks, dtype, seconds=6, wires=measure_wires(ranks))

    action      of one rank: a program of one stage beside the same model by itself, eight microbatches against one. Of several: a training
                script with two stages on each rank, beside their parts of the same model by itself. It includes the processor time of
                messages, and the time that ranks wait because another was late
    step        of one rank: how much longer a program of one microbatch takes than the model by itself, less its actions. Of several: a
                training script's step on as many stages, less messages between them as well. It includes what ranks tell each other at its
                start and end
    unit        of torch's fully_shard, by the bytes of a block: blocks in parts on the ranks, beside the same blocks whole; none for one
                rank. They are called as a transformer's are
    unit_step   the same, once in a step, less its gather and its sum
    deferred    forward and backward of the probes with the gradients of parameters computed later, beside the probes with an ordinary
                backward; by the FLOPs of a call, of products and of convolutions

Blocks are as large as a model's: they drive out of the caches what the runtime needs, and ranks wait long for each other. Around blocks
that stay in the caches hooks and actions take a third of the time, and a script's step three fifths.

All of it is time of the processor that launches operations, or of waiting for other ranks' processors. On a GPU it passes while earlier
kernels are at work: nothing is measured.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import smpc.v1 as smp
from smpc.calibration.communication import Wires
from smpc.calibration.measuring_processes import CalibrationRanks
from smpc.calibration.operations import steady
from smpc.calibration.probes import ProbeModel, TextProbe, probes
from smpc.compile import compile_model
from smpc.executor.split_backward.deferred_calls import Pending
from smpc.executor.split_backward.intercept import Deferral
from smpc.executor.transport.loopback import loopback_transports
from smpc.partitioner.costs.collective_times import CollectiveKind
from smpc.partitioner.costs.device import NONE, Curve, at
from smpc.partitioner.costs.node_costs import deferred_of
from smpc.partitioner.costs.operation_kinds import broader_name, name_of
from smpc.runtime import Runtime
from smpc.sample_inputs import Inputs
from smpc.sharding import Keep, Sharded, ShardingOptions, Unit, find_units, shard
from smpc.tracer import record

_MANY, _MANY_OF_UNITS = 8, 4  # microbatches
_WIDTH, _ROWS, _BLOCKS, _LAYERS = 256, 128, 4, 4  # of blocks: a row takes a few milliseconds
_UNIT_WIDTHS, _UNITS = (64, 160, 384), 8  # of those in parts, as many as a step has
_UNIT_ELEMENTS = 48 << 10  # of what goes through them
_STAGES = 2  # of a rank, where actions are measured
_ROUNDS, _ROUNDS_OF_SCRIPT = 11, 31
_FIRST = 3  # steps of a script, of which the first one compiles
_LEAST = 1e-9  # s; a curve of powers has no zero
_LEAST_OF_UNIT = 1e-5  # s; hooks in Python
_FEWEST, _MOST = 3, 4  # sizes of the probes of a family
_SHARE_OF_TIME = 6  # beyond the fewest, one whose predecessor takes a longer part of the time is left out


@dataclass(frozen=True)
class Programs:
    """Seconds: see the module docstring."""

    action: float = 0.0
    step: float = 0.0
    unit: Curve = NONE
    unit_step: Curve = NONE
    deferred: Mapping[str, Curve] = field(default_factory=dict)


def measure_programs(ranks: CalibrationRanks, dtype: torch.dtype, seconds: float, wires: Wires) -> Programs:
    """In about so many seconds, with the wires of the same ranks. Collective over the ranks; the same on each."""
    if ranks.device.type != "cpu":
        return Programs()
    action, step = _program_seconds_of_executor(ranks)
    unit, unit_step = _program_seconds_of_units(ranks, wires) if ranks.per_host > 1 else (NONE, NONE)
    deferred = _program_seconds_of_deferred(ranks, dtype, seconds)
    if 1 < ranks.size <= _BLOCKS * _LAYERS:
        action = _program_seconds_of_action(ranks)
        step = _program_seconds_of_script(ranks, action, wires)
    return Programs(action, step, unit, unit_step, deferred)


class _Blocks(nn.Module):
    """Blocks in a row, [rows, width] to a loss; each has as many layers as a transformer's."""

    def __init__(self, blocks: int = _BLOCKS) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS))) for _ in range(blocks)
        )

    def forward(self, x: Tensor) -> Tensor:
        """The loss."""
        for block in self.blocks:
            x = torch.relu(block(x))
        return x.square().mean()


class _Unit(nn.Module):
    """A block with the arguments of a transformer's, [rows, width] to the same."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(_LAYERS)))

    def forward(
        self, x: Tensor, *, mask: Tensor | None, position_ids: Tensor, position_embeddings: tuple[Tensor, Tensor]
    ) -> Tensor:
        """As many hidden states."""
        out: Tensor = x + self.layers(x) * position_embeddings[0]
        return out


class _Units(nn.Module):
    """Blocks in a row, [rows, width] to a loss."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Unit(width) for _ in range(_UNITS))

    def forward(self, x: Tensor) -> Tensor:
        """The loss."""
        positions = torch.arange(len(x))
        embeddings = torch.ones(len(x), 1), torch.ones(len(x), 1)
        for block in self.blocks:
            x = block(x, mask=None, position_ids=positions, position_embeddings=embeddings)
        return x.square().mean()


def _program_seconds_of_executor(ranks: CalibrationRanks) -> tuple[float, float]:
    """Seconds of an action, and of a step."""
    blocks, rows = _Blocks(), torch.ones(_ROWS, _WIDTH)
    added = _added_by_stage(ranks, blocks, rows, _MANY) - _added_by_stage(ranks, blocks, rows, 1)
    action = max(0.0, added / (2 * (_MANY - 1)))
    text = TextProbe(64).train()
    step = _added_by_stage(ranks, text, torch.zeros(2, 64, dtype=torch.int64), 1)
    return action, max(0.0, step - 2 * action)


@smp.step
def _script_step(model: smp.DistributedModel, rows: Tensor) -> Tensor:
    loss: Tensor = model(rows)
    model.backward(loss)
    return loss


def _program_seconds_of_action(ranks: CalibrationRanks) -> float:
    """Seconds of an action of a training script whose ranks wait for each other: each has several stages, of a block each."""
    settings = {"schedule": "interleaved-1f1b", "virtual_pipeline_degree": _STAGES}
    few, many = (
        _program_beside_model(ranks, _Blocks(_STAGES * ranks.size), count * ranks.size, settings)
        for count in (_STAGES, 2 * _STAGES)
    )
    microbatches = _STAGES * ranks.size  # more of them
    by_script, by_model = (most - least for most, least in zip(many, few, strict=True))
    return max(0.0, by_script - by_model / ranks.size) / (microbatches * 2 * _STAGES)


def _program_seconds_of_script(ranks: CalibrationRanks, action: float, wires: Wires) -> float:
    """Seconds of a training script's step, of one microbatch through all ranks."""
    step, whole = _program_beside_model(ranks, _Blocks(), 1, {})
    wire = wires.between if wires.between is not None else wires.inside
    assert wire is not None, "there are several ranks"
    messages = 2 * (ranks.size - 1) * (wire.latency + _ROWS * _WIDTH * torch.float32.itemsize / wire.rate)
    return max(0.0, step - whole - messages - 2 * ranks.size * action)


def _program_beside_model(
    ranks: CalibrationRanks, blocks: nn.Module, microbatches: int, settings: Mapping[str, Any]
) -> tuple[float, float]:
    """Seconds of a training script's step on all ranks, and of the same model by itself on each, in turns."""
    alone, rows = copy.deepcopy(blocks), torch.ones(_ROWS, _WIDTH)
    batch = rows.repeat(microbatches, 1)
    smp.init(
        {
            "pipeline_parallel_degree": ranks.size,
            "microbatches": microbatches,
            "memory_weight": 0.0,
            "ddp": False,
            **settings,
        }
    )
    model = smp.DistributedModel(blocks)

    def by_itself() -> None:
        for _ in range(microbatches):
            alone(rows).backward()

    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(_ROUNDS_OF_SCRIPT + _FIRST):
        for own, body, held in zip(times, (lambda: _script_step(model, batch), by_itself), (model, alone), strict=True):
            ranks.together()
            own.append(_seconds_of(body, held))
    smp.shutdown()
    step, whole = ranks.mean([steady(own[_FIRST:]) for own in times])
    return step, whole


def _seconds_of(body: Callable[[], object], model: nn.Module) -> float:
    """By the clock; gradients are let go of before."""
    for parameter in model.parameters():
        parameter.grad = None
    start = time.perf_counter()
    body()
    return time.perf_counter() - start


def _added_by_stage(ranks: CalibrationRanks, model: nn.Module, inputs: Tensor, microbatches: int) -> float:
    """Seconds that a step of one stage takes longer than the model by itself; a microbatch is `inputs`."""
    batch = torch.cat([inputs] * microbatches)
    compiled = compile_model(
        model, ((batch,), {}), pipeline_parallel_degree=1, microbatches=microbatches, optimizer="sgd", memory_weight=0.0
    )
    (transport,) = loopback_transports(1, ranks.device)
    runtime = Runtime(model, rank=0, transport=transport)
    program = runtime.install(compiled)
    parts: list[Inputs] = [((inputs,), {}) for _ in range(microbatches)]

    def by_program() -> None:
        runtime.run(program, parts, lambda _, loss: [(loss, None)], training=True)

    def by_itself() -> None:
        for _ in range(microbatches):
            model(inputs).backward()

    return _program_difference(ranks, by_program, by_itself, model)


def _program_difference(
    ranks: CalibrationRanks,
    one: Callable[[], object],
    other: Callable[[], object],
    model: nn.Module,
    timer: Callable[[], float] | None = None,
    rounds: int = _ROUNDS,
) -> float:
    """Seconds of one over the other, in turns; gradients are let go of before each."""
    timer = timer or ranks.timer()
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds + 1):
        for body, noted in zip((one, other), times, strict=True):
            for parameter in model.parameters():
                parameter.grad = None
            start = timer()
            body()
            noted.append(timer() - start)
    (found,) = ranks.mean([steady(times[0][1:]) - steady(times[1][1:])])
    return found


def _program_seconds_of_units(ranks: CalibrationRanks, wires: Wires) -> tuple[Curve, Curve]:
    """Seconds of a unit in parts, by its bytes: in a microbatch, and once in a step."""
    group = [
        dist.new_group(list(range(first, first + ranks.per_host))) for first in range(0, ranks.size, ranks.per_host)
    ][ranks.rank // ranks.per_host]
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=(f"calibrated_{group.group_name}",))
    found = [_program_seconds_of_unit(ranks, wires, mesh, width) for width in _UNIT_WIDTHS]
    return tuple((size, unit) for size, unit, _ in found), tuple((size, step) for size, _, step in found)


def _program_seconds_of_unit(
    ranks: CalibrationRanks, wires: Wires, mesh: DeviceMesh, width: int
) -> tuple[float, float, float]:
    """A unit of one size: its bytes, and seconds in a microbatch and once in a step, by the clock: waiting for other ranks included."""
    whole, divided = _Units(width), _Units(width)
    units = [Unit(name, keep=Keep.STEP) for name in find_units(divided)]
    sharded = shard(divided, units, mesh, ShardingOptions(), in_step=False)
    rows = torch.ones(_UNIT_ELEMENTS // width, width)

    def step(microbatches: int, parts: Sharded | None) -> None:
        model = whole if parts is None else divided
        if parts is not None:
            parts.begin_step()
        for left in reversed(range(microbatches)):
            if parts is not None and not left:
                parts.last_backward()
            model(rows).backward()
        if parts is not None:
            parts.end_step()

    both = nn.ModuleList((whole, divided))
    found = [
        _program_difference(ranks, lambda m=m: step(m, sharded), lambda m=m: step(m, None), both, time.perf_counter, n)  # type: ignore[misc]
        for m, n in ((_MANY_OF_UNITS, _ROUNDS), (1, _MANY_OF_UNITS * _ROUNDS))
    ]
    unit = max(_LEAST_OF_UNIT, (found[0] - found[1]) / ((_MANY_OF_UNITS - 1) * len(units)))
    size = sum(parameter.numel() for parameter in whole.parameters()) * 4 / len(units)
    sent = size / ranks.per_host
    exchanged = sum(
        sent / at(wires.collectives[kind], sent) for kind in (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER)
    )
    return size, unit, max(_LEAST_OF_UNIT, found[1] / len(units) - unit - exchanged)


def _program_seconds_of_deferred(ranks: CalibrationRanks, dtype: torch.dtype, seconds: float) -> dict[str, Curve]:
    """Seconds of a call, by name and FLOPs."""
    found: dict[str, list[tuple[float, float]]] = {}
    skipped: set[str] = set()
    for probe in probes(dtype, ranks.device):
        if probe.family in skipped:
            continue
        start = time.monotonic()
        name, size, longer = _deferred_by(probe, ranks)
        points = found.setdefault(name, [])
        points.append((size, max(_LEAST, longer)))
        spent = ranks.most(time.monotonic() - start)
        if len(points) >= _FEWEST and (spent > seconds / _SHARE_OF_TIME or len(points) == _MOST):
            skipped.add(probe.family)
    return {name: tuple(sorted(points)) for name, points in sorted(found.items())}


def _deferred_by(probe: ProbeModel, ranks: CalibrationRanks) -> tuple[str, float, float]:
    """(name, typical FLOPs, seconds) of the calls of a probe whose backward is in two parts; they all have one name."""
    torch.manual_seed(0)
    model, inputs = probe.model().train(), probe.inputs()
    calls = list(deferred_of(record(model, inputs)))
    pending = Pending()

    def split() -> None:
        with Deferral(pending):
            loss = model(*inputs)
        loss.backward()
        pending.run()

    ranks.together()
    longer = _program_difference(ranks, split, lambda: model(*inputs).backward(), model)
    size = math.exp(sum(math.log(node.flops) for node in calls) / len(calls))
    return broader_name(name_of(calls[0])), size, longer / len(calls)
