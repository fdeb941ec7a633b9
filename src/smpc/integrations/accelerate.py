"""accelerate, where the ranks of a pipeline are one replica: they read the same batches, and nothing is averaged over them.

    smp.init({"pipeline_parallel_degree": 2, "microbatches": 4})
    accelerator = PipelineAccelerator(gradient_accumulation_steps=2)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)


    @smp.step
    def train_step(model, batch):
        loss = model(**batch).loss
        accelerator.backward(loss)
        return loss


    for batch in loader:
        with accelerator.accumulate(model):
            loss = train_step(model, batch).reduce_mean()
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

The model is called in step functions alone, as everywhere with smpc: a pipeline runs the microbatches of a batch interleaved, so it must
know of all of them before the first one is differentiated.

Terms
    replica   the ranks of one pipeline. accelerate's processes are ranks; what it divides among processes goes to replicas here
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

import smpc.v1 as smp
from smpc.errors import CheckpointError, ConfigUnsupportedError, UsageError
from smpc.integrations.whole_batch_check import HeardModel

try:
    from accelerate import Accelerator
    from accelerate.data_loader import prepare_data_loader
    from accelerate.scheduler import AcceleratedScheduler
    from accelerate.state import GradientState
    from accelerate.utils import recursively_apply
except ModuleNotFoundError as error:
    needed = f"smpc.integrations.accelerate needs {error.name}: pip install 'smpc[accelerate]'"
    raise ModuleNotFoundError(needed, name=error.name) from error

_TAG = "state"  # of files that save_state writes into a named folder


class PipelineAccelerator(Accelerator):  # type: ignore[misc]
    """accelerate's Accelerator after `smp.init`; arguments are its own.

    Raises ConfigUnsupportedError for mixed precision, DeepSpeed, Megatron and FSDP of accelerate, which smpc has in its configuration.
    """

    optimizer_type: type[smp.DistributedOptimizer] | None = None  # of what `prepare` makes of torch's optimizers

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _check_session()
        if smp.state.session.device.type == "cpu":
            kwargs.setdefault("cpu", True)  # accelerate looks for ranks on GPUs alone otherwise
        super().__init__(*args, **kwargs)
        self.check()

    @classmethod
    def of(cls, accelerator: Accelerator) -> PipelineAccelerator:
        """One in the state of another."""
        own: PipelineAccelerator = cls.__new__(cls)
        own.__dict__.update(accelerator.__dict__)
        own.check()
        return own

    def check(self) -> None:
        """Raise an error for unsupported options."""
        _check_session()
        if smp.tp_size() > 1:
            raise ConfigUnsupportedError(
                f"tensor_parallel_degree: expected 1 with accelerate and its Trainer, found {smp.tp_size()}; use a loop of your own, as in "
                "README.md"
            )
        if smp.cp_size() > 1:
            raise ConfigUnsupportedError(
                f"context_parallel_degree: expected 1 with accelerate and its Trainer, found {smp.cp_size()}; use a loop of your own, as "
                "in docs/context_parallelism.md"
            )
        if self.mixed_precision != "no":
            raise ConfigUnsupportedError(
                f"mixed_precision: expected 'no', found {self.mixed_precision!r}; set bf16: true or fp16: true in smp.init, which keeps "
                "fp32 masters, or enter torch.autocast in the step function"
            )
        for plugin in ("deepspeed_plugin", "fsdp_plugin", "megatron_lm_plugin"):
            if getattr(self.state, plugin, None) is not None:
                raise ConfigUnsupportedError(
                    f"{plugin}: the model is distributed by smpc; leave it out (fully_shard and sharded_data_parallel_degree of smp.init "
                    "shard parameters)"
                )

    @property
    def num_processes(self) -> int:
        """The number of replicas: what batches are divided among."""
        return smp.dp_size()

    # -- what is prepared ------------------------------------------------------------------------------------------------

    def prepare(self, *objects: Any, device_placement: Any = None) -> Any:
        """The objects, made fit for a pipeline, in their order: models, optimizers, data loaders, schedulers; any other as it is."""
        # A model is needed by its optimizer, and an optimizer by its scheduler, in whatever order they are given.
        made = {
            number: self._made(each)
            for number, each in sorted(enumerate(objects), key=lambda item: _turn_in_accelerate(item[1]))
        }
        found = tuple(made[number] for number in range(len(objects)))
        return found[0] if len(found) == 1 else found

    def _made(self, each: Any) -> Any:
        if isinstance(each, DataLoader):
            return self.prepare_data_loader(each)
        if isinstance(each, nn.Module):
            return self.prepare_model(each)
        if isinstance(each, LRScheduler):
            return self.prepare_scheduler(each)
        return self.prepare_optimizer(each) if isinstance(each, Optimizer) else each

    def prepare_model(self, model: nn.Module, device_placement: Any = None, evaluation_mode: bool = False) -> nn.Module:
        """The smp.DistributedModel: the one that is given, or a new one of a module."""
        prepared = model if isinstance(model, smp.DistributedModel) else smp.DistributedModel(model)
        if all(prepared is not known for known in self._models):
            self._models.append(prepared)
        return prepared

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: Any = None) -> Optimizer:
        """An smp.DistributedOptimizer around the optimizer, which steps once in `gradient_accumulation_steps` batches."""
        if not isinstance(optimizer, smp.DistributedOptimizer):
            prepared: Optimizer = (self.optimizer_type or _AccumulatingOptimizer)(optimizer)
        elif self.gradient_accumulation_steps == 1 or isinstance(optimizer, _AccumulatingOptimizer):
            prepared = optimizer
        else:
            raise ConfigUnsupportedError(
                f"gradient_accumulation_steps: expected 1 with an smp.DistributedOptimizer of the script's own, which steps whenever "
                f"it is told to, found {self.gradient_accumulation_steps}; pass the torch optimizer to accelerator.prepare"
            )
        if all(prepared is not known for known in self._optimizers):
            self._optimizers.append(prepared)
        return prepared

    def prepare_scheduler(self, scheduler: LRScheduler) -> Any:
        """The scheduler, which steps with the optimizer: once for each replica, as accelerate's, or once with `split_batches`."""
        prepared = _Scheduler(scheduler, self._optimizers, self.step_scheduler_with_optimizer, self.split_batches)
        self._schedulers.append(prepared)
        return prepared

    def prepare_data_loader(
        self, data_loader: DataLoader[Any], device_placement: Any = None, slice_fn_for_dispatch: Any = None
    ) -> DataLoader[Any]:
        """A loader whose batches are this replica's, the same on all ranks of it."""
        if getattr(data_loader, "_is_accelerate_prepared", False):
            return data_loader
        config = self.dataloader_config
        if config.dispatch_batches:
            raise ConfigUnsupportedError("dispatch_batches: with a pipeline every rank reads its batches; leave it out")
        prepared: DataLoader[Any] = prepare_data_loader(
            data_loader,
            self.device,
            num_processes=smp.dp_size(),
            process_index=smp.dp_rank(),
            split_batches=config.split_batches,
            put_on_device=self.device_placement,
            rng_types=self.rng_types.copy() if smp.dp_size() > 1 else None,
            dispatch_batches=False,
            even_batches=config.even_batches,
            use_seedable_sampler=config.use_seedable_sampler,
            data_seed=config.data_seed,
            non_blocking=config.non_blocking,
            use_stateful_dataloader=config.use_stateful_dataloader,
        )
        self._dataloaders.append(prepared)
        return prepared

    def unwrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """The module in a DistributedModel, of which this rank may have a part; any other as it is."""
        return model.get_module() if isinstance(model, (smp.DistributedModel, HeardModel)) else model

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The state dict of the whole model; call it on every rank."""
        return model.state_dict()

    # -- a step ----------------------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """`model.backward` of the loss over `gradient_accumulation_steps`, in a step function."""
        model = smp.state.model
        if not isinstance(model, smp.DistributedModel):
            raise UsageError(
                "accelerator.backward: there is no smp.DistributedModel yet; call accelerator.prepare(model) first"
            )
        model.backward(loss if self.gradient_accumulation_steps == 1 else loss / self.gradient_accumulation_steps)

    @contextlib.contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Nothing: when gradients are averaged is up to DistributedModel's `backward_passes_per_step`."""
        yield

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        """torch's, which takes the norm over all ranks of the model."""
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)

    # -- over replicas ---------------------------------------------------------------------------------------------------

    def gather(self, tensor: Any) -> Any:
        """Tensors of all replicas, joined along axis 0."""
        if smp.dp_size() == 1:
            return tensor
        return recursively_apply(_gather_over_replicas, tensor, error_on_other_type=True)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """What all replicas have, without the samples that an epoch's last batch repeats; objects are joined in one list."""
        is_tensors = all(isinstance(each, Tensor) for each in tree_leaves(input_data))
        if is_tensors and not use_gather_object:
            return super().gather_for_metrics(input_data)
        data, state = input_data, self.gradient_state
        if smp.dp_size() > 1:
            data = [each for replica in smp.allgather(input_data, smp.DP_GROUP) for each in replica]
        is_cut = isinstance(data, (list, tuple)) and state.end_of_dataloader and state.remainder > 0
        return data[: state.remainder] if is_cut else data

    def check_trigger(self) -> bool:
        """Whether `set_trigger` has been called on any rank since the last check; the same on all ranks."""
        given: Tensor | None = vars(self).get("flag_tensor")
        own = given is not None and bool(given)
        self.flag_tensor = None
        return True in smp.allgather(own, smp.WORLD)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """The sum or mean over the replicas."""

        def one(each: Tensor) -> Tensor:
            total = each.clone()
            if smp.dp_size() > 1:
                dist.all_reduce(total, group=smp.get_dp_process_group())
            return (total / smp.dp_size() if reduction == "mean" else total) * scale

        return recursively_apply(one, tensor, error_on_other_type=True)

    @contextlib.contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """The inputs, which all ranks of a pipeline need. Raises ConfigUnsupportedError with replicas."""
        if smp.dp_size() > 1:
            raise ConfigUnsupportedError(
                f"accelerator.split_between_processes: expected one pipeline, found {smp.dp_size()} replicas of it; take what belongs to "
                "smp.dp_rank() of smp.dp_size()"
            )
        yield inputs

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the last step did nothing, as gradients were not finite; fp16 only."""
        return any(each.overflow for each in self._optimizers)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Tensors as long along `dim` as the longest of all ranks."""
        return tensor if smp.dp_size() == 1 else super().pad_across_processes(tensor, dim, pad_index, pad_first)

    # -- files -------------------------------------------------------------------------------------------------------------

    def save_state(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> str:
        """Save what was prepared and registered, and random states, with `smp.save_checkpoint`; the folder. Call it on every rank.

        With `automatic_checkpoint_naming` it is `checkpoint_<n>` in the project's folder, where `total_limit` are kept. Raises
        UsageError, a ValueError, if it exists, as accelerate does: after a restart the script says where to go on.
        """
        model, optimizer = self._one_model()
        naming = self.project_configuration
        folder, tag, limit = output_dir, _TAG, None
        if naming.automatic_checkpoint_naming:
            folder = os.path.join(self.project_dir, "checkpoints")
            tag, limit = f"checkpoint_{self.save_iteration}", naming.total_limit
            if tag in {each.removesuffix("_partial") for each in (os.listdir(folder) if os.path.isdir(folder) else ())}:
                raise UsageError(
                    f"accelerator.save_state: {os.path.join(folder, tag)} already exists and is not overwritten; set "
                    "accelerator.project_configuration.iteration to the number to go on with"
                )
        if folder is None:
            raise UsageError("accelerator.save_state: expected a folder, or automatic_checkpoint_naming, found neither")
        content = {
            "schedulers": [each.state_dict() for each in self._schedulers],
            "registered": [each.state_dict() for each in self._custom_objects],
            "step": self.step,
        }
        smp.save_checkpoint(
            folder, tag, model=model, optimizer=optimizer, user_content=content, num_kept_partial_checkpoints=limit
        )
        naming.iteration += 1
        return os.path.join(folder, tag) if naming.automatic_checkpoint_naming else folder

    def load_state(self, input_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Load what `save_state` saved; None: the newest of the project. Call it on every rank, after `prepare`."""
        self._one_model()
        tag: str | None = _TAG
        if input_dir is None:
            input_dir, tag = os.path.join(self.project_dir or "", "checkpoints"), None
        elif os.path.basename(os.path.normpath(input_dir)).startswith("checkpoint_"):
            input_dir, tag = os.path.split(os.path.normpath(input_dir))
        content = smp.resume_from_checkpoint(input_dir, tag)
        if content is None:
            raise CheckpointError(
                f"accelerator.load_state: expected a checkpoint of save_state in {input_dir}, found none"
            )
        for name, objects in (("schedulers", self._schedulers), ("registered", self._custom_objects)):
            if len(content[name]) != len(objects):
                raise CheckpointError(
                    f"accelerator.load_state: expected {len(content[name])} {name}, as in {input_dir}, found {len(objects)}; prepare and "
                    "register as the script did that saved it"
                )
            for each, state in zip(objects, content[name], strict=True):
                each.load_state_dict(state)
        self.step = content["step"]

    def _one_model(self) -> tuple[Any, Any]:
        """The model and optimizer that states are of."""
        found = len(self._models), len(self._optimizers)
        hooks = len(self._save_model_state_pre_hook) + len(self._load_model_state_pre_hook)
        stateful = sum(getattr(each, "use_stateful_dataloader", False) for each in self._dataloaders)
        if found == (1, 1) and not hooks and not stateful:
            return self._models[0], self._optimizers[0]
        raise ConfigUnsupportedError(
            f"accelerator.save_state and load_state: expected one prepared model and optimizer, no hooks of states and no stateful data "
            f"loader, found {found[0]} and {found[1]}, {hooks} hooks and {stateful} such loaders; call smp.save_checkpoint and "
            "smp.resume_from_checkpoint, which have arguments for each model and for data"
        )


class _AccumulatingOptimizer(smp.DistributedOptimizer):
    """Steps and clears gradients at the end of an accumulation alone, as accelerate's optimizers do."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update, unless more batches are to come."""
        return super().step(closure) if GradientState().sync_gradients else None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, unless more batches are to come."""
        if GradientState().sync_gradients:
            super().zero_grad(set_to_none)


class _Scheduler(AcceleratedScheduler):  # type: ignore[misc]
    """accelerate's, where its processes are replicas."""

    def __init__(
        self, scheduler: LRScheduler, optimizers: list[Any], with_optimizer: bool, split_batches: bool
    ) -> None:
        super().__init__(scheduler, [], step_with_optimizer=with_optimizer, split_batches=split_batches)
        self._watched = optimizers if with_optimizer else []

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Steps the scheduler once for each batch of an update; not if gradients were not finite, so that there was no update."""
        if any(each.overflow for each in self._watched):
            return
        if not self.step_with_optimizer or self.split_batches or not self.gradient_state.sync_gradients:
            super().step(*args, **kwargs)  # once at most, and asks for no number of processes
            return
        for _ in range(smp.dp_size()):
            total = getattr(self.scheduler, "total_steps", None)
            if total is None or self.scheduler._step_count <= total:
                self.scheduler.step(*args, **kwargs)


def _turn_in_accelerate(each: Any) -> int:
    """Models first, then optimizers, then schedulers."""
    kinds = nn.Module, Optimizer, LRScheduler
    return next((number for number, kind in enumerate(kinds) if isinstance(each, kind)), len(kinds))


def _check_session() -> None:
    if not smp.is_initialized():
        raise UsageError("PipelineAccelerator: expected smp.init before it; call smp.init(config) first, on every rank")


def _gather_over_replicas(tensor: Tensor) -> Tensor:
    """A tensor of every replica, one after the other."""
    own = tensor.contiguous() if tensor.dim() else tensor.reshape(1)
    found = [torch.empty_like(own) for _ in range(smp.dp_size())]
    dist.all_gather(found, own, group=smp.get_dp_process_group())
    return torch.cat(found)
