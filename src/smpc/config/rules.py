"""The rules between the keys of a configuration: which settings require, exclude or limit each other.

`broken_rules` gets the given keys whose values are valid by themselves, and returns the violations of the rules between them, a line
each:

    tensor_parallel_degree: 2 requires ddp: true, found ddp: false
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from smpc.config.numbers import shown
from smpc.kernels.setting import AUTO, faults_of

SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-h2", "zb-v", "list")
MODULES = "modules"
PLANS = (MODULES, "auto", "huggingface")  # the named plans of tensor parallelism

Sound = Mapping[str, Any]
Where = Callable[[str], str]  # key -> " (the source it comes from)", or ""


def broken_rules(sound: Sound, where: Where) -> Iterator[str]:
    """The violations of the rules between the given keys."""
    yield from (f"{fault}{where('kernels')}" for fault in faults_of(sound.get("kernels", AUTO)))
    schedule = sound.get("schedule", "")
    if schedule not in ("", *SCHEDULES) and not schedule.endswith(".csv"):
        expected = f"{', '.join(SCHEDULES)} or a .csv file"
        yield f"schedule: expected one of {expected}, found {shown(schedule)}{where('schedule')}"
    yield from _tensor_rules(sound, where)
    if sound.get("tensor_parallel_degree", 1) > 1 and not sound.get("ddp", False):
        yield f"tensor_parallel_degree: {sound['tensor_parallel_degree']} requires ddp: true, found ddp: false"
    yield from _context_rules(sound, where)
    yield from _expert_rules(sound)
    if sound.get("shard_optimizer_state", False) and not sound.get("ddp", False):
        yield "shard_optimizer_state: true requires ddp: true, found ddp: false"
    yield from _sharding_rules(sound)
    if sound.get("bf16", False):
        for name in ("fp16", "fp16_params"):
            if sound.get(name, False):
                yield f"{name}: true and bf16: true exclude each other; keep one"
    yield from _partition_rules(sound)


def _tensor_rules(sound: Sound, where: Where) -> Iterator[str]:
    """Rules of tensor parallelism."""
    plan = sound.get("tensor_parallel_plan", MODULES)
    if isinstance(plan, str) and plan not in PLANS and not plan.endswith(".json"):
        yield (
            f"tensor_parallel_plan: expected one of {', '.join(PLANS)}, styles by name pattern, or a .json file of such, found "
            f"{shown(plan)}{where('tensor_parallel_plan')}"
        )
    elif plan != MODULES and sound.get("tensor_parallel_degree", 1) > 1 and not sound.get("prescaled_batch", False):
        yield (
            f"tensor_parallel_plan: {plan} requires prescaled_batch: true, as all ranks of a tensor-parallel group compute on the same "
            f"batch, found prescaled_batch: false{where('tensor_parallel_plan')}"
        )
    if plan == MODULES and sound.get("tensor_parallel_outputs", "") and sound.get("context_parallel_degree", 1) == 1:
        yield (
            f"tensor_parallel_outputs: {sound['tensor_parallel_outputs']} requires a tensor_parallel_plan, found {MODULES}"
            f"{where('tensor_parallel_outputs')}"
        )


def _context_rules(sound: Sound, where: Where) -> Iterator[str]:
    """Rules of context parallelism."""
    degree, plan = sound.get("context_parallel_degree", 1), sound.get("tensor_parallel_plan", MODULES)
    if degree > 1 and not sound.get("ddp", False):
        yield f"context_parallel_degree: {degree} requires ddp: true, found ddp: false"
    if degree > 1 and sound.get("tensor_parallel_degree", 1) > 1 and plan != "auto":
        yield (
            f"context_parallel_degree: {degree} beside tensor_parallel_degree: {sound['tensor_parallel_degree']} requires "
            f"tensor_parallel_plan: auto, as only the compiler shares sequences and operations together, found {plan}"
            f"{where('tensor_parallel_plan')}"
        )


def _expert_rules(sound: Sound) -> Iterator[str]:
    """Rules of expert parallelism."""
    degree = sound.get("expert_parallel_degree", 1)
    if degree == 1:
        return
    if not sound.get("ddp", False):
        yield f"expert_parallel_degree: {degree} requires ddp: true, found ddp: false"


def _sharding_rules(sound: Sound) -> Iterator[str]:
    """Rules of sharded parameters."""
    degree = sound.get("sharded_data_parallel_degree", 1)
    asked = ["fully_shard: true"] if sound.get("fully_shard", False) else []
    for what in [*asked, *([f"sharded_data_parallel_degree: {degree}"] if degree > 1 else [])]:
        if not sound.get("ddp", False):
            yield f"{what} requires ddp: true, found ddp: false"
        if sound.get("shard_optimizer_state", False):
            yield f"{what} and shard_optimizer_state: true exclude each other; keep one"


def _partition_rules(sound: Sound) -> Iterator[str]:
    """Rules of a manual partition."""
    by_hand = sound.get("auto_partition", True) is False
    if by_hand and "default_partition" not in sound:
        yield "auto_partition: false requires default_partition, where modules not placed by hand go"
    if by_hand and sound.get("virtual_pipeline_degree", 0):
        yield (
            f"virtual_pipeline_degree: {sound['virtual_pipeline_degree']} requires auto_partition: true; by hand, a rank has "
            "the pieces that smp.partition gives it"
        )
    degree = sound.get("pipeline_parallel_degree", 1)
    if sound.get("default_partition", 0) > degree - 1:
        yield (
            f"default_partition: expected at most pipeline_parallel_degree - 1 = {degree - 1}, "
            f"found {sound['default_partition']}"
        )
