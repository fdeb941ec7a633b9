"""Which parts of a distributed model tensor parallelism splits, and over which ranks their gradients are averaged.

Source: public SMP v1 API ("smdistributed.modelparallel.torch.DistributedModel").
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from smpc.v1.model.names import NamedModel


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
