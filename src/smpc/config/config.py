"""The configuration: every parameter with its meaning, type, default, bounds and options.

Terms
    key      the name of a parameter, as a user writes it; a field of `Config`. Keys that the planner has too are in `smpc.config.planner`
    source   a mapping that sets keys. Later sources override earlier ones: a file or dict given by the user,
             then `overrides` (command-line options), then the JSON object in the environment variable
             SM_HP_MP_PARAMETERS

`smpc.config.violations` describes sources, `smpc.config.rules` has the rules between keys. Booleans may be 0 and 1.

    >>> config = Config.parse({"partitions": 2, "microbatches": 4, "ddp": True})
    >>> config.pipeline_parallel_degree, config.active_microbatches, config.memory_weight
    (2, 4, 0.8)

All violations of one configuration are reported together, one line each: `ConfigTypeError` if a type is among
them, else `ConfigError`. A valid setting whose feature does not exist yet raises `ConfigUnsupportedError` (a
NotImplementedError); one that has no effect here, by nature, is accepted with a warning that says why.
Nothing is read from the environment unless it is passed in.

The keys, their defaults and their rules come from the public configuration reference of SMP v1 (smdistributed-modelparallel), but for
`schedule`, `virtual_pipeline_degree`, `tensor_parallel_plan`, `tensor_parallel_outputs`, the timeouts, `program_cache_size`, `kernels`,
`nan_policy`, `verify`, `device`, `fully_shard`, `context_parallel_degree` and `expert_parallel_degree`, which are additions, and
`processes_per_host`, which the reference has for `mpi`.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

from smpc.config.keep import MOST_PARAMETERS, SMALL_PARAMETERS
from smpc.config.key import Key, key, restated
from smpc.config.numbers import MAX_BYTES, MAX_COUNT, MAX_LOCAL_RANKS, MAX_RANKS, MAX_SECONDS, MAX_SEED, shown
from smpc.config.planner import PlannerKeys
from smpc.config.rules import MODULES, broken_rules
from smpc.config.violations import Report, Schema, read_file

PLACEMENT_STRATEGIES = ("cluster", "spread", "PDT", "PTD", "DPT", "DTP", "TPD", "TDP")
_ALIASES = {"partitions": "pipeline_parallel_degree", "_prescaled_batch": "prescaled_batch"}


_OF_BLOCKS = ("sdp_param_persistence_threshold", "sdp_max_live_parameters")  # these count with fully_shard as well
_SHARDED_ONLY = "it is for sharded_data_parallel_degree above 1"
_TRANSLATED = "distributed modules start from the weights of the originals wherever those can be translated"
_OF_SHARDING = "sdp_"  # begins the names of keys for sharded data parallelism alone
_ONE_PLAN = "a plan depends on the model and the configuration alone, so the same run gets the same partition again"


def _names_in_config(text: str) -> tuple[str, ...] | None:
    """Names separated by commas; None: there are none."""
    return tuple(name.strip() for name in text.split(",") if name.strip()) or None


@dataclass(frozen=True, slots=True)
class Config(PlannerKeys):
    """One checked, immutable configuration. Build it with `Config.parse` or `Config.from_file`.

    The constructor takes the same keys and checks them the same way; None means a derived default. Every field is the
    resolved value: `memory_weight` and `active_microbatches` are always numbers.
    """

    # Keys whose defaults in a script differ from `smpc.compile_model`'s.
    pipeline_parallel_degree: int = restated(PlannerKeys, "pipeline_parallel_degree", 1, required=False)
    memory_weight: float = restated(
        PlannerKeys,
        "memory_weight",
        None,
        meaning="Weight of balancing memory, against balancing computation, when the model is cut",
        derived="0.2 if optimize is speed, else 0.8",
    )
    active_microbatches: int = restated(
        PlannerKeys, "active_microbatches", None, derived="pipeline_parallel_degree + 2"
    )
    _: KW_ONLY
    schedule: str = restated(PlannerKeys, "schedule", "", as_option=lambda name: name or None)
    virtual_pipeline_degree: int = restated(
        PlannerKeys, "virtual_pipeline_degree", 0, minimum=0, as_option=lambda number: number or None
    )
    kernels: str = restated(PlannerKeys, "kernels", "auto")
    tensor_parallel_plan: str | Mapping[str, str] = restated(
        PlannerKeys,
        "tensor_parallel_plan",
        MODULES,
        meaning="What tensor-parallel ranks split: `modules`, those that smp.tensor_parallelism declares; or any model, by the compiler: "
        "`auto`, `huggingface` (the model's own plan), or styles by name pattern, as they are or a .json file "
        "(docs/tensor_parallel_compiler.md)",
        as_option=lambda plan: "auto" if plan == MODULES else plan,  # which only a script can declare
    )
    tensor_parallel_outputs: str = restated(
        PlannerKeys,
        "tensor_parallel_outputs",
        "",
        meaning="With a tensor_parallel_plan, names of the tensors that the model returns, such as `loss`, separated by commas; None in "
        "place of others, so that logits need not be gathered. Empty: all",
        as_option=_names_in_config,
    )
    device: str = key(
        "",
        "What the model is cut for, and times are predicted for: names of devices or .toml files, as `smpc calibrate` writes them, "
        "separated by commas: one for all pipeline ranks, or one for each (docs/planner.md). Empty: what the ranks run on, by its name",
    )
    start_timeout: float = key(
        1800.0,
        "Seconds that a rank waits for others from smp.init to the end of the first step, and that a step may take which compiles",
        minimum=1.0,
        limit=MAX_SECONDS,
    )
    step_timeout: float = key(
        1800.0,
        "Seconds that a step may take, the wait for the other ranks included, before the rank that stalls is "
        "named and all end",
        minimum=1.0,
        limit=MAX_SECONDS,
    )
    checkpoint_timeout: float = key(
        1800.0, "Seconds that gathering, saving or loading of state may take", minimum=1.0, limit=MAX_SECONDS
    )
    program_cache_size: int = key(
        32,
        "Most programs that are kept for inputs of different shapes; beyond it, the one that has not run for the longest "
        "time is compiled again when it is needed",
        minimum=2,
        limit=MAX_COUNT,
    )
    nan_policy: str = key(
        "raise",
        "What happens after a step in which a loss was NaN or infinite, on all ranks alike: `raise` an error, "
        "`skip` the update of the parameters, or `ignore` it",
        options=("raise", "skip", "ignore"),
    )
    verify: bool = key(
        False,
        "Before the model is divided, pipeline rank 0 runs the first microbatch in plain PyTorch and as compiled; where they differ, "
        "the first step raises an error on all ranks that names the module (docs/recording.md)",
    )
    optimize: str = key(
        "memory",
        "What to save: `speed` duplicates activations over tensor-parallel ranks, `memory` communicates more",
        options=("memory", "speed"),
    )
    placement_strategy: str = key(
        "cluster",
        "How D (reduced data), P (pipeline) and T (tensor parallelism) map to ranks, the right-most letter "
        "varying fastest; `cluster` is DPT, `spread` is TPD",
        options=PLACEMENT_STRATEGIES,
    )
    auto_partition: bool = key(
        True, "Whether the partitioner chooses the cut, or smp.partition and smp.set_partition do"
    )
    default_partition: int = key(
        None, "Partition of the modules that no smp.partition context places", minimum=0, limit=MAX_RANKS, derived="0"
    )
    contiguous: bool = key(
        True,
        "Whether each partition is a connected part of the graph (TensorFlow)",
        no_effect="it is a parameter for TensorFlow; pipeline stages follow the order of execution",
    )
    horovod: bool = key(
        False,
        "Whether Horovod does the data parallelism (TensorFlow)",
        unsupported="Horovod is for TensorFlow: use ddp: true",
    )
    ddp: bool = key(False, "Whether there are data-parallel replicas; required when there is more than one")
    deterministic_server: bool = key(
        False,
        "Whether all data-parallel ranks execute in the same order",
        no_effect="programs fix the order of execution when they are compiled, so it is always the same",
    )
    tensor_parallel_seed: int = key(
        0,
        "Seed of the random numbers that tensor-parallel modules draw in training (dropout)",
        minimum=0,
        limit=MAX_SEED,
    )
    prescaled_batch: bool = key(
        False, "Whether the ranks of a tensor-parallel group get the same batch (true of a group of one anyway)"
    )
    fp16: bool = key(False, "Train in float16, with float32 masters and loss scaling")
    bf16: bool = key(False, "Train in bfloat16, with float32 masters")
    fp16_params: bool = key(False, "Create the parameters of distributed modules in float16")
    sdp_reduce_bucket_size: int = key(
        500_000_000,
        "Elements in a gradient bucket of sharded data parallelism",
        minimum=1,
        limit=MAX_BYTES,
        no_effect="the gradients of a block are one bucket",
    )
    sdp_param_persistence_threshold: int = key(
        SMALL_PARAMETERS,
        "Blocks whose parameters all have fewer elements are gathered once in a step, and stay whole until its end",
        minimum=0,
        limit=MAX_BYTES,
    )
    sdp_max_live_parameters: int = key(
        MOST_PARAMETERS,
        "Most elements of gathered parameters at a time: where a rank's model has more, blocks let go of theirs after each use",
        minimum=1,
        limit=MAX_BYTES,
    )
    sdp_hierarchical_allgather: bool = key(
        True,
        "Gather sharded parameters between hosts first, then inside them",
        no_effect="in which order ranks of several hosts gather is up to torch.distributed's backend",
    )
    sdp_gradient_clipping: float = key(
        1.0,
        "Norm of all gradients that the optimizer's step clips to under sharded data parallelism; 0: none",
        minimum=0.0,
        limit=float(MAX_COUNT),
    )
    delayed_parameter_initialization: bool = key(
        False,
        "Create the parameters of what is made in smp.model_creation after the model is cut, on the rank that owns them",
    )
    checkpoint_attentions: bool = key(
        False,
        "Recompute attention in the backward pass",
        no_effect="results are the same, and smp.set_activation_checkpointing recomputes whole layers",
    )
    load_partition: bool = key(False, "Load the partition from `partition_file`", no_effect=_ONE_PLAN)
    partition_file: str = key(None, "File that holds a partition", derived="no file", no_effect=_ONE_PLAN)
    ddp_port: int = key(
        0,
        "Port of a separate rendezvous for data parallelism; 0 for none",
        minimum=0,
        maximum=65535,
        no_effect="all groups are made from the launcher's one rendezvous (MASTER_PORT)",
    )
    ddp_dist_backend: str = key(
        "auto",
        "torch.distributed backend that smp.init starts; `auto` is nccl where there is a GPU, else gloo",
        options=("auto", "nccl", "gloo"),
    )
    overlapping_allreduce: bool = key(
        True,
        "Whether gradients are reduced over replicas during the last backward pass, rather than after it; "
        "DistributedModel's argument of this name can only turn it off",
    )
    processes_per_host: int = key(
        0,
        "Processes that the launcher starts on each host, as the `mpi` part of a nested configuration says; smp.init checks it. "
        "0: not said",
        minimum=0,
        limit=MAX_LOCAL_RANKS,
    )
    static_mode: bool = key(
        False,
        "Record the schedule of the first step and reuse it",
        no_effect="the schedule is always fixed when programs are compiled",
    )
    fast_mode: bool = key(
        False,
        "Send values directly between the ranks that use them",
        no_effect="values always travel directly between the stages that use them",
    )
    _match_weights: bool = key(False, "Give distributed modules the weights of the originals", no_effect=_TRANSLATED)
    _fp32_grad_accumulation: bool = key(
        False, "Whether gradients accumulate in float32 under fp16 and bf16, over microbatches, steps and replicas"
    )

    def __post_init__(self) -> None:
        """Check every rule, then replace None by the derived default."""
        values = {name: _SCHEMA.as_written_in_python(name, getattr(self, name)) for name in KEYS}
        given = {name: value for name, value in values.items() if value is not None}
        Report(_SCHEMA).check(given).raise_if_any()
        degree = self.pipeline_parallel_degree
        derived = {
            **{name: value for name, value in values.items() if isinstance(value, bool)},
            "default_partition": given.get("default_partition", 0),
            "memory_weight": float(given.get("memory_weight", 0.2 if self.optimize == "speed" else 0.8)),
            "active_microbatches": min(given.get("active_microbatches", degree + 2), self.microbatches),
            "partition_file": given.get("partition_file", ""),
        }
        if isinstance(self.tensor_parallel_plan, Mapping):
            derived["tensor_parallel_plan"] = dict(self.tensor_parallel_plan)  # a copy, not the caller's own
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    @property
    def kept_outputs(self) -> tuple[str, ...] | None:
        """What `tensor_parallel_outputs` names; None: all that the model returns."""
        return _names_in_config(self.tensor_parallel_outputs)

    @property
    def device_names(self) -> tuple[str, ...]:
        """What `device` names; (): nothing."""
        return _names_in_config(self.device) or ()

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

        `parameters`: the user's dict, flat or nested. `overrides`: keys that win over it. `environ`: an environment
        (os.environ) whose SM_HP_MP_PARAMETERS wins over both; None reads no environment. `origin`: what messages call
        `parameters`. `warn`: whether to warn of settings without effect here. Raises ConfigError, ConfigTypeError or
        ConfigUnsupportedError, each listing all violations.
        """
        report = Report(_SCHEMA)
        report.add_source(origin, parameters)
        report.add_source("overrides", overrides or {})
        report.add_environment(environ or {})
        is_sharded = report.values.get("sharded_data_parallel_degree", 1) != 1
        counts = _OF_BLOCKS if report.values.get("fully_shard", False) is True else ()
        apart = [n for n in report.values if n.startswith(_OF_SHARDING) and not is_sharded and n not in counts]
        reasons = {name: _SHARDED_ONLY if name in apart else KEYS[name].no_effect for name in report.values}
        ignored = [
            f"{name}: {shown(value)} has no effect here: {reasons[name]}"
            for name, value in report.values.items()
            if reasons[name] and value != _SCHEMA.fields[name].default
        ]
        for name in apart:  # a script may set it to any value
            del report.values[name]
        report.check(report.values).raise_if_any()
        config = cls(**report.values)
        if config._fp32_grad_accumulation and not (config.fp16 or config.bf16):
            ignored.append("_fp32_grad_accumulation: True has no effect here: it is for fp16: true and bf16: true")
        groups = [name for name in ("tensor", "context", "expert") if getattr(config, f"{name}_parallel_degree") > 1]
        if config.verify and (config.pipeline_parallel_degree == 1 or groups):
            why = (
                f"the ranks of a {groups[0]}-parallel group would have to run it together"
                if groups
                else "without a pipeline the module itself is run"
            )
            ignored.append(f"verify: True has no effect here: {why}")
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


_SCHEMA = Schema.of(Config, broken_rules, _ALIASES)
KEYS: dict[str, Key] = dict(_SCHEMA.keys)
