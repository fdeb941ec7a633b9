"""The fields of `fsdp_config`. `FSDPConfig.read` checks all of them together, before any process group is made.

    sharding_strategy    over a mesh of      whole parameters
    FULL_SHARD           all ranks           go after forward and backward
    SHARD_GRAD_OP        all ranks           stay from forward to backward
    HYBRID_SHARD         replicas x shards   as FULL_SHARD
    _HYBRID_SHARD_ZERO2  replicas x shards   as SHARD_GRAD_OP
    NO_SHARD             replicas            always whole; gradients are averaged

Fields that torch's `fully_shard` has made meaningless are accepted with any value of their type, and told once: `Told`.
Source: the FSDP section of the public documentation of the Trainer that these dictionaries are written for.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner

from smpc.errors import ConfigError, ConfigTypeError, ConfigUnsupportedError

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2", "NO_SHARD")
_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_PRECISIONS = {"fp32": torch.float32, "amp_fp16": torch.float16, "amp_bf16": torch.bfloat16}
_MEANINGLESS = ("activation_checkpointing_reentrant", "limit_all_gathers", "flatten_parameters", "use_orig_params")
_UNSUPPORTED = {
    "keep_low_precision_grads": "gradients stay fp32",
    "te_checkpoint_wrapper": "Transformer Engine is not supported",
    "te_shard_fp8_weight": "Transformer Engine is not supported",
}
_WRAPPING = (  # what says how to wrap, and means nothing where the script has done it
    "sharding_strategy", "data_parallel_shard_degree", "data_parallel_replicate_degree", "process_group", "mixed_precision",
    "activation_checkpointing", "activation_cpu_offload", "backward_prefetch", "forward_prefetch", "backward_prefetch_limit",
    "forward_prefetch_limit", "cpu_offload", "ignored_modules", "sync_module_states",
)  # fmt: skip
_PLANNERS: dict[str, type] = {"load_planner": LoadPlanner, "save_planner": SavePlanner}
_INSTEAD = {"device_mesh": "give data_parallel_shard_degree and data_parallel_replicate_degree"}


@dataclass(frozen=True, slots=True)
class MixedPrecision:
    """The dtypes of computing units, of averaging gradients, and of floating-point buffers; None: no cast."""

    param_dtype: torch.dtype
    reduce_dtype: torch.dtype
    buffer_dtype: torch.dtype | None

    @classmethod
    def of(cls, value: object, precision: str, where: str = "mixed_precision") -> MixedPrecision:
        """FULL, DEFAULT or PURE of a precision (`fp32`, `amp_fp16`, `amp_bf16`), in any case, or a dict of the three dtypes."""
        low, full = _PRECISIONS[precision], torch.float32
        if isinstance(value, str):
            named = {"FULL": (full, full, full), "DEFAULT": (low, full, low), "PURE": (low, low, low)}
            if value.upper() not in named:
                raise ConfigError(f"{where}: expected FULL, DEFAULT, PURE or a dict of dtypes, found {value!r}")
            param, reduce, buffer = named[value.upper()]
            return cls(param, reduce, None if low == full else buffer)  # nothing is mixed: a float64 buffer stays one
        if not isinstance(value, Mapping):
            raise ConfigTypeError(f"{where}: expected FULL, DEFAULT, PURE or a dict of dtypes, found {value!r}")
        names = tuple(each.name for each in fields(cls))
        wrong = [
            f"{where}.{name}: expected {', '.join(_DTYPES)} for one of {', '.join(names)}, found {dtype!r}"
            for name, dtype in value.items()
            if name not in names or dtype not in _DTYPES
        ]
        if wrong:
            raise ConfigError("\n".join(wrong))
        param, reduce = (_DTYPES[value.get(name, "fp32")] for name in names[:2])
        return cls(param, reduce, _DTYPES[value["buffer_dtype"]] if "buffer_dtype" in value else None)


@dataclass(frozen=True, slots=True)
class FSDPConfig:
    """The fields of `fsdp_config`; `read` makes one from a dictionary. docs/trainer.md has the meaning of each field."""

    sharding_strategy: str = "FULL_SHARD"
    data_parallel_shard_degree: int = -1
    data_parallel_replicate_degree: int | None = None
    process_group: Any = None
    mixed_precision: Any = "DEFAULT"
    keep_low_precision_grads: bool = False
    activation_checkpointing: bool = False
    activation_checkpointing_reentrant: bool = True
    activation_cpu_offload: bool = False
    auto_wrap: bool = True
    backward_prefetch: str = "BACKWARD_POST"
    forward_prefetch: bool = False
    backward_prefetch_limit: int = 1
    forward_prefetch_limit: int = 1
    limit_all_gathers: bool = False
    flatten_parameters: bool = True
    use_orig_params: bool = True
    cpu_offload: bool = False
    ignored_modules: Any = None
    sync_module_states: bool = False
    state_dict_type: str = "full"
    load_monolith_rank0_only: bool = False
    load_planner: Any = None
    save_planner: Any = None
    sharded_ckpt_prefix_dir: str = "ep{epoch}-ba{batch}"
    te_checkpoint_wrapper: bool = False
    te_shard_fp8_weight: bool = False
    verbose: bool = False
    told: tuple[str, ...] = field(default=(), compare=False)  # what is accepted without effect

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> FSDPConfig:
        """Check a dictionary. Raises ConfigError with a line for each mistake: ConfigTypeError, if all are of types."""
        if not isinstance(given, Mapping):
            raise ConfigTypeError(f"fsdp_config: expected a dict, found {given!r}")
        if isinstance(given.get("ignored_modules"), Iterable):  # perhaps once alone
            given = {**given, "ignored_modules": list(given["ignored_modules"])}
        known = {each.name: each.default for each in fields(cls) if each.name != "told"}
        faults: list[tuple[type[ConfigError], str]] = []
        for name, value in given.items():
            faults += _field_faults(name, value, known)
        if not faults:
            faults += _field_contradictions(given)
        if faults:
            kinds = {kind for kind, _ in faults}
            kind = kinds.pop() if len(kinds) == 1 else ConfigError
            raise kind("\n".join(f"fsdp_config: {text}" for _, text in faults))
        values = dict(given)
        for name in ("sharding_strategy", "backward_prefetch"):
            if name in values:
                values[name] = values[name].upper()
        told = tuple(
            f"fsdp_config: {name} has no effect: fully_shard knows no such choice"
            for name in _MEANINGLESS
            if name in given
        )
        if values.get("backward_prefetch", "BACKWARD_POST") == "BACKWARD_POST" and "backward_prefetch" in given:
            told += ("fsdp_config: backward_prefetch: BACKWARD_POST is done as BACKWARD_PRE",)
        return cls(**values, told=told)

    @property
    def is_hybrid(self) -> bool:
        """Whether there are replicas of the shards."""
        return "HYBRID" in self.sharding_strategy or (self.data_parallel_replicate_degree or 1) > 1

    @property
    def keeps_whole(self) -> bool:
        """Whether parameters stay whole from forward to backward."""
        return self.sharding_strategy in ("SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2", "NO_SHARD")

    def degrees(self, world_size: int, local_size: int) -> tuple[int, int]:
        """(replicas, shards) on so many ranks, of which `local_size` are on a node. Raises ConfigError where they do not fit."""
        if self.sharding_strategy == "NO_SHARD":
            return world_size, 1
        replicas, shards = self.data_parallel_replicate_degree, self.data_parallel_shard_degree
        if replicas is None and shards == -1:
            shards = local_size if self.is_hybrid else world_size
        if replicas in (None, -1):
            replicas = world_size // shards if shards > 0 and not world_size % shards else 0
        elif shards == -1:
            shards = world_size // replicas if replicas and not world_size % replicas else 0
        if (replicas or 0) * shards != world_size or shards < 1:
            raise ConfigError(
                f"fsdp_config: expected data_parallel_replicate_degree x data_parallel_shard_degree = {world_size} processes, found "
                f"{self.data_parallel_replicate_degree} x {self.data_parallel_shard_degree} "
                f"({self.sharding_strategy}, {local_size} on a node)"
            )
        return replicas or 1, shards


def _field_faults(name: str, value: Any, known: Mapping[str, Any]) -> list[tuple[type[ConfigError], str]]:
    """What is wrong with a field of the configuration."""
    if name not in known:
        near = difflib.get_close_matches(str(name), known, 1)
        advice = _INSTEAD.get(name) or (f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}")
        return [(ConfigError, f"unknown field {name!r}; {advice}")]
    default = known[name]
    expected: tuple[type, ...] = () if default is None or name == "mixed_precision" else (type(default),)
    if name == "data_parallel_replicate_degree":
        expected = (int, type(None))
    if expected and (not isinstance(value, expected) or (isinstance(value, bool) and bool not in expected)):
        return [(ConfigTypeError, f"{name}: expected {expected[0].__name__}, found {value!r}")]
    if name in _PLANNERS and value is not None and not isinstance(value, _PLANNERS[name]):
        kind = f"torch.distributed.checkpoint.{_PLANNERS[name].__name__}"
        return [(ConfigTypeError, f"{name}: expected a {kind}, found {value!r}")]
    if name == "ignored_modules" and not _are_modules(value):
        return [(ConfigTypeError, f"ignored_modules: expected a list of modules, found {value!r}")]
    if name in _UNSUPPORTED and value:
        return [(ConfigUnsupportedError, f"{name}: {_UNSUPPORTED[name]}")]
    choices = {
        "sharding_strategy": STRATEGIES,
        "backward_prefetch": ("BACKWARD_PRE", "BACKWARD_POST", "NONE"),
    }.get(name)
    if choices and value.upper() not in choices:
        return [(ConfigError, f"{name}: expected one of {', '.join(choices)}, found {value!r}")]
    if name == "state_dict_type" and value not in ("full", "sharded"):
        why = "local is deprecated, use sharded" if value == "local" else f"found {value!r}"
        return [(ConfigError, f"state_dict_type: expected full or sharded; {why}")]
    if (
        name.endswith(("_limit", "_degree"))
        and value is not None
        and value < 1
        and not (value == -1 and "degree" in name)
    ):
        return [(ConfigError, f"{name}: expected at least 1, found {value}")]
    if name == "mixed_precision":
        try:
            MixedPrecision.of(value, "fp32")
        except ConfigError as error:
            return [(type(error), str(error))]
    return []


def _are_modules(value: object) -> bool:
    return value is None or (isinstance(value, list) and all(isinstance(each, nn.Module) for each in value))


def _plain_config_value(value: Any) -> Any:
    return value.upper() if isinstance(value, str) else value


def _field_contradictions(given: Mapping[str, Any]) -> list[tuple[type[ConfigError], str]]:
    """What is wrong with fields beside each other."""
    found: list[str] = []
    is_full = given.get("state_dict_type", "full") == "full"
    degrees = [name for name in ("data_parallel_shard_degree", "data_parallel_replicate_degree") if name in given]
    if given.get("process_group") is not None and degrees:
        found.append(f"process_group: expected none beside {' and '.join(degrees)}")
    if given.get("load_monolith_rank0_only") and not (is_full and given.get("sync_module_states")):
        found.append("load_monolith_rank0_only: expected state_dict_type full and sync_module_states True beside it")
    if is_full:
        planners = [name for name in _PLANNERS if given.get(name) is not None]
        found += [f"{name}: expected state_dict_type sharded beside it, found full" for name in planners]
    if not given.get("auto_wrap", True):
        defaults = {each.name: each.default for each in fields(FSDPConfig)}
        chosen = [name for name in _WRAPPING if name in given and _plain_config_value(given[name]) != defaults[name]]
        found += [f"{name}: expected auto_wrap True beside it" for name in chosen]
    return [(ConfigError, text) for text in found]
