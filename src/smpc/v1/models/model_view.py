"""What can be learned of a distributed model: what of it is where, by the names in the user's module, and what its steps need and take.

Source: public SMP v1 API ("smdistributed.modelparallel.torch.DistributedModel").
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from smpc.errors import UsageError
from smpc.mesh import Axis
from smpc.observe import Observer, StepCallback
from smpc.partitioner.plan import Plan
from smpc.v1.models.placement import Placement
from smpc.v1.models.tensor_parallel import Distribution
from smpc.v1.session.comm import gather_objects
from smpc.v1.state import state
from smpc.v1.steps.control import Control
from smpc.v1.steps.pipeline import Pipeline

if TYPE_CHECKING:
    from smpc.report.measured import Comparison


class ModelView(nn.Module):
    """The part of `DistributedModel` that changes nothing. The class itself sets the attributes."""

    module: nn.Module
    _pipeline: Pipeline | None
    _control: Control  # with a pipeline
    _placement: Placement
    _distribution: Distribution
    _observer: Observer

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

    # -- what steps need and take ----------------------------------------------------------------------------------------

    def register_step_callback(self, callback: StepCallback) -> RemovableHandle:
        """Call `callback(info)` on this rank after every step, with a `smpc.StepInfo`. Ranks may have different callbacks."""
        return self._observer.register(callback)

    def observe(self, num_steps: int = 20) -> None:
        """Measure memory in the next step, and times in the `num_steps` after it, for `report`. Call it on every rank.

        What `smpc run --report` or `--trace` asked for is dropped.
        """
        self._observer.observe(num_steps)

    def report(self) -> Comparison:
        """Predicted against measured memory and time of every rank, stage and step; `print` it. Call it on every rank.

        Raises UsageError before the partition, without a pipeline, and where no step has been observed.
        """
        from smpc.report.measured import compare

        session, plan = state.session, self._plan()
        if plan is None:
            raise UsageError(
                "report: nothing is predicted of a model that is not cut; pipeline_parallel_degree is 1, or no step has run"
            )
        records = gather_objects(
            self._observer.record, session.groups[Axis.WORLD], session.message_device, session.device
        )
        if not any(step.training for record in records for step in record.steps):
            raise UsageError(
                "report: no training step has been measured; call model.observe() on every rank, then train"
            )
        return compare(plan, records)

    def optimizer_step(self) -> contextlib.AbstractContextManager[None]:
        """Around the optimizer's step; DistributedOptimizer calls it."""
        return self._observer.optimizer_step()

    def _plan(self) -> Plan | None:
        return None if self._pipeline is None or self._pipeline.first is None else self._pipeline.plan

    def _held(self) -> Iterator[Tensor]:
        """Optimizer state and, without a pipeline, what the model has; a pipeline's runtime counts its own."""
        if self._pipeline is None:
            parameters = list(self.module.parameters())
            yield from (*parameters, *self.module.buffers())
            yield from (parameter.grad for parameter in parameters if parameter.grad is not None)
        if state.optimizer is not None:
            for own in state.optimizer.state.values():
                yield from (value for value in own.values() if isinstance(value, Tensor))
            yield from state.optimizer.masters
