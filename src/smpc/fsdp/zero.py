"""A ZeRO configuration, as DeepSpeed reads it, in terms of FSDP. DeepSpeed is never imported.

    zero_optimization.stage    0: replicas    1, 2: SHARD_GRAD_OP    3: FULL_SHARD
    zero_hpz_partition_size    the shard degree of HYBRID_SHARD

Batch sizes must agree with what the script gives; keys that tune DeepSpeed's own communication have no effect and get one warning;
unsupported keys that would change the training are an error with their names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from smpc.errors import ConfigError, ConfigTypeError, ConfigUnsupportedError

_WITHOUT_EFFECT = (
    "steps_per_print", "wall_clock_breakdown", "zero_allow_untested_optimizer", "prescale_gradients", "gradient_predivide_factor",
    "communication_data_type", "disable_allgather", "dump_state", "tensorboard", "wandb", "csv_monitor", "memory_breakdown",
)  # fmt: skip
_ZERO_WITHOUT_EFFECT = (
    "allgather_partitions", "allgather_bucket_size", "overlap_comm", "reduce_scatter", "reduce_bucket_size", "contiguous_gradients",
    "round_robin_gradients", "sub_group_size", "zero_hpz_partition_size", "load_from_fp32_weights", "ignore_unused_parameters",
)  # fmt: skip
_SCALES = ("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale")
_SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


@dataclass(frozen=True, slots=True)
class ZeroPlan:
    """`fsdp`: what `fsdp_config` says the same, None for replicas. `microbatch_size`: None, if nothing says so.

    `scale`: what the configuration says of fp16's losses, for `LossScale.of_zero`, which has the defaults of the others.
    """

    fsdp: dict[str, Any] | None
    precision: str | None
    microbatch_size: int | None
    clipping: float | None
    scale: dict[str, float]
    told: tuple[str, ...]


def translate(given: Mapping[str, Any], *, batch_size: int | None, world_size: int, precision: str | None) -> ZeroPlan:
    """The settings from a DeepSpeed configuration, for batches of `batch_size` samples on each of `world_size` ranks.

    `given`: its dictionary. `precision`: the script's choice, which the configuration must agree with; None: there is none. Raises
    ConfigError with a line for each contradiction and each key that is not supported.
    """
    if not isinstance(given, Mapping):
        raise ConfigTypeError(f"deepspeed_config: expected a dict, found {given!r}")
    faults: list[str] = []
    unsupported: list[str] = []
    told: list[str] = []
    zero = given.get("zero_optimization", {})
    zero = zero if isinstance(zero, Mapping) else {"stage": zero}
    for name in given:
        if name in ("optimizer", "scheduler"):
            faults.append(f"{name}: give it to the Trainer, as {name}s")
        elif name in _WITHOUT_EFFECT:
            told.append(f"deepspeed_config: {name} has no effect")
        elif name not in (*_SIZES, "fp16", "bf16", "gradient_clipping", "zero_optimization"):
            unsupported.append(f"{name} is not supported")
    for name, value in zero.items():
        if name in _ZERO_WITHOUT_EFFECT or name.startswith("stage3_"):
            told += (
                [f"deepspeed_config: zero_optimization.{name} has no effect"]
                if name != "zero_hpz_partition_size"
                else []
            )
        elif name != "stage" and value:
            unsupported.append(f"zero_optimization.{name} is not supported")
    chosen = _zero_precision(given, precision, faults)
    microbatch = _zero_microbatch(given, batch_size, world_size, faults)
    fsdp = _zero_sharding(zero, faults)
    clipping = given.get("gradient_clipping")
    if clipping is not None and (
        isinstance(clipping, bool) or not isinstance(clipping, int | float) or not 0 <= clipping < math.inf
    ):
        faults.append(f"gradient_clipping: expected a number of at least 0, found {clipping!r}")
    if faults or unsupported:
        kind = ConfigError if faults else ConfigUnsupportedError
        raise kind("\n".join(f"deepspeed_config: {line}" for line in (*faults, *unsupported)))
    scale = {name: float(given["fp16"][name]) for name in _SCALES if name in given.get("fp16", {})}
    return ZeroPlan(fsdp, chosen, microbatch, float(clipping) if clipping else None, scale, tuple(told))


def _zero_precision(given: Mapping[str, Any], chosen: str | None, faults: list[str]) -> str | None:
    """The precision that a DeepSpeed configuration asks for."""
    enabled = [name for name in ("fp16", "bf16") if isinstance(given.get(name), Mapping) and given[name].get("enabled")]
    for name in ("fp16", "bf16"):
        if name in given and not isinstance(given[name], Mapping):
            faults.append(f"{name}: expected a dict, found {given[name]!r}")
    known = ("enabled", *_SCALES, "auto_cast")
    for name in ("fp16", "bf16"):
        own = given[name] if isinstance(given.get(name), Mapping) else {}
        faults += [f"{name}.{key}: unknown; known are {', '.join(known)}" for key in own if key not in known]
        if not isinstance(own.get("enabled", False), bool):
            faults.append(f"{name}.enabled: expected True or False, found {own['enabled']!r}")
        for key in _SCALES:
            value = own.get(key, 1)
            if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
                faults.append(f"{name}.{key}: expected a number of at least 0, found {value!r}")
    if len(enabled) > 1:
        faults.append("fp16, bf16: expected one of them enabled, found both")
    disabled = [f"amp_{name}" for name in ("fp16", "bf16") if name in given and name not in enabled]
    wanted = f"amp_{enabled[0]}" if enabled else "fp32" if "amp_fp16" in disabled and chosen is None else None
    if enabled and chosen and wanted != chosen:
        faults.append(f"{enabled[0]}: expected it to agree with precision, found enabled and precision {chosen!r}")
    if chosen in disabled:
        faults.append(
            f"{chosen.removeprefix('amp_')}: expected it to agree with precision, found not enabled and precision {chosen!r}"
        )
    return wanted or chosen


def _zero_microbatch(given: Mapping[str, Any], batch: int | None, world: int, faults: list[str]) -> int | None:
    """The size of a microbatch that a DeepSpeed configuration asks for."""
    values = {name: given[name] for name in _SIZES if given.get(name) not in (None, "auto")}
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            faults.append(f"{name}: expected a whole number of at least 1, found {value!r}")
            return None
    sizes: list[int | None] = [values.get(name) for name in _SIZES]
    total, micro, steps = sizes
    if total is not None and batch is not None and total != batch * world:
        faults.append(
            f"train_batch_size: expected {batch * world} (batches of {batch} x {world} processes), found {total}"
        )
    if batch is None and micro is None and steps is not None:
        faults.append("gradient_accumulation_steps: expected a data loader with a batch_size to divide, found none")
        return None
    if batch is not None and micro is None and steps is not None:
        if batch % steps:
            faults.append(f"gradient_accumulation_steps: expected a divisor of the batch of {batch}, found {steps}")
            return None
        return batch // steps
    if batch is not None and micro is not None and batch % micro:
        faults.append(f"train_micro_batch_size_per_gpu: expected a divisor of the batch of {batch}, found {micro}")
    elif batch is not None and micro is not None and steps is not None and micro * steps != batch:
        faults.append(
            f"gradient_accumulation_steps: expected {batch // micro} (batch {batch} / microbatch {micro}), found {steps}"
        )
    return micro


def _zero_sharding(zero: Mapping[str, Any], faults: list[str]) -> dict[str, Any] | None:
    """The sharding that a DeepSpeed configuration asks for."""
    stage, parts = zero.get("stage", 0), zero.get("zero_hpz_partition_size", 1)
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        faults.append(f"zero_optimization.stage: expected 0, 1, 2 or 3, found {stage!r}")
        return None
    if isinstance(parts, bool) or not isinstance(parts, int) or parts < 1 or (parts > 1 and stage != 3):
        faults.append(
            f"zero_optimization.zero_hpz_partition_size: expected at least 1, above 1 in stage 3 alone, found {parts!r}"
        )
        return None
    if stage == 0:
        return None
    if stage < 3:
        return {"sharding_strategy": "SHARD_GRAD_OP"}
    if parts > 1:
        return {"sharding_strategy": "HYBRID_SHARD", "data_parallel_shard_degree": parts}
    return {"sharding_strategy": "FULL_SHARD"}
