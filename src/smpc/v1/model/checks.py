"""The errors and warnings of `smp.DistributedModel`: before it changes the module or joins replicas, and of libraries that wrap it.

`NotWrapped` has errors for other libraries that wrap, copy or cast a DistributedModel and would train it wrongly; each says what to do.

    DistributedDataParallel(model)              it would average gradients of different stages
    accelerate.prepare(model), HF Trainer       they wrap, move and call the model, and differentiate its loss, outside of step functions
    copy.deepcopy(model), torch.save(model)     (averages of weights, `AveragedModel`) parameters of other ranks would be missing
    model.half(), model.to(dtype)               programs and masters are made for the dtypes that the module has
    torch.compile(model)                        a step function would be compiled around a call that is none; model.compile() is right

Each of these libraries first reads an attribute of its own from the model: reading it raises the error.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn

from smpc.errors import ConfigError, ConfigTypeError, ConfigUnsupportedError, StepError, UsageError
from smpc.v1.declare.partition import manual_partition, read_marks
from smpc.v1.session.process_state import Session, state
from smpc.v1.steps.context import Measures, StepContext


def check_backward(**options: object) -> None:
    """StepError for options of `torch.autograd.backward` that a step's backward does not have."""
    found = [f"{name}={value!r:.40}" for name, value in options.items() if value is not None and value is not False]
    if found:
        raise StepError(
            f"model.backward: expected tensors and their gradients alone, found {', '.join(found)}; a step makes one backward pass of a "
            "microbatch, through all of the model: add several losses up, and call model.backward(loss) once; compute gradients of "
            "gradients inside the model's forward, in a module that is called whole; freeze what is not to be trained with "
            "requires_grad_(False)"
        )


class NotWrapped(nn.Module):
    """Base of a model that must not be wrapped, copied or cast."""

    module: nn.Module

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> NoReturn:
        """DistributedDataParallel reads it."""
        raise UsageError(
            "DistributedDataParallel(DistributedModel): the DistributedModel averages gradients over replicas itself, stage by stage; set "
            "ddp: true in smp.init, start several replicas, and leave the wrapper out"
        )

    @property
    def _is_accelerate_prepared(self) -> NoReturn:
        """accelerate reads it."""
        raise UsageError(
            "accelerate.prepare(DistributedModel): accelerate would wrap it and run it outside of step functions; use "
            "smpc.integrations.accelerate.PipelineAccelerator (docs/hugging_face.md), or prepare the data loaders alone, and use "
            "@smp.step, model.backward, and smp.DistributedOptimizer, as in the loop of README.md"
        )

    @property
    def hf_device_map(self) -> NoReturn:
        """Hugging Face's Trainer reads it."""
        raise UsageError(
            "Trainer(model=DistributedModel): the Trainer of Hugging Face calls the model and differentiates its loss by itself, which a "
            "pipeline cannot do; give the module to smpc.integrations.huggingface.PipelineTrainer (docs/hugging_face.md), or write the "
            "loop with @smp.step and model.backward, as in README.md (examples/train_gpt2.py is a whole one)"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        """Refused."""
        raise UsageError(
            "copy.deepcopy(DistributedModel): there can be one, and this rank has a part of it; for an average of weights, keep "
            "{name: p.detach().clone() for name, p in model.local_named_parameters()} on every rank after the first step"
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refused."""
        raise UsageError(
            "pickle of a DistributedModel: this rank has a part of it; save model.state_dict(), called on every rank, or call "
            "smp.save_checkpoint"
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """`to`, `half`, `cuda` and similar methods use it."""
        dtypes = dict.fromkeys(p.dtype for p in self.module.parameters())
        wrong = [dtype for dtype in dtypes if fn(torch.empty(0, dtype=dtype)).dtype != dtype]
        if wrong:
            raise UsageError(
                f"the parameters of the DistributedModel are {wrong[0]}, and cannot be cast any more: cast the module before "
                "smp.DistributedModel, or set fp16: true or bf16: true in smp.init, which keeps fp32 masters"
            )
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self


def compiled_wrapper() -> UsageError:
    """The error for torch.compile(DistributedModel)."""
    return UsageError(
        "torch.compile(DistributedModel) would compile nothing: the stages run elsewhere. Call model.compile(), with the same "
        "arguments, before the first step, or compile the module, or blocks of it, before smp.DistributedModel"
    )


def check_marks(module: nn.Module, session: Session) -> None:
    """Raise ConfigError for partitions that do not exist; warn, once in a job, where partitions have no effect."""
    if manual_partition(module, session.config) is None and session.rank == 0 and read_marks(module):
        warnings.warn(
            "smp.partition and smp.set_partition have no effect: auto_partition is true, so the partitioner chooses; set it to "
            "false, and default_partition, to partition by hand",
            stacklevel=3,
        )


def check_cut(context: StepContext, what: str) -> None:
    """Raise UsageError for something that exists only once the model is partitioned."""
    if not context.is_cut:
        raise UsageError(
            f"{what}: the model is partitioned by the first step, and no step has run; run one, or use "
            "register_post_partition_hook"
        )


def check_fully_shard(options: Mapping[str, Any], session: Session) -> None:
    """Raise ConfigUnsupportedError for `fully_shard` with several passes per step; warn, once in a job, of options without effect."""
    if options["backward_passes_per_step"] > 1:
        raise ConfigUnsupportedError(
            "fully_shard: backward_passes_per_step must be 1, since gradients are averaged in every step, found "
            f"{options['backward_passes_per_step']}; use more microbatches"
        )
    if session.rank:
        return
    if session.mesh.rdp_size == 1:
        warnings.warn("fully_shard has no effect: there is one replica", stacklevel=3)
    defaults = {"bucket_cap_mb": 25, "gradient_as_bucket_view": False, "overlapping": True}
    ignored = [name for name, default in defaults.items() if options[name] != default]
    if ignored:
        names = ", ".join("overlapping_allreduce" if name == "overlapping" else name for name in ignored)
        warnings.warn(
            f"{names}: without effect under fully_shard, which has no buckets and averages in the last backward",
            stacklevel=3,
        )


def check_context(options: Mapping[str, Any], measures: Measures) -> None:
    """Raise ConfigError or ConfigUnsupportedError for settings that do not combine with context parallelism."""
    if measures:
        raise ConfigError(
            "trace_execution_times: not with context_parallel_degree above 1, nor is trace_memory_usage: they measure the whole model; "
            "leave one of them out"
        )
    if options["backward_passes_per_step"] > 1:
        raise ConfigUnsupportedError(
            "context_parallel_degree: backward_passes_per_step must be 1 with a degree above 1, found "
            f"{options['backward_passes_per_step']}; use more microbatches"
        )


def check_experts(measures: Measures) -> None:
    """Raise ConfigError for settings that do not combine with expert parallelism."""
    if measures:
        raise ConfigError(
            "trace_execution_times: not with expert_parallel_degree above 1, nor is trace_memory_usage: one rank measures the whole "
            "model, and others have experts of it; leave one of them out"
        )


def check_join(options: Mapping[str, Any], session: Session) -> None:
    """Raise ConfigUnsupportedError if replicas need each other in every step, so that `model.join` cannot let one leave."""
    config = session.config
    if config.shard_optimizer_state:
        raise ConfigUnsupportedError(
            "join: with shard_optimizer_state, replicas need each other's updates in every step; give all replicas as many batches, or "
            "leave shard_optimizer_state out"
        )
    if session.mesh.ep_size > 1 and len(state.scripts) > 1:
        raise ConfigUnsupportedError(
            "join: with expert_parallel_degree above 1 and several models, ranks that are over would have to run the steps of all of them; "
            "give all ranks as many batches"
        )
    if session.mesh.tp_size > 1 and options["backward_passes_per_step"] > 1:
        raise ConfigUnsupportedError(
            "join: with tensor_parallel_degree above 1, backward_passes_per_step must be 1, found "
            f"{options['backward_passes_per_step']}"
        )


def check_several(module: nn.Module) -> None:
    """Raise an error for another model in the session, naming all settings that do not combine with several models."""
    session, wrong = state.session, []
    if session.config.fp16 or any(script.scaler is not None for script in state.scripts):
        wrong.append("a loss scale (fp16, GradScaler): it belongs to one model; use bf16")
    if session.mesh.tp_size > 1:
        wrong.append("tensor parallelism")
    if session.mesh.cp_size > 1:
        wrong.append("context parallelism")
    if session.is_sharded or session.config.shard_optimizer_state:
        wrong.append("sharded parameters or optimizer state")
    if wrong:
        raise ConfigUnsupportedError(
            "\n".join(["there is a DistributedModel already, and with several there can be no:", *wrong])
        )
    own = {id(parameter) for parameter in module.parameters()}
    for script in state.with_models:
        if any(id(parameter) in own for parameter in script.model.parameters()):
            raise UsageError(
                "module: it shares parameters with another DistributedModel; wrap a copy, or one module around both"
            )
        entries = () if script.optimizer is None else script.optimizer.param_groups
        if any(id(entry) in own for group in entries for entry in group["params"]):
            raise UsageError(
                "there is a DistributedOptimizer of this module already; where there are several models, construct each "
                "smp.DistributedModel before its smp.DistributedOptimizer"
            )


def check_arguments(
    module: Any, trace_device: Any, backward_passes_per_step: Any, bucket_cap_mb: Any, flags: Mapping[str, Any]
) -> None:
    """Raise ConfigError or UsageError for wrong arguments, or a second model; a flag may be 0 or 1."""
    if not isinstance(module, nn.Module):
        raise ConfigTypeError(f"module: expected a torch.nn.Module, found {type(module).__name__}")
    if isinstance(module, (NotWrapped, nn.parallel.DistributedDataParallel)):
        raise ConfigError(
            f"module: expected the plain model, found a {type(module).__name__}; DistributedModel handles data parallelism itself"
        )
    if trace_device not in ("cpu", "gpu"):
        raise ConfigError(f"trace_device: expected 'cpu' or 'gpu', found {trace_device!r}")
    wrong = [f"{name}: expected True or False, found {value!r}" for name, value in flags.items() if not _is_flag(value)]
    if isinstance(bucket_cap_mb, bool) or not isinstance(bucket_cap_mb, (int, float)) or not bucket_cap_mb > 0:
        wrong.append(f"bucket_cap_mb: expected a number of MiB above 0, found {bucket_cap_mb!r}")
    if isinstance(backward_passes_per_step, bool) or not isinstance(backward_passes_per_step, int):
        wrong.append(f"backward_passes_per_step: expected an int, found {backward_passes_per_step!r}")
    elif backward_passes_per_step < 1:
        wrong.append(f"backward_passes_per_step: expected at least 1, found {backward_passes_per_step}")
    if wrong:
        raise ConfigError("\n".join(wrong))
    if flags["trace_execution_times"] and trace_device == "cpu":
        raise ConfigError(
            "trace_execution_times: must be False if trace_device is 'cpu': times are measured where the model will run, which is what "
            "trace_device 'gpu' stands for"
        )
    if state.with_models:
        check_several(module)


def _is_flag(value: Any) -> bool:
    return isinstance(value, int) and value in (0, 1)
