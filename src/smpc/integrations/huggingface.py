"""Hugging Face's Trainer, training a pipeline: the same arguments, callbacks, files and losses.

    from smpc.integrations.huggingface import PipelineTrainer

    trainer = PipelineTrainer({"pipeline_parallel_degree": 2, "microbatches": 4}, model=model, args=args, train_dataset=data)
    trainer.train()

    smpc run -n 2 train.py

The Trainer keeps control of data loaders, optimizers, schedulers, accumulation, clipping, evaluation, callbacks, checkpoints. This class
overrides public methods for one batch (`training_step`, `prediction_step`), for saving (`save_model`), for the accelerator and for the
optimizer.

Terms
    batch           `per_device_train_batch_size` samples of one replica, cut into the microbatches of a step. One that does not divide
                    runs whole in every microbatch: slower, and the same gradients
    num_items       the items of all batches of one update, by which models divide the sum of their losses. A microbatch gets its share,
                    `num_items / microbatches`, and the mean over microbatches is then the loss of the batch, for a model that divides by
                    it. A mean over the labels that count is weighed by their number (`smpc.integrations.label_means`). Any other mean
                    is taken as it is

Files are in the Trainer's format: `model.safetensors`, and `optimizer.pt` of the whole model, so that a job on another number of ranks,
or the Trainer itself, resumes them.
"""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

import smpc.v1 as smp
from smpc.errors import ConfigError, ConfigUnsupportedError, StepError, UsageError
from smpc.integrations.accelerate import PipelineAccelerator
from smpc.integrations.batches import divides, joined, start, uneven_labels, warn_of_uneven_labels
from smpc.integrations.label_means import LabelMean
from smpc.integrations.whole_batch_check import HeardModel, Rehearsal, changed, check_loss_is_mean, marks

try:
    from safetensors.torch import save_file
    from transformers import Trainer, TrainerCallback, TrainingArguments
except ModuleNotFoundError as error:
    needed = f"smpc.integrations.huggingface needs {error.name}: pip install 'smpc[hf,accelerate]'"
    raise ModuleNotFoundError(needed, name=error.name) from error

_REMEDY = "give forward an argument num_items_in_batch, or pass a compute_loss_func, to divide by the items of the whole batch"
_CHECKPOINTING = ("activation_checkpointing_enable", "gradient_checkpointing_enable")


class PipelineTrainer(Trainer):  # type: ignore[misc]
    """The Trainer for a model that is spread over several ranks; construct it on every rank.

    `pipeline`: the configuration of `smp.init`; None where the script has called that. The other arguments are the Trainer's.
    `self.model` is the `smp.DistributedModel`, and `self.model.get_module()` the module that was given.

    Raises ConfigUnsupportedError, with a line for each, for arguments of the Trainer that a pipeline cannot follow.
    """

    model: Any
    optimizer: Any
    accelerator: Any

    def __init__(self, pipeline: Mapping[str, Any] | None = None, *args: Any, **kwargs: Any) -> None:
        if pipeline is not None and not isinstance(pipeline, Mapping):
            raise ConfigError(
                f"pipeline: expected the configuration of smp.init as the first argument, found {type(pipeline).__name__}; "
                "PipelineTrainer({'pipeline_parallel_degree': 2}, model=model, args=args)"
            )
        bound = dict(zip(("model", "args"), args, strict=False)) | kwargs
        if len(args) > 2:
            raise ConfigError("PipelineTrainer: pass what comes after the model and its arguments by name")
        _check_training_arguments(bound)
        self._has_warned = False
        self._rehearsals = Rehearsal(), Rehearsal()  # of training and of evaluation
        self._label_means = LabelMean(), LabelMean()
        self._runs_whole = False  # the batch, which does not divide, in every microbatch
        self._batch: Mapping[str, Any] = {}  # the one that runs
        self._given_args = bound.get("args") or TrainingArguments(output_dir="tmp_trainer")
        start(
            pipeline,
            "PipelineTrainer",
            "PipelineTrainer({'pipeline_parallel_degree': 2, 'microbatches': 4}, model=model, args=args)",
        )
        _check_ranks(self._given_args)
        super().__init__(**{**bound, "args": _left_in_place(self._given_args)})
        module = self.model
        self.model_wrapped = self.model = smp.DistributedModel(module)  # averages gradients of replicas in every batch
        base = getattr(module, "get_base_model", None)
        if callable(base):  # an adapter of peft passes its arguments on: the columns of a batch are the inner model's
            self.model.show_signature(base())
        for name in _CHECKPOINTING:  # which the Trainer calls as training begins
            if callable(enable := getattr(module, name, None)):
                vars(self.model)[name] = enable
        self.callback_handler.model = self.model
        self._num_counted = _num_counted(module)
        self._mixed_mesh_grads = False  # no DTensors: the Trainer need not look at gradients that other ranks have
        self.add_callback(_SavedOptimizerState(self))

    def create_accelerator_and_postprocess(self) -> None:
        """The Trainer's accelerator, which knows of the pipeline."""
        super().create_accelerator_and_postprocess()
        self.accelerator = PipelineAccelerator.of(self.accelerator)
        self.accelerator.optimizer_type = _GatheredOptimizer  # whoever makes the torch optimizer
        self.gather_function = self.accelerator.gather_for_metrics

    def create_optimizer(self, model: nn.Module | None = None) -> Optimizer:
        """The Trainer's optimizer of the module's parameters, as one of the distributed model."""
        if not isinstance(self.optimizer, _GatheredOptimizer):
            super().create_optimizer(self.model.get_module())
            self.optimizer = _GatheredOptimizer(self.optimizer)
        return self.optimizer

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """Samples of one update, over all replicas."""
        return int(self._train_batch_size * args.gradient_accumulation_steps * smp.dp_size())

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """This rank's share of a batch's operations, which the Trainer adds up: 6 for each element of the main input and parameter."""
        main = inputs.get(getattr(self.model, "main_input_name", "input_ids"))
        return 6 * self._num_counted * main.numel() // smp.pp_size() if isinstance(main, Tensor) else 0

    # -- a batch -----------------------------------------------------------------------------------------------------------

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Forward and backward of one batch, all microbatches of it; the mean loss, on every rank."""
        model.train()
        self.optimizer.forget()
        divisor = 1 if self._is_scaled(num_items_in_batch) else self.current_gradient_accumulation_steps
        step, share = self._cut(inputs, num_items_in_batch, _train_in_trainer, _train_whole)
        loss: Tensor = step(model, dict(inputs), self, share, divisor).reduce_mean()
        return loss.detach()

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Any, Any, Any]:
        """Loss, logits and labels of one batch, on every rank."""
        inputs = self.accelerator_inputs(inputs)
        names = self.label_names
        has_labels = bool(names) and all(inputs.get(name) is not None for name in names)
        has_loss = has_labels or (not names and bool(inputs.get("return_loss", self.can_return_loss)))
        labels = None
        if has_loss:
            found = tuple(_detached_in_trainer(inputs.get(name)) for name in names)
            labels = found[0] if len(found) == 1 else found
        if ignore_keys is None:
            config = getattr(self.model, "config", None)  # as the Trainer does, which trains plain modules too
            ignore_keys = (
                [] if config is None else list(getattr(config, "keys_to_ignore_at_inference", ["past_key_values"]))
            )
        num_items = self.get_batch_samples(iter([inputs]), 1, self.args.device)[1] if has_loss else None
        step, share = self._cut(inputs, num_items, _predict_in_trainer, _predict_whole)
        with torch.no_grad():
            loss, logits = step(model, dict(inputs), self, share, has_loss, prediction_loss_only, tuple(ignore_keys))
        mean = None if loss is None else loss.reduce_mean()
        if prediction_loss_only:
            return mean, None, None
        found = joined(logits, whole=step is _predict_whole)
        return mean, found[0] if len(found) == 1 else found, labels

    def accelerator_inputs(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """The batch where this rank computes."""
        device = self.args.device
        return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in inputs.items()}

    def _is_scaled(self, num_items: Any) -> bool:
        """Whether the loss already covers all batches of an update, as in the Trainer."""
        chosen = getattr(self, "loss_is_scaled_for_ga", None)
        if chosen is not None:
            return bool(chosen)
        return (self.model_accepts_loss_kwargs and num_items is not None) or self.compute_loss_func is not None

    def compute_checked(self, model: Any, inputs: dict[str, Any], share: Tensor | None, *, outputs: bool) -> Any:
        """`compute_loss` of a microbatch. Raises StepError if it changes the trainer, or if its mean is not the batch's loss."""
        divisor = None if share is None else ("num_items_in_batch", share)
        before, given = self._marks(), dict(inputs)  # compute_loss may take entries out
        heard = HeardModel(model, divisor=divisor)
        options = {"return_outputs": True} if outputs else {}
        computed = self.compute_loss(heard, inputs, **options, num_items_in_batch=share)
        if found := changed(before, self._marks()):
            raise StepError(
                f"compute_loss: expected no effect but what it returns, found that it changed {', '.join(found)} of the trainer: a pipeline"
                " runs it for every microbatch, on the last rank alone; compute such numbers in compute_metrics or in a callback"
            )
        loss: Tensor = computed[0] if outputs else computed
        rehearsal = self._rehearsals[outputs]
        is_models_own = any(loss is each for each in tree_leaves(heard.returned))
        if is_models_own and not (self._runs_whole or heard.has_divided):
            weighed = self._weighed(loss, heard.returned[-1], given, self._label_means[outputs])
            return (weighed, *computed[1:]) if outputs else weighed
        is_due = not (self._runs_whole or is_models_own) and rehearsal.is_due(heard.returned)
        if is_due and rehearsal.add(given, heard.returned[0], {"loss": loss}, 1.0):
            items = None if share is None else share * smp.state.cfg.microbatches
            exact = rehearsal.run(lambda batch, output: self._rehearsed(batch, output, items), {})
            remedy = "give compute_loss a sum divided by num_items_in_batch, or set microbatches: 1"
            check_loss_is_mean(exact, "loss", "compute_loss", remedy)
        return computed

    def _weighed(self, loss: Tensor, output: Any, inputs: Mapping[str, Any], means: LabelMean) -> Tensor:
        """The model's own loss of a microbatch, where it does not divide by the items of the batch, as a part of the batch's."""
        name = next(iter(self.label_names), "labels")
        found = means.weighed(loss, output, inputs.get(name), self._batch.get(name))
        if found is None and not self._has_warned:
            self._has_warned = warn_of_uneven_labels(uneven_labels(self._batch), _REMEDY)
        return loss if found is None else found

    def _rehearsed(self, batch: Any, output: Any, items: Tensor | None) -> dict[str, Tensor]:
        """The loss of a whole batch, of which the model has returned this."""
        kept, self.model = self.model, HeardModel(self.model, output)
        try:
            return {"loss": self.compute_loss(self.model, dict(batch), num_items_in_batch=items)}
        finally:
            self.model = kept

    def _marks(self) -> dict[str, Any]:
        """Of the attributes that a script's own compute_loss may change."""
        if type(self).compute_loss is Trainer.compute_loss:
            return {}
        return marks(
            self,
            (
                "model",
                "model_wrapped",
                "optimizer",
                "accelerator",
                "_rehearsals",
                "_label_means",
                "_has_warned",
                "_batch",
            ),
            depth=1,
        )

    def _cut(self, inputs: Mapping[str, Any], num_items: Any, cut: Any, whole: Any) -> tuple[Any, Tensor | None]:
        """The step function for a batch of this size, and the divisor of one microbatch's losses."""
        is_cut = divides(inputs)
        self._runs_whole, self._batch = not is_cut, inputs
        for rehearsal in self._rehearsals:
            rehearsal.begin()
        if num_items is None:
            return (cut if is_cut else whole), None
        items = torch.as_tensor(num_items, dtype=torch.float32, device=self.args.device)
        return (cut, items / smp.state.cfg.microbatches) if is_cut else (whole, items)

    # -- files -------------------------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the whole model with `save_pretrained`, as the Trainer does; call it on every rank."""
        folder = output_dir or self.args.output_dir
        weights = self.model.state_dict(gather_to_rank0=True)
        if _internal_call and isinstance(self.optimizer, _GatheredOptimizer) and not self.args.save_only_model:
            self.optimizer.gather()
        if self.args.should_save:
            self._write(folder, weights, own_names=_internal_call)
        smp.barrier()
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _write(self, folder: str, weights: dict[str, Tensor], *, own_names: bool) -> None:
        """On one rank. `own_names`: weights by the module's names, to resume from; transformers 5 may write older ones."""
        os.makedirs(folder, exist_ok=True)
        module: Any = self.model.get_module()
        if hasattr(module, "save_pretrained"):
            knows = "save_original_format" in inspect.signature(module.save_pretrained).parameters
            format_of = {"save_original_format": False} if own_names and knows else {}
            module.save_pretrained(folder, state_dict=weights, **format_of)
        has_weights = any(name.startswith("model") and ".safetensors" in name for name in os.listdir(folder))
        if not has_weights and (
            own_names or not hasattr(module, "save_pretrained")
        ):  # adapters alone are not resumed from
            own = {name: value.clone() for name, value in weights.items()}
            save_file(own, os.path.join(folder, "model.safetensors"), metadata={"format": "pt"})
        for each in (self.processing_class, getattr(self.data_collator, "tokenizer", None)):
            if each is not None:
                each.save_pretrained(folder)
                break
        torch.save(self._given_args, os.path.join(folder, "training_args.bin"))


class _GatheredOptimizer(smp.DistributedOptimizer):
    """The Trainer writes the optimizer's state on one rank alone, where it must have been gathered before."""

    _gathered: dict[str, Any] | None = None

    def gather(self) -> None:
        """Gather it now, on every rank, for rank 0."""
        self._gathered = super().state_dict(gather_to_rank0=True)

    def forget(self) -> None:
        """It is going to change."""
        self._gathered = None

    def state_dict(self, gather_to_rank0: bool = False) -> dict[str, Any]:
        """The gathered state, cached or gathered now."""
        return super().state_dict(gather_to_rank0) if self._gathered is None else self._gathered


class _SavedOptimizerState(TrainerCallback):  # type: ignore[misc]
    """Gives back the memory of an optimizer's state that has been written."""

    def __init__(self, trainer: PipelineTrainer) -> None:
        self._trainer = trainer

    def on_save(self, *args: Any, **kwargs: Any) -> None:
        """After a checkpoint."""
        self._trainer.optimizer.forget()


# -- step functions: (model, inputs, trainer, share of num_items, ...) -----------------------------------------------------


def _train_body(model: Any, inputs: dict[str, Any], trainer: Any, share: Tensor | None, divisor: int) -> Tensor:
    with trainer.compute_loss_context_manager():
        loss: Tensor = trainer.compute_checked(model, inputs, share, outputs=False)
    model.backward(loss if divisor == 1 else loss / divisor)
    return loss if divisor == 1 else loss / divisor


def _predict_body(
    model: Any,
    inputs: dict[str, Any],
    trainer: Any,
    share: Tensor | None,
    has_loss: bool,
    loss_only: bool,
    ignored: tuple[str, ...],
) -> tuple[Tensor | None, tuple[Any, ...]]:
    with trainer.compute_loss_context_manager():
        if has_loss:
            loss, outputs = trainer.compute_checked(model, inputs, share, outputs=True)
        else:
            loss, outputs = None, model(**inputs)
    if loss_only:
        return loss, ()
    if isinstance(outputs, Mapping):
        skipped = {*ignored, "loss"} if has_loss else {*ignored}
        return loss, tuple(value for name, value in outputs.items() if name not in skipped)
    return loss, tuple(outputs[1:] if has_loss else outputs)


@smp.step
def _train_in_trainer(model: Any, inputs: Any, trainer: Any, share: Any, divisor: int) -> Tensor:
    return _train_body(model, inputs, trainer, share, divisor)


@smp.step(non_split_inputs=["inputs"])
def _train_whole(model: Any, inputs: Any, trainer: Any, share: Any, divisor: int) -> Tensor:
    return _train_body(model, dict(inputs), trainer, share, divisor)


@smp.step
def _predict_in_trainer(
    model: Any, inputs: Any, trainer: Any, share: Any, has_loss: bool, loss_only: bool, ignored: Any
) -> Any:
    return _predict_body(model, inputs, trainer, share, has_loss, loss_only, ignored)


@smp.step(non_split_inputs=["inputs"])
def _predict_whole(
    model: Any, inputs: Any, trainer: Any, share: Any, has_loss: bool, loss_only: bool, ignored: Any
) -> Any:
    return _predict_body(model, dict(inputs), trainer, share, has_loss, loss_only, ignored)


def _num_counted(module: nn.Module) -> int:
    """Parameters that operations are counted for."""
    count = getattr(module, "num_parameters", None)
    return int(count(exclude_embeddings=True)) if callable(count) else sum(p.numel() for p in module.parameters())


def _detached_in_trainer(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


# -- before anything begins ------------------------------------------------------------------------------------------------


def _check_ranks(args: TrainingArguments) -> None:
    """Raise UsageError unless the Trainer knows of the ranks that smpc knows of."""
    if (args.world_size, args.process_index) != (smp.size(), smp.rank()):
        raise UsageError(
            f"PipelineTrainer: expected rank {smp.rank()} of {smp.size()}, found that TrainingArguments take this process for rank "
            f"{args.process_index} of {args.world_size}; start the script with smpc run or torchrun, which set RANK, LOCAL_RANK and "
            "WORLD_SIZE; where there is no GPU, pass use_cpu=True to TrainingArguments"
        )


def _check_training_arguments(given: Mapping[str, Any]) -> None:
    """Raise ConfigUnsupportedError for options that a pipeline cannot support."""
    args, wrong = given.get("args"), []
    if isinstance(given.get("model"), smp.DistributedModel):
        wrong.append("model: expected the module itself; PipelineTrainer makes the DistributedModel")
    if given.get("model_init") is not None:
        wrong.append("model_init: there can be one model in a session; pass the model")
    precision = "set it in the pipeline's configuration, which keeps fp32 masters"
    reasons = {
        "fp16": precision,
        "bf16": precision,
        "fp16_full_eval": "parameters keep their dtype",
        "bf16_full_eval": "parameters keep their dtype",
        "auto_find_batch_size": "memory is predicted: see smpc compile",
        "fsdp": "fully_shard and sharded_data_parallel_degree of the configuration shard parameters",
        "deepspeed": "the model is distributed by smpc",
        "torch_compile": "call model.compile() on the module, or compile blocks of it, before",
        "use_liger_kernel": "set kernels in the pipeline's configuration",
        "neftune_noise_alpha": "it hooks a module that the pipeline cuts",
    }
    wrong += [f"{name}: not with a pipeline; {why}" for name, why in reasons.items() if getattr(args, name, None)]
    if wrong:
        raise ConfigUnsupportedError("\n".join(["PipelineTrainer:", *wrong]))


def _left_in_place(args: TrainingArguments) -> TrainingArguments:
    """The same arguments, but that the Trainer leaves the model where it is: whole, it may be larger than the device."""
    kind = type(args)
    own = copy.copy(args)
    own.__class__ = type(kind.__name__, (kind,), {"place_model_on_device": False, "__module__": kind.__module__})
    return own
