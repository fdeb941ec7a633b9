"""The Trainer's arguments: what they mean, what cannot be, and where else to go for what it does not do."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.planner import SavePlanner
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from smpc import dist
from smpc.checkpoint.torch_format.places import is_url, place_of
from smpc.composer.model import ComposerModel
from smpc.errors import CheckpointError, ConfigError, ConfigTypeError, ConfigUnsupportedError
from smpc.fsdp import FSDPConfig, TensorConfig, translate
from smpc.fsdp.tensor import data_sizes

PRECISIONS = ("fp32", "amp_fp16", "amp_bf16")
SYNC_STRATEGIES = ("single_auto_sync", "multi_auto_sync", "forced_sync")
_ELSEWHERE = {
    "algorithms": "change the model or the batch in the script",
    "loggers": "give a function to callbacks",
    "profiler": "use smpc run --report and --trace, or torch.profiler around fit",
}


@dataclass(frozen=True, slots=True)
class Training:
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
    def save_planner(self) -> SavePlanner | None:
        """What plans them, if the script has a planner of its own."""
        return None if self.config is None else self.config.save_planner

    @property
    def prefix(self) -> str | None:
        """How such folders are named; None for files."""
        return self.config.sharded_ckpt_prefix_dir if self.config is not None and self.is_sharded_on_disk else None


def training_of(
    fsdp: Any,
    tensor: TensorConfig | None,
    zero: Any,
    device: object,
    precision: str | None,
    microbatch_size: object,
    loader: object,
) -> Training:
    """Everything that says how to train, checked together; no process group is needed. `zero`: a DeepSpeed configuration."""
    kind = kind_of_device(device)
    size, is_automatic = microbatch_size_of(microbatch_size)
    clipping: float | None = None
    scale: dict[str, float] | None = None
    if zero is not None:
        batch_size, world_size = getattr(loader, "batch_size", None), dist.get_world_size()
        plan = translate(zero, batch_size=batch_size, world_size=world_size, precision=precision)
        for line in plan.told if dist.get_global_rank() == 0 else ():
            warnings.warn(line, stacklevel=4)
        if size is not None and plan.microbatch_size not in (None, size):
            raise ConfigError(
                f"deepspeed_config: expected microbatches of {size}, as device_train_microbatch_size says, found {plan.microbatch_size}"
            )
        fsdp, precision, clipping, scale = plan.fsdp, plan.precision, plan.clipping, plan.scale
        size = size or plan.microbatch_size
    config = None if fsdp is None else FSDPConfig.read(fsdp)
    if tensor is not None and is_automatic:
        raise ConfigUnsupportedError(
            "device_train_microbatch_size: 'auto' is not supported beside tp: a rank without memory would leave the others in a collective "
            "call; give a number"
        )
    return Training(config, tensor, kind, precision_of(precision, kind), size, is_automatic, clipping, scale)


def check_words(ddp_sync_strategy: object, autoresume: bool, save_folder: object, run_name: object) -> None:
    """Raise ConfigError for a strategy that is none, and for autoresume without a place to look at."""
    if ddp_sync_strategy not in (None, *SYNC_STRATEGIES):
        raise ConfigError(f"ddp_sync_strategy: expected {', '.join(SYNC_STRATEGIES)}, found {ddp_sync_strategy!r}")
    if autoresume and not (save_folder and run_name):
        raise ConfigError("autoresume: expected save_folder and run_name beside it")


def check_best(name: object, save_folder: object, eval_dataloader: object) -> None:
    """Raise ConfigError for a best checkpoint without a place, or without an evaluation."""
    if name is not None and not (save_folder and eval_dataloader is not None):
        raise ConfigError("save_best_filename: expected save_folder and eval_dataloader beside it")


def check_places(**places: object) -> None:
    """Raise ConfigError for URLs of a kind that fsspec does not know here."""
    for name, place in places.items():
        if isinstance(place, str) and is_url(place):
            try:
                place_of(place)
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


def optimizer_of(given: object, model: torch.nn.Module) -> torch.optim.Optimizer:
    """The one optimizer; SGD without one, told."""
    if isinstance(given, Sequence) and len(given) == 1:
        given = given[0]
    if isinstance(given, torch.optim.Optimizer):
        own = {id(parameter) for parameter in model.parameters()}
        strangers = sum(id(parameter) not in own for group in given.param_groups for parameter in group["params"])
        if strangers:
            raise ConfigError(
                f"optimizers: expected parameters of the model alone, found {strangers} others; make the optimizer of model.parameters()"
            )
        return given
    if given is None:
        warnings.warn("optimizers: none is given; the Trainer uses SGD with a learning rate of 0.1", stacklevel=3)
        return torch.optim.SGD(model.parameters(), lr=0.1)
    if isinstance(given, Sequence):
        raise ConfigError(f"optimizers: expected one optimizer, found {len(given)}")
    raise ConfigTypeError(f"optimizers: expected an optimizer of torch, found {type(given).__name__}")


def schedulers_of(given: object) -> tuple[torch.optim.lr_scheduler.LRScheduler, ...]:
    """The schedulers as a tuple."""
    found = () if given is None else tuple(given) if isinstance(given, list | tuple) else (given,)
    for scheduler in found:
        if not isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler):
            raise ConfigTypeError(f"schedulers: expected those of torch, found {type(scheduler).__name__}")
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
        warnings.warn("tp: tensor_parallel_degree 1 slices nothing", stacklevel=4)
        return fsdp, None
    data_sizes(tensor.tensor_parallel_degree)
    return {"sharding_strategy": "NO_SHARD"} if fsdp is None else fsdp, tensor


def check_model(model: object) -> None:
    """Raise ConfigTypeError for what is no ComposerModel."""
    if not isinstance(model, ComposerModel):
        raise ConfigTypeError(f"model: expected a ComposerModel, found {type(model).__name__}")


def check_values(model: torch.nn.Module) -> None:
    """Raise ConfigError on all ranks, if one of them has meta tensors in a model that is not sharded. Collective."""
    is_meta = any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    meta = [str(rank) for rank, found in enumerate(dist.all_gather_object(is_meta)) if found]
    if meta:
        raise ConfigError(
            f"model: expected values on all ranks, found meta tensors on ranks {', '.join(meta)}; fill them, or shard the model with "
            "fsdp_config={'sync_module_states': True}, with values on rank 0"
        )


def check_loaders(slices: int, **loaders: object) -> None:
    """Raise ConfigError where ranks of a larger world would read the same samples, or those that slice layers together others."""
    for name, loader in loaders.items():
        _check_loader(loader, name, slices)


def _check_loader(loader: object, name: str, slices: int) -> None:
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
    if found is not None and slices > 1 and (found.num_replicas, found.rank) != wanted:
        raise ConfigError(
            f"{name}: expected a sampler of replica {wanted[1]} of {wanted[0]}, as {slices} ranks slice layers together and train on the "
            f"same samples, found {found.rank} of {found.num_replicas}; {advice}"
        )
