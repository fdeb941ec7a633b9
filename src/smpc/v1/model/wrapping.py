"""Errors for other libraries that wrap, copy or cast a DistributedModel and would train it wrongly; each says what to do.

    DistributedDataParallel(model)              it would average gradients of different stages
    accelerate.prepare(model), HF Trainer       they wrap, move and call the model, and differentiate its loss, outside of step functions
    copy.deepcopy(model), torch.save(model)     (averages of weights, `AveragedModel`) parameters of other ranks would be missing
    model.half(), model.to(dtype)               programs and masters are made for the dtypes that the module has
    torch.compile(model)                        a step function would be compiled around a call that is none; model.compile() is right

Each of these libraries first reads an attribute of its own from the model: reading it raises the error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn

from smpc.errors import UsageError


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
