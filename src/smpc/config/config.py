"""The configuration: every parameter with its meaning, type, default, bounds and options.

Terms
    key      the name of a parameter, as a user writes it; a field of `Config`
    source   a mapping that sets keys. Later sources override earlier ones: a file or dict given by the user,
             then `overrides` (command-line options), then the JSON object in the environment variable
             SM_HP_MP_PARAMETERS

What a source may look like is said in `smpc.config.sources`, the rules between keys are in `smpc.config.rules`.

    >>> config = Config.parse({"partitions": 2, "microbatches": 4, "ddp": True})
    >>> config.pipeline_parallel_degree, config.active_microbatches, config.memory_weight
    (2, 4, 0.8)

All violations of one configuration are reported together, one line each: `ConfigTypeError` if a type is among
them, else `ConfigError`. A valid setting whose feature does not exist yet raises `ConfigUnsupportedError` (a
NotImplementedError); one that has no effect here, by nature, is accepted with a warning that says why.
Nothing is read from the environment unless it is passed in.

The keys, their defaults and their rules are those of the public configuration reference of SMP v1
(smdistributed-modelparallel), but for `schedule`, `virtual_pipeline_degree`, `tensor_parallel_plan`,
`tensor_parallel_outputs`, the timeouts, `program_cache_size`, `kernels`, `nan_policy` and `fully_shard`, which are additions.
"""

from __future__ import annotations

import dataclasses
import difflib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from smpc.config.rules import MODULES, broken_rules
from smpc.config.sources import parse_json, read_file, unwrap
from smpc.errors import ConfigError, ConfigTypeError, ConfigUnsupportedError

ENVIRONMENT_VARIABLE = "SM_HP_MP_PARAMETERS"
PLACEMENT_STRATEGIES = ("cluster", "spread", "PDT", "PTD", "DPT", "DTP", "TPD", "TDP")
_ALIASES = {"partitions": "pipeline_parallel_degree"}
_KINDS: dict[str, type] = {"bool": bool, "int": int, "float": float, "str": str, "str | Mapping[str, str]": str}


@dataclass(frozen=True, slots=True)
class Key:
    """What is known about a parameter beside its name, type and default.

    `unsupported` says what to do instead of a value other than the default; `no_effect` says why such a value
    changes nothing. `derived` is the text of a default that is no constant of the key's type; None is then
    accepted and means that default.
    """

    meaning: str
    minimum: float | None = None
    maximum: float | None = None
    options: tuple[str, ...] = ()
    unsupported: str = ""
    no_effect: str = ""
    derived: str = ""


def _key(default: Any, meaning: str, **rules: Any) -> Any:
    return dataclasses.field(default=default, metadata={"key": Key(meaning, **rules)})


_NO_SHARDING = "every rank keeps whole parameters, gradients and optimizer state: leave it out"
_TRANSLATED = "distributed modules start from the weights of the originals wherever those can be translated"
_ONE_PLAN = "a plan depends on the model and the configuration alone, so the same run gets the same partition again"


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """One checked, immutable configuration. Build it with `Config.parse` or `Config.from_file`.

    The constructor takes the same keys and checks them the same way; None stands for a derived default.
    Every field is the resolved value: `memory_weight` and `active_microbatches` are always numbers.
    """

    pipeline_parallel_degree: int = dataclasses.field(
        metadata={"key": Key("Number of pipeline ranks that the model is split over; `partitions` is an alias", 1)}
    )
    microbatches: int = _key(1, "Microbatches that a batch is split into; it must divide the batch size", minimum=1)
    pipeline: str = _key("interleaved", "The pipeline schedule", options=("interleaved", "simple"))
    schedule: str = _key(
        "",
        "The pipeline schedule by a name of docs/schedules.md, or a .csv file in the format of "
        "torch.distributed.pipelining; it wins over `pipeline`. Empty: what `pipeline` says",
    )
    virtual_pipeline_degree: int = _key(
        0,
        "Number of pieces of the model on each pipeline rank. 0: what the schedule needs, which is 2 for "
        "interleaved-1f1b and zb-v, what a file has, else 1",
        minimum=0,
    )
    start_timeout: float = _key(
        1800.0,
        "Seconds that processes wait for each other in smp.init, and that a step may take which compiles",
        minimum=1.0,
    )
    step_timeout: float = _key(
        1800.0,
        "Seconds that a step may take, the wait for the other ranks included, before the rank that stalls is "
        "named and all end",
        minimum=1.0,
    )
    checkpoint_timeout: float = _key(1800.0, "Seconds that gathering, saving or loading of state may take", minimum=1.0)
    program_cache_size: int = _key(
        32,
        "Most programs that are kept for inputs of different shapes; beyond it, the one that has not run for the longest "
        "time is compiled again when it is needed",
        minimum=2,
    )
    nan_policy: str = _key(
        "raise",
        "What happens after a step in which a loss was NaN or infinite, on all ranks alike: `raise` an error, "
        "`skip` the update of the parameters, or `ignore` it",
        options=("raise", "skip", "ignore"),
    )
    optimize: str = _key(
        "memory",
        "What to save: `speed` duplicates activations over tensor-parallel ranks, `memory` communicates more",
        options=("memory", "speed"),
    )
    placement_strategy: str = _key(
        "cluster",
        "How D (reduced data), P (pipeline) and T (tensor parallelism) map to ranks, the right-most letter "
        "varying fastest; `cluster` is DPT, `spread` is TPD",
        options=PLACEMENT_STRATEGIES,
    )
    auto_partition: bool = _key(
        True, "Whether the partitioner chooses the cut, or smp.partition and smp.set_partition do"
    )
    default_partition: int = _key(
        None, "Partition of the modules that no smp.partition context places", minimum=0, derived="0"
    )
    contiguous: bool = _key(
        True,
        "Whether each partition is a connected part of the graph (TensorFlow)",
        no_effect="it is a parameter for TensorFlow; pipeline stages follow the order of execution",
    )
    horovod: bool = _key(
        False,
        "Whether Horovod does the data parallelism (TensorFlow)",
        unsupported="Horovod is for TensorFlow: use ddp: true",
    )
    memory_weight: float = _key(
        None,
        "Weight of balancing memory, against balancing computation, when the model is cut",
        minimum=0.0,
        maximum=1.0,
        derived="0.2 if optimize is speed, else 0.8",
    )
    ddp: bool = _key(False, "Whether there are data-parallel replicas; required when there is more than one")
    fully_shard: bool = _key(
        False,
        "Whether replicas hold parts of each stage's parameters, gradients and optimizer state, and gather parameters for a step "
        "(torch's fully_shard); requires ddp and pipeline_parallel_degree above 1",
    )
    active_microbatches: int = _key(
        None,
        "Most microbatches in execution at a time; never more than `microbatches`",
        minimum=1,
        derived="pipeline_parallel_degree + 2",
    )
    deterministic_server: bool = _key(
        False,
        "Whether all data-parallel ranks execute in the same order",
        no_effect="programs fix the order of execution when they are compiled, so it is always the same",
    )
    offload_activations: bool = _key(
        False,
        "Whether activations of checkpointed modules wait for their backward pass in CPU memory",
    )
    activation_loading_horizon: int = _key(
        4,
        "How many pipeline tasks ahead of its backward pass an offloaded activation is loaded back",
        minimum=1,
    )
    kernels: str = _key(
        "auto",
        "Which fused operations of docs/kernels.md replace what the model computes: `auto` for those known to be quicker "
        "on the device, `off`, or names separated by commas",
    )
    tensor_parallel_degree: int = _key(
        1,
        "Number of ranks that a tensor-parallel module is split over",
        minimum=1,
    )
    tensor_parallel_plan: str | Mapping[str, str] = _key(
        MODULES,
        "What tensor-parallel ranks split: `modules`, those that smp.tensor_parallelism declares; or any model, by the compiler: `auto`, "
        "`huggingface` (the model's own plan), or styles by name pattern, as they are or a .json file (docs/tensor_parallel_compiler.md)",
    )
    tensor_parallel_outputs: str = _key(
        "",
        "With a tensor_parallel_plan, names of the tensors that the model returns, such as `loss`, separated by commas; None in place of "
        "others, so that logits need not be gathered. Empty: all",
    )
    tensor_parallel_seed: int = _key(
        0, "Seed of the random numbers that tensor-parallel modules draw in training (dropout)", minimum=0
    )
    prescaled_batch: bool = _key(
        False,
        "Whether the ranks of a tensor-parallel group get the same batch (true of a group of one anyway)",
    )
    fp16: bool = _key(False, "Train in float16, with float32 masters and loss scaling")
    bf16: bool = _key(False, "Train in bfloat16, with float32 masters")
    fp16_params: bool = _key(False, "Create the parameters of distributed modules in float16")
    shard_optimizer_state: bool = _key(
        False,
        "Split optimizer state and masters over the data-parallel ranks that hold the same parameters, balanced by size; requires ddp",
    )
    sharded_data_parallel_degree: int = _key(
        1,
        "Number of ranks that parameters and optimizer state are split over",
        minimum=1,
        unsupported=_NO_SHARDING,
    )
    sdp_reduce_bucket_size: int = _key(
        500_000_000,
        "Elements in a gradient bucket of sharded data parallelism",
        minimum=1,
        unsupported=_NO_SHARDING,
    )
    sdp_param_persistence_threshold: int = _key(
        1_000_000, "Parameters of fewer elements are not sharded", minimum=0, unsupported=_NO_SHARDING
    )
    sdp_max_live_parameters: int = _key(
        1_000_000_000, "Most elements of gathered parameters at a time", minimum=1, unsupported=_NO_SHARDING
    )
    sdp_hierarchical_allgather: bool = _key(
        True, "Gather sharded parameters between hosts first, then inside them", unsupported=_NO_SHARDING
    )
    sdp_gradient_clipping: float = _key(
        1.0,
        "Norm that gradients are clipped to under sharded data parallelism",
        minimum=0.0,
        unsupported=_NO_SHARDING,
    )
    skip_tracing: bool = _key(
        False,
        "Cut the model by parameter sizes and the order of its modules alone, and not by what is recorded of them (recording allocates no "
        "parameters, and programs are made from it, so it is done all the same)",
    )
    delayed_parameter_initialization: bool = _key(
        False,
        "Create the parameters of what is made in smp.model_creation after the model is cut, on the rank that owns them",
    )
    checkpoint_attentions: bool = _key(
        False,
        "Recompute attention in the backward pass",
        unsupported="use torch.utils.checkpoint inside the model, and leave it out",
    )
    load_partition: bool = _key(False, "Load the partition from `partition_file`", no_effect=_ONE_PLAN)
    partition_file: str = _key(None, "File that holds a partition", derived="no file", no_effect=_ONE_PLAN)
    ddp_port: int = _key(
        0,
        "Port of a separate rendezvous for data parallelism; 0 for none",
        minimum=0,
        maximum=65535,
        no_effect="all groups are made from the launcher's one rendezvous (MASTER_PORT)",
    )
    ddp_dist_backend: str = _key(
        "auto",
        "torch.distributed backend that smp.init starts; `auto` is nccl where there is a GPU, else gloo",
        options=("auto", "nccl", "gloo"),
    )
    static_mode: bool = _key(
        False,
        "Record the schedule of the first step and reuse it",
        no_effect="the schedule is always fixed when programs are compiled",
    )
    fast_mode: bool = _key(
        False,
        "Send values directly between the ranks that use them",
        no_effect="values always travel directly between the stages that use them",
    )
    _match_weights: bool = _key(False, "Give distributed modules the weights of the originals", no_effect=_TRANSLATED)
    _fp32_grad_accumulation: bool = _key(
        False,
        "Whether gradients accumulate in float32 under fp16 and bf16, over microbatches, steps and replicas",
    )

    def __post_init__(self) -> None:
        """Check every rule, then replace None by the default that it stands for."""
        values = {name: getattr(self, name) for name in KEYS}
        given = {name: value for name, value in values.items() if value is not None}
        _Report().check(given).raise_if_any()
        degree = self.pipeline_parallel_degree
        derived = {
            "default_partition": given.get("default_partition", 0),
            "memory_weight": float(given.get("memory_weight", 0.2 if self.optimize == "speed" else 0.8)),
            "active_microbatches": min(given.get("active_microbatches", degree + 2), self.microbatches),
            "partition_file": given.get("partition_file", ""),
        }
        if isinstance(self.tensor_parallel_plan, Mapping):
            derived["tensor_parallel_plan"] = dict(self.tensor_parallel_plan)  # not the caller's own
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    @classmethod
    def parse(
        cls,
        parameters: Mapping[str, Any],
        *,
        overrides: Mapping[str, Any] | None = None,
        environ: Mapping[str, str] | None = None,
        origin: str = "config",
        warn: bool = True,
    ) -> Config:
        """Build a configuration from its sources.

        `parameters`: the user's dict, flat or nested. `overrides`: keys that win over it. `environ`: an
        environment (os.environ) whose SM_HP_MP_PARAMETERS wins over both; None reads no environment.
        `origin`: what messages call `parameters`. `warn`: whether to warn of settings without effect here.
        Raises ConfigError, ConfigTypeError or ConfigUnsupportedError, each listing everything that is wrong.
        """
        report = _Report()
        report.add_source(origin, parameters)
        report.add_source("overrides", overrides or {})
        text = (environ or {}).get(ENVIRONMENT_VARIABLE, "")
        if text.strip():
            report.add_source(ENVIRONMENT_VARIABLE, parse_json(text, ENVIRONMENT_VARIABLE))
        report.check(report.values).raise_if_any()
        config = cls(**report.values)
        ignored = [
            f"{name}: {value!r} has no effect here: {KEYS[name].no_effect}"
            for name, value in report.values.items()
            if KEYS[name].no_effect and value != _FIELDS[name].default
        ]
        if config._fp32_grad_accumulation and not (config.fp16 or config.bf16):
            ignored.append("_fp32_grad_accumulation: True has no effect here: it is for fp16: true and bf16: true")
        if warn and ignored:
            warnings.warn("\n".join(ignored), UserWarning, stacklevel=2)
        return config

    @classmethod
    def from_file(
        cls,
        path: str | Path,
        *,
        overrides: Mapping[str, Any] | None = None,
        environ: Mapping[str, str] | None = None,
        warn: bool = True,
    ) -> Config:
        """Build a configuration from a `.json` or `.toml` file; all else is as in `parse`."""
        return cls.parse(read_file(path), overrides=overrides, environ=environ, origin=str(path), warn=warn)


_FIELDS: dict[str, dataclasses.Field[Any]] = {field.name: field for field in dataclasses.fields(Config)}
KEYS: dict[str, Key] = {name: cast(Key, field.metadata["key"]) for name, field in _FIELDS.items()}


class _Report:
    """Collects sources and everything that is wrong with them."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.types: list[str] = []
        self.errors: list[str] = []
        self.unsupported: list[str] = []
        self._origins: dict[str, str] = {}

    def add_source(self, origin: str, source: Any) -> None:
        """Merge a source over the earlier ones, resolving aliases inside it."""
        spelt: dict[str, str] = {}
        for written, value in unwrap(source, origin).items():
            name = _ALIASES.get(written, written)
            if name not in KEYS:
                self.errors.append(f"Unrecognized config parameter {written}{_closest(written)} ({origin})")
            elif name in spelt and self.values[name] != value:
                self.errors.append(
                    f"{name}: {spelt[name]} = {self.values[name]!r} and {written} = {value!r} set the same "
                    f"parameter to different values; keep one ({origin})"
                )
            else:
                spelt[name] = written
                self.values[name] = value
                self._origins[name] = origin

    def check(self, values: Mapping[str, Any]) -> _Report:
        """Check types, bounds, options and dependencies of the given values."""
        given = {name: v for name, v in values.items() if v is not None or not KEYS[name].derived}
        if "pipeline_parallel_degree" not in given:
            self.errors.append(
                "pipeline_parallel_degree: required, the number of pipeline ranks to split the model over "
                f"(or its alias, partitions); set it in the configuration or in {ENVIRONMENT_VARIABLE}"
            )
        sound = {name: value for name, value in given.items() if self._check_value(name, value)}
        self.errors.extend(broken_rules(sound, self._where))
        for name, value in sound.items():
            if KEYS[name].unsupported and value != _FIELDS[name].default:
                where = self._where(name)
                self.unsupported.append(f"{name}: {value!r} is not implemented yet; {KEYS[name].unsupported}{where}")
        return self

    def raise_if_any(self) -> None:
        """Raise one error that lists every violation."""
        if self.types:
            raise ConfigTypeError("\n".join(self.types + self.errors))
        if self.errors:
            raise ConfigError("\n".join(self.errors))
        if self.unsupported:
            raise ConfigUnsupportedError("\n".join(self.unsupported))

    def _check_value(self, name: str, value: Any) -> bool:
        """Whether a value has the right type and lies within its bounds and options; reports it if not."""
        if isinstance(value, Mapping) and "Mapping" in str(_FIELDS[name].type):
            return self._check_texts(name, value)
        key, kind = KEYS[name], _KINDS[str(_FIELDS[name].type)]
        accepted: tuple[type, ...] = (int, float) if kind is float else (kind,)
        fits = isinstance(value, accepted) and (kind is bool or not isinstance(value, bool))
        if not fits:
            found = f"{type(value).__name__} {value!r}"
            expected = str(_FIELDS[name].type).replace(" | ", " or ").replace("Mapping", "dict")
            self.types.append(f"{name}: expected {expected}, found {found}{self._where(name)}")
            return False
        if key.options and value not in key.options:
            self.errors.append(f"{name}: expected one of {', '.join(key.options)}, found {value!r}{self._where(name)}")
            return False
        low, high = key.minimum, key.maximum
        inside = (low is None or value >= low) and (high is None or value <= high)
        if not inside:
            bounds = f"at least {low}" if high is None else f"from {low} to {high}"
            self.errors.append(f"{name}: expected {bounds}, found {value!r}{self._where(name)}")
        return inside

    def _check_texts(self, name: str, value: Mapping[Any, Any]) -> bool:
        """Whether a mapping, of which there must be something, is one from str to str; reports it if not."""
        wrong = [f"{k!r}: {v!r}" for k, v in value.items() if not isinstance(k, str) or not isinstance(v, str)]
        if wrong:
            self.types.append(f"{name}: expected str: str, found {', '.join(wrong)}{self._where(name)}")
        if not value:
            self.errors.append(f"{name}: expected at least one entry, found {value!r}{self._where(name)}")
        return bool(value) and not wrong

    def _where(self, name: str) -> str:
        return f" ({self._origins[name]})" if name in self._origins else ""


def _closest(name: str) -> str:
    """`; did you mean X?` for the known name that is most like this one, or nothing."""
    matches = difflib.get_close_matches(name, [*KEYS, *_ALIASES], n=1, cutoff=0.5)
    return f"; did you mean {matches[0]}?" if matches else ""
