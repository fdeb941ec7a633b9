"""The Trainer's arguments: their meaning, invalid combinations, and alternatives to unsupported ones."""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.planner import SavePlanner
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from smpc import dist
from smpc.checkpoint.torch_format.file_systems import file_system_of, is_url
from smpc.composer.checkpoint_folder import named
from smpc.composer.checkpoint_readers import find_checkpoint
from smpc.composer.duration import Duration
from smpc.composer.model import ComposerModel
from smpc.errors import CheckpointError, ConfigError, ConfigTypeError, ConfigUnsupportedError
from smpc.fsdp import FSDPConfig, TensorConfig, translate
from smpc.fsdp.meshes import check_name as check_group
from smpc.fsdp.tensor_slices import check_beside, data_sizes

PRECISIONS = ("fp32", "amp_fp16", "amp_bf16")
SYNC_STRATEGIES = ("single_auto_sync", "multi_auto_sync", "forced_sync")
T = TypeVar("T")
_ELSEWHERE = {
    "algorithms": "change the model or the batch in the script",
    "loggers": "give a function to callbacks",
    "profiler": "use smpc run --report and --trace, or torch.profiler around fit",
}


class ArgumentChecks:
    """Makes several checks, and raises what they found wrong as one error."""

    def __init__(self) -> None:
        self._errors: list[ConfigError] = []

    def __call__(self, check: Callable[..., T], *args: Any, **kwargs: Any) -> T | None:
        """The check's result; None if it found an error."""
        try:
            return check(*args, **kwargs)
        except ConfigError as error:
            self._errors.append(error)
            return None

    def finish(self) -> None:
        """Raise the error, if there is one: of the checks' kind, if all found that kind."""
        if len(self._errors) == 1:
            raise self._errors[0]
        if self._errors:
            kinds = {type(error) for error in self._errors}
            raise (kinds.pop() if len(kinds) == 1 else ConfigError)("\n".join(map(str, self._errors)))


@dataclass(frozen=True, slots=True)
class TrainingArguments:
    """How a run trains.

    `config`: None for replicas. `tensor`: None without slices. `scale`: of fp16's losses, as a ZeRO configuration has it, None without one.
    """

    config: FSDPConfig | None
    tensor: TensorConfig | None
    device: str
    precision: str
    microbatch_size: int | None
    is_automatic: bool
    clipping: float | None
    scale: dict[str, float] | None

    @property
    def slices(self) -> int:
        """How many ranks slice layers together, and train on the same samples."""
        return 1 if self.tensor is None else self.tensor.tensor_parallel_degree

    @property
    def is_sharded_on_disk(self) -> bool:
        """Whether checkpoints are folders."""
        return self.config is not None and self.config.state_dict_type == "sharded"

    @property
    def is_sharded(self) -> bool | None:
        """Whether what is loaded must be a folder; None for either."""
        return None if self.config is None else self.is_sharded_on_disk

    @property
    def reads_alone(self) -> bool:
        """Whether rank 0 reads checkpoints for all."""
        return self.config is not None and self.config.load_monolith_rank0_only

    def check_there(self, path: str) -> None:
        """Raise CheckpointError if this rank is to read what is not there; no process group is needed."""
        if self.reads_alone and dist.get_global_rank():
            return
        try:
            find_checkpoint(path, self.is_sharded)
        except CheckpointError:
            raise
        except Exception as error:  # of storage it may be of any class
            raise CheckpointError(f"load_path {path!r}: {type(error).__name__}: {error}") from error

    @property
    def save_planner(self) -> SavePlanner | None:
        """The planner of checkpoints, if the script has its own."""
        return None if self.config is None else self.config.save_planner

    @property
    def prefix(self) -> str | None:
        """How such folders are named; None for files."""
        return self.config.sharded_ckpt_prefix_dir if self.config is not None and self.is_sharded_on_disk else None


@dataclass(frozen=True, slots=True)
class Arguments:
    """All of the Trainer's arguments that are not taken as they are. `places`: of the run's checkpoints, and of the one that is loaded."""

    how: TrainingArguments
    optimizer: torch.optim.Optimizer
    schedulers: tuple[torch.optim.lr_scheduler.LRScheduler, ...]
    callbacks: tuple[Callable[[Any], None], ...]
    save_interval: Duration
    eval_interval: Duration
    max_duration: Duration | None
    ignored: tuple[str, ...]
    places: tuple[str | None, str | None]


_FLAGS = (
    "step_schedulers_every_batch",
    "accumulate_train_batch_on_tokens",
    "save_overwrite",
    "save_weights_only",
    "load_weights_only",
    "load_strict_model_weights",
    "autoresume",
)
_NAMES = ("save_filename", "save_latest_filename", "save_best_filename")


def check(given: Mapping[str, Any], others: Mapping[str, Any]) -> Arguments:
    """All arguments, by name, checked together; no process group is needed. `others`: those that this Trainer does not have.

    Raises ConfigError, ConfigTypeError or ConfigUnsupportedError, with a line or more for each that cannot be.
    """
    ok, loader = ArgumentChecks(), given["train_dataloader"]
    ok(refuse_others, others)
    ok(check_kinds, given)
    ok(check_names, given)
    ok(check_words, given["ddp_sync_strategy"])
    ok(check_autoresume, given)
    ok(check_places, save_folder=given["save_folder"], load_path=given["load_path"])
    ok(check_best, given["save_best_filename"], given["save_folder"], given["eval_dataloader"])
    zero = given["deepspeed_config"]
    parallelism = ok(parallelism_of, given["fsdp_config"], given["parallelism_config"], zero)
    how, slices = None, None
    if parallelism is not None:
        slices = 1 if parallelism[1] is None else parallelism[1].tensor_parallel_degree
        size = given["device_train_microbatch_size"]
        how = ok(training_of, *parallelism, zero, given["device"], given["precision"], size, loader)
    if how is not None and how.prefix is not None:
        ok(check_name, "sharded_ckpt_prefix_dir", how.prefix, given["run_name"])
    ok(check_apart, given, None if how is None else how.prefix)
    ok(
        check_loaders,
        slices,
        train_dataloader=loader,
        eval_dataloader=given["eval_dataloader"],
    )
    every = {name: ok(Duration.parse, given[name], name) for name in ("save_interval", "eval_interval")}
    end = None if given["max_duration"] is None else ok(Duration.parse, given["max_duration"], "max_duration")
    callbacks = ok(callbacks_of, given["callbacks"])
    ignored = ok(ignored_keys, given["load_ignore_keys"])
    optimizer = None
    if ok(check_model, given["model"]):
        optimizer = ok(optimizer_of, given["optimizers"], given["model"])
    schedulers = ok(schedulers_of, given["schedulers"], optimizer, is_given=given["optimizers"] is not None)
    ok.finish()
    found: Any = (
        how,
        optimizer or sgd_of(given["model"]),
        schedulers,
        callbacks,
        every["save_interval"],
        every["eval_interval"],
        end,
        ignored,
        tuple(None if given[name] is None else os.fspath(given[name]) for name in ("save_folder", "load_path")),
    )
    return Arguments(*found)


def training_of(
    fsdp: Any,
    tensor: TensorConfig | None,
    zero: Any,
    device: object,
    precision: str | None,
    microbatch_size: object,
    loader: object,
) -> TrainingArguments:
    """Everything that says how to train, checked together; no process group is needed. `zero`: a DeepSpeed configuration."""
    kind = kind_of_device(device)
    size, is_automatic = microbatch_size_of(microbatch_size)
    clipping: float | None = None
    scale: dict[str, float] | None = None
    if zero is not None:
        batch_size, world_size = getattr(loader, "batch_size", None), dist.get_world_size()
        plan = translate(zero, batch_size=batch_size, world_size=world_size, precision=precision)
        for line in plan.told if dist.get_global_rank() == 0 else ():
            warnings.warn(line, stacklevel=5)
        if size is not None and plan.microbatch_size not in (None, size):
            raise ConfigError(
                f"deepspeed_config: expected microbatches of {size}, as device_train_microbatch_size says, found {plan.microbatch_size}"
            )
        fsdp, precision, clipping, scale = plan.fsdp, plan.precision, plan.clipping, plan.scale
        size = size or plan.microbatch_size
    config = None if fsdp is None else FSDPConfig.read(fsdp)
    if config is not None:
        check_group(config.process_group)
        config.degrees(*data_sizes(1 if tensor is None else tensor.tensor_parallel_degree))
        if tensor is not None:
            check_beside(config)
    return TrainingArguments(config, tensor, kind, precision_of(precision, kind), size, is_automatic, clipping, scale)


def check_kinds(given: Mapping[str, object]) -> None:
    """Raise ConfigTypeError or ConfigError for values that flags, texts and numbers cannot have."""
    wrong = [
        f"{name}: expected True or False, found {given[name]!r}" for name in _FLAGS if type(given[name]) is not bool
    ]
    for name in (*_NAMES, "save_folder", "load_path", "run_name"):
        if not (given[name] is None or isinstance(given[name], str | os.PathLike)):
            wrong.append(f"{name}: expected text, found {given[name]!r}")
    seed, timeout, keep = given["seed"], given["dist_timeout"], given["save_num_checkpoints_to_keep"]
    if not (seed is None or _is_number(seed, int)):
        wrong.append(f"seed: expected a whole number, found {seed!r}")
    if not _is_number(timeout, int | float):
        wrong.append(f"dist_timeout: expected seconds, found {timeout!r}")
    if not _is_number(keep, int):
        wrong.append(f"save_num_checkpoints_to_keep: expected a whole number, found {keep!r}")
    if wrong:
        raise ConfigTypeError("\n".join(wrong))
    if keep != -1 and keep < 1:  # type: ignore[operator]
        raise ConfigError(f"save_num_checkpoints_to_keep: expected at least 1, or -1 for all, found {keep}")
    if not timeout > 0:  # type: ignore[operator]
        raise ConfigError(f"dist_timeout: expected seconds above 0, found {timeout}")


def _is_number(value: object, kind: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def check_names(given: Mapping[str, object]) -> None:
    """Raise ConfigError for names of files with fields that there are not, or that leave the folder of the run."""
    for name in _NAMES:
        check_name(name, given[name], given["run_name"])


def check_apart(given: Mapping[str, object], prefix: str | None) -> None:
    """Raise ConfigError for one name of several things: the later would take the place of the former. `prefix`: of sharded checkpoints."""
    names = {name: given[name] for name in _NAMES if isinstance(given[name], str)}
    if prefix is not None:
        names |= {"save_filename": prefix}
    seen: dict[str, str] = {}
    for name, template in names.items():
        try:
            found = os.path.normpath(named(str(template), {"run_name": given["run_name"] or "run"}))
        except ConfigError:  # told by `check_names`
            continue
        if found in seen:
            raise ConfigError(f"{seen[found]} and {name}: expected names that differ, found {template!r} for both")
        seen[found] = "sharded_ckpt_prefix_dir" if prefix is not None and name == "save_filename" else name


def check_name(argument: str, template: object, run_name: object) -> None:
    """See `check_names`."""
    if not isinstance(template, str):
        return
    try:
        found = named(template, {"run_name": run_name or "run"})
    except ConfigError as error:
        raise ConfigError(f"{argument}: {error}") from None
    if os.path.isabs(found) or ".." in found.split("/") or not found.strip("./"):
        raise ConfigError(f"{argument}: expected a name inside of save_folder, found {found!r}")


def ignored_keys(given: object) -> tuple[str, ...]:
    """Patterns of names that are not loaded."""
    if given is None:
        return ()
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise ConfigTypeError(
            f"load_ignore_keys: expected a list of patterns such as 'state/model/head.*', found {given!r}"
        )
    keys = tuple(given)
    if any(not isinstance(key, str) for key in keys):
        raise ConfigTypeError(
            f"load_ignore_keys: expected a list of patterns such as 'state/model/head.*', found {given!r}"
        )
    return keys


def check_words(ddp_sync_strategy: object) -> None:
    """Raise ConfigError for a strategy that is none."""
    if ddp_sync_strategy not in (None, *SYNC_STRATEGIES):
        raise ConfigError(f"ddp_sync_strategy: expected {', '.join(SYNC_STRATEGIES)}, found {ddp_sync_strategy!r}")


def check_autoresume(given: Mapping[str, object]) -> None:
    """Raise ConfigError for autoresume without a place to look at, or without the link that leads to the newest checkpoint."""
    missing = [name for name in ("save_folder", "run_name", "save_latest_filename") if not given[name]]
    if given["autoresume"] and missing:
        raise ConfigError(
            f"autoresume: expected save_folder, run_name and save_latest_filename beside it; missing {', '.join(missing)}"
        )


def check_best(name: object, save_folder: object, eval_dataloader: object) -> None:
    """Raise ConfigError for a best checkpoint without a place, or without an evaluation."""
    if name is not None and not (save_folder and eval_dataloader is not None):
        raise ConfigError("save_best_filename: expected save_folder and eval_dataloader beside it")


def check_places(**places: object) -> None:
    """Raise ConfigError for URLs of a kind that fsspec does not know here, and for fields in save_folder that there are not."""
    folder = places.get("save_folder")
    if isinstance(folder, str | os.PathLike):
        try:
            named(os.fspath(folder), {"run_name": "run"})
        except ConfigError as error:
            raise ConfigError(f"save_folder: {error}") from None
    for name, place in places.items():
        if isinstance(place, str) and is_url(place):
            try:
                file_system_of(place)
            except CheckpointError as error:
                raise ConfigError(f"{name}: {error}") from error


def refuse_others(given: Mapping[str, Any]) -> None:
    """Raise ConfigError for arguments that this Trainer does not have."""
    if given:
        lines = [
            f"{name}: no argument of this Trainer; {_ELSEWHERE.get(name, 'see docs/trainer.md for what there is')}"
            for name in given
        ]
        raise ConfigError("\n".join(lines))


def kind_of_device(device: object) -> str:
    """`cpu` or `gpu`: what is asked for, else what there is."""
    if device is None:
        return "gpu" if torch.cuda.is_available() else "cpu"
    name = device.type if isinstance(device, torch.device) else device
    if name in ("mps", "tpu"):
        raise ConfigUnsupportedError(f"device: expected cpu or gpu, found {name!r}")
    if name not in ("cpu", "gpu", "cuda"):
        raise ConfigError(f"device: expected cpu or gpu, found {name!r}")
    return "cpu" if name == "cpu" else "gpu"


def precision_of(precision: object, device: str) -> str:
    """The precision: amp_fp16 on GPUs, fp32 on CPUs, unless it is given."""
    if precision is None:
        return "amp_fp16" if device == "gpu" else "fp32"
    if precision == "amp_fp8":
        raise ConfigUnsupportedError("precision: amp_fp8 is not supported; use amp_bf16")
    if precision not in PRECISIONS:
        raise ConfigError(f"precision: expected {', '.join(PRECISIONS)}, found {precision!r}")
    return str(precision)


def sgd_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    """The default optimizer, with a warning."""
    warnings.warn("optimizers: none is given; the Trainer uses SGD with a learning rate of 0.1", stacklevel=4)
    return torch.optim.SGD(model.parameters(), lr=0.1)


def optimizer_of(given: object, model: torch.nn.Module) -> torch.optim.Optimizer | None:
    """The one optimizer; None without one."""
    if isinstance(given, Sequence) and len(given) == 1:
        given = given[0]
    if isinstance(given, torch.optim.Optimizer):
        own = {id(parameter) for parameter in model.parameters()}
        strangers = sum(id(parameter) not in own for group in given.param_groups for parameter in group["params"])
        if strangers:
            raise ConfigError(
                f"optimizers: expected parameters of the model alone, found {strangers} others; make the optimizer of model.parameters()"
            )
        closure = inspect.signature(type(given).step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise ConfigUnsupportedError(
                f"optimizers: expected one whose step needs no closure, found {type(given).__name__}, which runs batches by itself"
            )
        return given
    if given is None:
        return None
    if isinstance(given, Sequence):
        raise ConfigError(f"optimizers: expected one optimizer, found {len(given)}")
    raise ConfigTypeError(f"optimizers: expected an optimizer of torch, found {type(given).__name__}")


def schedulers_of(
    given: object, optimizer: torch.optim.Optimizer | None, *, is_given: bool
) -> tuple[torch.optim.lr_scheduler.LRScheduler, ...]:
    """The schedulers as a tuple. `optimizer`: the run's, None if it is not known; `is_given`: whether there is one."""
    found = () if given is None else tuple(given) if isinstance(given, list | tuple) else (given,)
    for scheduler in found:
        if not isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler):
            raise ConfigTypeError(f"schedulers: expected torch's, found {type(scheduler).__name__}")
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise ConfigUnsupportedError("schedulers: ReduceLROnPlateau steps by a metric; step it in a callback")
        if not is_given:
            raise ConfigError("schedulers: expected their optimizer in optimizers beside them, found none")
        if optimizer is not None and scheduler.optimizer is not optimizer:
            raise ConfigError(
                f"schedulers: expected schedulers of the optimizer in optimizers, found a {type(scheduler).__name__} of another, whose "
                "learning rate would change without effect"
            )
    return found


def callbacks_of(given: object) -> tuple[Callable[[Any], None], ...]:
    """The functions that get the state after every batch."""
    found = () if given is None else tuple(given) if isinstance(given, list | tuple) else (given,)
    for callback in found:
        if not callable(callback):
            raise ConfigTypeError(f"callbacks: expected functions of the state, found {type(callback).__name__}")
    return found


def microbatch_size_of(given: object) -> tuple[int | None, bool]:
    """(size, whether it is found automatically)."""
    if given == "auto":
        return None, True
    if given is not None and (isinstance(given, bool) or not isinstance(given, int)):
        raise ConfigTypeError(f"device_train_microbatch_size: expected a whole number or 'auto', found {given!r}")
    if given is not None and given < 1:
        raise ConfigError(f"device_train_microbatch_size: expected at least 1, found {given}")
    return given, False


def parallelism_of(
    fsdp_config: object, parallelism_config: object, deepspeed_config: object
) -> tuple[Any, TensorConfig | None]:
    """The one dictionary of FSDP's fields, None for replicas; and which layers are sliced, None for none."""
    given = {
        "fsdp_config": fsdp_config,
        "parallelism_config": parallelism_config,
        "deepspeed_config": deepspeed_config,
    }
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise ConfigError(f"{' and '.join(names)}: expected one of them")
    if parallelism_config is None:
        return fsdp_config, None
    if not isinstance(parallelism_config, Mapping):
        raise ConfigTypeError(f"parallelism_config: expected a dict, found {parallelism_config!r}")
    unknown = [name for name in parallelism_config if name not in ("fsdp", "tp")]
    if unknown:
        raise ConfigError(f"parallelism_config: expected fsdp and tp, found {', '.join(map(repr, unknown))}")
    fsdp = parallelism_config.get("fsdp")
    if parallelism_config.get("tp") is None:
        return fsdp, None
    tensor = TensorConfig.read(parallelism_config["tp"])
    if tensor.tensor_parallel_degree == 1:
        warnings.warn("tp: tensor_parallel_degree 1 slices nothing", stacklevel=5)
        return fsdp, None
    data_sizes(tensor.tensor_parallel_degree)
    return {"sharding_strategy": "NO_SHARD"} if fsdp is None else fsdp, tensor


def check_model(model: object) -> bool:
    """True; raises ConfigTypeError for anything but a ComposerModel."""
    if not isinstance(model, ComposerModel):
        raise ConfigTypeError(f"model: expected a ComposerModel, found {type(model).__name__}")
    return True


def check_values(model: torch.nn.Module) -> None:
    """Raise ConfigError on all ranks, if one of them has meta tensors in a model that is not sharded. Collective."""
    is_meta = any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    meta = [str(rank) for rank, found in enumerate(dist.all_gather_object(is_meta)) if found]
    if meta:
        raise ConfigError(
            f"model: expected values on all ranks, found meta tensors on ranks {', '.join(meta)}; fill them, or shard the model with "
            "fsdp_config={'sync_module_states': True}, with values on rank 0"
        )


def check_loaders(slices: int | None, **loaders: object) -> None:
    """Raise ConfigError where ranks of a larger world would read the same samples, or those that slice layers together others.

    `slices`: how many slice layers together; None if that setting is wrong: then samplers are not checked. Raises ConfigTypeError
    for an object without batches.
    """
    for name, loader in loaders.items():
        if isinstance(loader, Dataset) and not isinstance(loader, IterableDataset):
            raise ConfigTypeError(
                f"{name}: expected batches, found {type(loader).__name__}, which gives samples one by one; use "
                "DataLoader(dataset, batch_size=...)"
            )
        if loader is not None and not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
            raise ConfigTypeError(f"{name}: expected a DataLoader, or what can be iterated over, found {loader!r}")
        _check_loader(loader, name, slices)


def _check_loader(loader: object, name: str, known: int | None) -> None:
    slices = known or 1
    if dist.get_world_size() == 1 or not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return
    samplers = (loader.sampler, getattr(loader.batch_sampler, "sampler", None))
    found = next((sampler for sampler in samplers if isinstance(sampler, DistributedSampler)), None)
    wanted = (dist.get_world_size() // slices, dist.get_global_rank() // slices)
    how = (
        "dataset, shuffle=True" if slices == 1 else f"dataset, shuffle=True, num_replicas={wanted[0]}, rank={wanted[1]}"
    )
    advice = f"use DataLoader(dataset, sampler=smpc.dist.get_sampler({how}))"
    if found is None and wanted[0] > 1:
        raise ConfigError(
            f"{name}: expected a DistributedSampler, found {type(loader.sampler).__name__}: all ranks would read the same samples; {advice}"
        )
    if found is not None and known is not None and (found.num_replicas, found.rank) != wanted:
        why = f", as {slices} ranks slice layers together and train on the same samples" if slices > 1 else ""
        raise ConfigError(
            f"{name}: expected a sampler of replica {wanted[1]} of {wanted[0]}{why}, found {found.rank} of {found.num_replicas}; {advice}"
        )
