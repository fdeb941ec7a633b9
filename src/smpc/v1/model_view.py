"""What of a distributed model is where: its parameters, buffers and modules by their names in the user's module, and this rank's of them.

Source: public SMP v1 API ("smdistributed.modelparallel.torch.DistributedModel").
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from smpc.errors import UsageError
from smpc.v1.control import Control
from smpc.v1.pipeline import Pipeline
from smpc.v1.placement import Placement
from smpc.v1.tensor_parallel import Distribution


class ModelView(nn.Module):
    """The part of `DistributedModel` that changes nothing. The class itself sets the attributes."""

    module: nn.Module
    _pipeline: Pipeline | None
    _control: Control  # with a pipeline
    _placement: Placement
    _distribution: Distribution

    @property
    def partitioned(self) -> bool:
        """Whether the model has been partitioned: by the first step, or from the start where there is no pipeline."""
        return self._pipeline is None or self._pipeline.first is not None

    def get_module(self) -> nn.Module:
        """The module that was given. With a pipeline, parameters of other ranks are empty in it."""
        return self.module

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """All parameters of the module, by their names in it; those of other ranks are empty once it is partitioned."""
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
        self._require_partition("local_named_parameters")
        return (pair for pair in self.module.named_parameters() if self._placement.is_local(pair[0]))

    def local_parameters(self) -> Iterator[nn.Parameter]:
        """Parameters of this rank. Raises UsageError before the partition."""
        return (parameter for _, parameter in self.local_named_parameters())

    def is_first_holder(self, param: nn.Parameter) -> bool:
        """Whether this rank is the first of the pipeline ranks that hold the parameter; True for what is not the model's."""
        return self._placement.is_first(param)

    def local_named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Buffers of this rank. Raises UsageError before the partition."""
        self._require_partition("local_named_buffers")
        return (pair for pair in self.module.named_buffers() if self._placement.is_local(pair[0]))

    def local_buffers(self) -> Iterator[Tensor]:
        """Buffers of this rank. Raises UsageError before the partition."""
        return (buffer for _, buffer in self.local_named_buffers())

    def local_named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Modules that lie wholly on this rank. Raises UsageError before the partition."""
        self._require_partition("local_named_modules")
        if self._pipeline is None:
            return self.named_modules()
        rank = self._control.rank
        tops = tuple(name for stage in self._pipeline.plan.stages if stage.rank == rank for name in stage.modules)
        below = tuple(f"{name}." for name in tops)
        return ((n, m) for n, m in self.named_modules() if n in tops or n.startswith(below))

    def local_modules(self) -> Iterator[nn.Module]:
        """Modules that lie wholly on this rank. Raises UsageError before the partition."""
        return (module for _, module in self.local_named_modules())

    def distributed_modules(self) -> Iterator[nn.Module]:
        """Tensor-parallel modules."""
        return self._distribution.modules()

    def is_distributed_parameter(self, param: nn.Parameter) -> bool:
        """Whether tensor parallelism splits the parameter."""
        return self._distribution.is_sharded(param)

    def is_distributed_buffer(self, buf: Tensor) -> bool:
        """Whether tensor parallelism splits the buffer."""
        return self._distribution.is_sharded(buf)

    def is_scaled_batch_parameter(self, param: nn.Parameter) -> bool:
        """Whether the parameter works on the batch of the whole tensor-parallel group."""
        return self._distribution.is_scaled(param)

    def is_scaled_batch_buffer(self, buf: Tensor) -> bool:
        """Whether the buffer works on the batch of the whole tensor-parallel group."""
        return self._distribution.is_scaled(buf)

    def default_reducer_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters whose gradients are averaged over the data-parallel group."""
        return (pair for pair in self.local_named_parameters() if not self._distribution.is_scaled(pair[1]))

    def scaled_batch_reducer_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters whose gradients are averaged over the reduced-data-parallel group."""
        return (pair for pair in self.local_named_parameters() if self._distribution.is_scaled(pair[1]))

    def _require_partition(self, what: str) -> None:
        if not self.partitioned:
            raise UsageError(
                f"{what}: the model is partitioned by the first step, and no step has run; run one, or use "
                "register_post_partition_hook"
            )
