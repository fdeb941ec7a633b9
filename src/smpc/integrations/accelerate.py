"""accelerate, where the ranks of a pipeline are one replica: they read the same batches, and nothing is averaged over them.

    smp.init({"pipeline_parallel_degree": 2, "microbatches": 4})
    accelerator = PipelineAccelerator()
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)


    @smp.step
    def train_step(model, batch):
        loss = model(**batch).loss
        accelerator.backward(loss)
        return loss


    for batch in loader:
        loss = train_step(model, batch).reduce_mean()
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

The model is called in step functions alone, as everywhere with smpc: a pipeline runs the microbatches of a batch interleaved, so it must
know of all of them before the first one is differentiated.

Terms
    replica   the ranks of one pipeline. accelerate's processes are ranks; what it divides among processes goes to replicas here
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from accelerate.utils import recursively_apply
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

import smpc.v1 as smp
from smpc.errors import ConfigUnsupportedError, UsageError


class PipelineAccelerator(Accelerator):  # type: ignore[misc]
    """accelerate's Accelerator after `smp.init`; arguments are its own.

    Raises ConfigUnsupportedError for mixed precision, DeepSpeed, Megatron and FSDP of accelerate, which smpc has in its configuration.
    """

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
        """Raise an error for what this cannot do."""
        _check_session()
        if smp.tp_size() > 1:
            raise ConfigUnsupportedError(
                f"tensor_parallel_degree: expected 1 with accelerate and its Trainer, found {smp.tp_size()}; use a loop of your own, as in "
                "README.md"
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
        """The objects, made fit for a pipeline, in their order: models, optimizers, data loaders; any other as it is."""
        made = tuple(self._made(each) for each in objects)
        return made[0] if len(made) == 1 else made

    def _made(self, each: Any) -> Any:
        if isinstance(each, DataLoader):
            return self.prepare_data_loader(each)
        if isinstance(each, nn.Module):
            return self.prepare_model(each)
        return self.prepare_optimizer(each) if isinstance(each, Optimizer) else each

    def prepare_model(self, model: nn.Module, device_placement: Any = None, evaluation_mode: bool = False) -> nn.Module:
        """The smp.DistributedModel: the one that is given, or a new one of a module."""
        prepared = model if isinstance(model, smp.DistributedModel) else smp.DistributedModel(model)
        if all(prepared is not known for known in self._models):
            self._models.append(prepared)
        return prepared

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: Any = None) -> Optimizer:
        """The smp.DistributedOptimizer: the one that is given, or a new one around an optimizer."""
        return optimizer if isinstance(optimizer, smp.DistributedOptimizer) else smp.DistributedOptimizer(optimizer)

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
        return model.get_module() if isinstance(model, smp.DistributedModel) else model

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The state dict of the whole model; call it on every rank."""
        return model.state_dict()

    # -- a step ----------------------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """`model.backward(loss)`, in a step function."""
        model = smp.state.model
        if not isinstance(model, smp.DistributedModel):
            raise UsageError(
                "accelerator.backward: there is no smp.DistributedModel yet; call accelerator.prepare(model) first"
            )
        model.backward(loss)

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
        return recursively_apply(_gather, tensor, error_on_other_type=True)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """The sum or mean over the replicas."""

        def one(each: Tensor) -> Tensor:
            total = each.clone()
            if smp.dp_size() > 1:
                dist.all_reduce(total, group=smp.get_dp_process_group())
            return (total / smp.dp_size() if reduction == "mean" else total) * scale

        return recursively_apply(one, tensor, error_on_other_type=True)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Tensors as long along `dim` as the longest of all ranks."""
        return tensor if smp.dp_size() == 1 else super().pad_across_processes(tensor, dim, pad_index, pad_first)

    def save_state(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: it would save this rank's part."""
        raise UsageError(
            "accelerator.save_state: this rank has a part of the model; call smp.save_checkpoint(path, tag, ...)"
        )

    def load_state(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: see `save_state`."""
        raise UsageError(
            "accelerator.load_state: this rank has a part of the model; call smp.resume_from_checkpoint(path)"
        )


def _check_session() -> None:
    if not smp.is_initialized():
        raise UsageError("PipelineAccelerator: expected smp.init before it; call smp.init(config) first, on every rank")


def _gather(tensor: Tensor) -> Tensor:
    own = tensor.contiguous() if tensor.dim() else tensor.reshape(1)
    found = [torch.empty_like(own) for _ in range(smp.dp_size())]
    dist.all_gather(found, own, group=smp.get_dp_process_group())
    return torch.cat(found)
