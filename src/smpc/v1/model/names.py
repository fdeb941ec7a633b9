"""The parameters, buffers and modules of a distributed model, by their names in the user's module, and which of them this rank holds.

`TensorParallelModel` says which of them tensor parallelism splits, and over which ranks their gradients are averaged.

Source: public SMP v1 API ("smdistributed.modelparallel.torch.DistributedModel").
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from smpc.v1.model.checks import check_cut
from smpc.v1.model.replication import Replicated
from smpc.v1.steps.context import StepContext
from smpc.v1.steps.pipeline import Pipeline


class NamedModel(nn.Module):
    """Base class with these methods."""

    module: nn.Module
    _context: StepContext
    _pipeline: Pipeline | None

    def get_module(self) -> nn.Module:
        """The module that was passed. With a pipeline, parameters of other ranks are empty in it.

        `model.module` is the same without `ddp`; with it, a wrapper, whose `module` is this one.
        """
        return self.module.module if isinstance(self.module, Replicated) else self.module

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """All parameters of the module, by their names in it; other ranks' are empty once it is partitioned."""
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """All buffers of the module, by their names in it."""
        return self.module.named_buffers(prefix, recurse, remove_duplicate)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """All modules of the module, by their names in it."""
        modules: Iterator[tuple[str, nn.Module]] = self.module.named_modules(memo, prefix, remove_duplicate)
        return modules

    def local_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters of this rank. Raises UsageError before the partition."""
        check_cut(self._context, "local_named_parameters")
        is_local = self._context.placement.is_local
        return (pair for pair in self.module.named_parameters() if is_local(pair[0]))

    def local_parameters(self) -> Iterator[nn.Parameter]:
        """Parameters of this rank. Raises UsageError before the partition."""
        return (parameter for _, parameter in self.local_named_parameters())

    def is_first_holder(self, param: nn.Parameter) -> bool:
        """Whether this rank is the first of the pipeline ranks that hold the parameter; True for a parameter outside the model."""
        return self._context.placement.is_first(param)

    def local_named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Buffers of this rank. Raises UsageError before the partition."""
        check_cut(self._context, "local_named_buffers")
        is_local = self._context.placement.is_local
        return (pair for pair in self.module.named_buffers() if is_local(pair[0]))

    def local_buffers(self) -> Iterator[Tensor]:
        """Buffers of this rank. Raises UsageError before the partition."""
        return (buffer for _, buffer in self.local_named_buffers())

    def local_named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Modules that are wholly on this rank. Raises UsageError before the partition."""
        check_cut(self._context, "local_named_modules")
        if self._pipeline is None:
            return self.named_modules()
        tops = self._pipeline.own_modules()
        below = tuple(f"{name}." for name in tops)
        return ((n, m) for n, m in self.named_modules() if n in tops or n.startswith(below))

    def local_modules(self) -> Iterator[nn.Module]:
        """Modules that are wholly on this rank. Raises UsageError before the partition."""
        return (module for _, module in self.local_named_modules())


class TensorParallelModel(NamedModel):
    """Answers of `smpc.v1.layout.tensor_parallel.Distribution`."""

    def distributed_modules(self) -> Iterator[nn.Module]:
        """Tensor-parallel modules."""
        return self._context.distribution.modules()

    def is_distributed_parameter(self, param: nn.Parameter) -> bool:
        """Whether tensor parallelism splits the parameter."""
        return self._context.distribution.is_sharded(param)

    def has_experts_apart(self, param: Tensor) -> bool:
        """Whether expert-parallel ranks hold different experts of the parameter."""
        experts = self._context.experts
        return experts is not None and param in experts

    def is_distributed_buffer(self, buf: Tensor) -> bool:
        """Whether tensor parallelism splits the buffer."""
        return self._context.distribution.is_sharded(buf)

    def is_scaled_batch_parameter(self, param: nn.Parameter) -> bool:
        """Whether the parameter works on the batch of the whole tensor-parallel group."""
        return self._context.distribution.is_scaled(param)

    def is_scaled_batch_buffer(self, buf: Tensor) -> bool:
        """Whether the buffer works on the batch of the whole tensor-parallel group."""
        return self._context.distribution.is_scaled(buf)

    def default_reducer_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters whose gradients are averaged over the data-parallel group."""
        is_scaled = self._context.distribution.is_scaled
        return (pair for pair in self.local_named_parameters() if not is_scaled(pair[1]))

    def scaled_batch_reducer_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters whose gradients are averaged over the reduced-data-parallel group."""
        is_scaled = self._context.distribution.is_scaled
        return (pair for pair in self.local_named_parameters() if is_scaled(pair[1]))
