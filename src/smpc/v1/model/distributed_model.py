"""`smp.DistributedModel`: the model of a training script, partitioned by its first step.

    model = smp.DistributedModel(module)              # on every rank, after smp.init
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters()))

    @smp.step
    def train_step(model, ids):
        loss = model(input_ids=ids, labels=ids).loss
        model.backward(loss)
        return loss

With a pipeline, the module stays whole on every rank until the first step, which records and cuts it; then each rank keeps its own part.
Without one, it is placed at once and, with replicas, made equal to replica 0's. Names are always the module's own.

Source: public SMP v1 API ("smdistributed.modelparallel.torch.DistributedModel").
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from smpc.errors import ConfigError, UsageError
from smpc.executor.failure.start import Phase
from smpc.v1.declare.recompute import apply_marks
from smpc.v1.layout.compiled_tensors import make_compiled_tensors
from smpc.v1.layout.experts import divide_experts
from smpc.v1.layout.placement import Placement
from smpc.v1.layout.tensor_parallel import Distribution
from smpc.v1.model.checks import (
    NotWrapped,
    check_arguments,
    check_context,
    check_experts,
    check_fully_shard,
    check_join,
    check_marks,
    compiled_wrapper,
)
from smpc.v1.model.names import TensorParallelModel
from smpc.v1.model.observed import ObservedModel, held_tensors, make_observer
from smpc.v1.model.replication import Replicated, Replication
from smpc.v1.model.stateful import ShownModel, StateExchange
from smpc.v1.session.connections import make_control, make_state_control, make_transport
from smpc.v1.session.precision import Precision, cast_module, half_dtype
from smpc.v1.session.process_state import Script, state
from smpc.v1.session.supervision import Supervision
from smpc.v1.session.wait_limits import enter
from smpc.v1.steps.arguments import StepBody
from smpc.v1.steps.calls import Gradients, ModelCalls, Tensors, cast_inputs, cast_outputs
from smpc.v1.steps.context import Hook, Measures, ModelHooks, StepContext
from smpc.v1.steps.context_parallel import make_shared_sequences
from smpc.v1.steps.join import Join
from smpc.v1.steps.pipeline import Pipeline
from smpc.v1.steps.step import StepRunner
from smpc.v1.steps.unpipelined import Single


class DistributedModel(ShownModel, TensorParallelModel, ObservedModel, NotWrapped):
    """A module, distributed over pipeline ranks and replicas; construct it on every rank, and several in the same order.

    `trace_device`: "cpu" or "gpu"; recording needs no device, so it matters only for `trace_execution_times`. `trace_execution_times`:
    before the model is cut, one rank runs it several times on the first microbatch, on its own device, and the plan uses the measured
    times; that device must hold a copy of the whole model, and `trace_device` must be "gpu" (a rank that computes on a CPU measures
    there). `overlapping_allreduce`: reduce gradients over replicas during the last backward pass, rather than after it.
    `backward_passes_per_step`: steps between two reductions. `average_grads_across_microbatches`: divide gradients by the number of
    microbatches. `trace_memory_usage`: tensor sizes are always known exactly; with True, that rank also measures the workspace of
    operations. The other options are DistributedDataParallel's, for replicas.

    `model(...)` and `model.backward(...)` can only be called in a step function.
    """

    def __init__(
        self,
        module: nn.Module,
        trace_device: str = "gpu",
        trace_execution_times: bool = False,
        overlapping_allreduce: bool = True,
        backward_passes_per_step: int = 1,
        average_grads_across_microbatches: bool = True,
        bucket_cap_mb: float = 25,
        trace_memory_usage: bool = False,
        broadcast_buffers: bool = True,
        gradient_as_bucket_view: bool = False,
    ) -> None:
        flags = {
            "trace_execution_times": trace_execution_times,
            "overlapping_allreduce": overlapping_allreduce,
            "average_grads_across_microbatches": average_grads_across_microbatches,
            "trace_memory_usage": trace_memory_usage,
            "broadcast_buffers": broadcast_buffers,
            "gradient_as_bucket_view": gradient_as_bucket_view,
        }
        check_arguments(module, trace_device, backward_passes_per_step, bucket_cap_mb, flags)
        super().__init__()
        session = state.session
        enter(Phase.MODEL)
        check_marks(module, session)
        options = {
            "bucket_cap_mb": bucket_cap_mb,
            "gradient_as_bucket_view": gradient_as_bucket_view,
            "broadcast_buffers": broadcast_buffers,
            "overlapping": overlapping_allreduce and session.config.overlapping_allreduce,
            "backward_passes_per_step": backward_passes_per_step,
        }
        if session.config.fully_shard or session.mesh.shard_size > 1:
            check_fully_shard(options, session)
        if session.mesh.cp_size > 1:
            check_context(options, Measures(trace_execution_times, trace_memory_usage))
        if session.mesh.ep_size > 1:
            check_experts(Measures(trace_execution_times, trace_memory_usage))
        self._pipeline: Pipeline | None = None
        script = state.new_script()
        context, end_of_watch = self._begin(
            module,
            Measures(trace_execution_times, trace_memory_usage),
            session.config.microbatches if average_grads_across_microbatches else 1,
            script,
        )
        self.module, self.training, self.slices = context.module, module.training, context.distribution.slices
        self._context, self._replication = context, Replication(context, options)
        self._runner = self._make_steps()
        if session.config.ddp:
            self.module = Replicated(context.module)
        self.show_signature(context.module)
        script.model, script.runner = self, self._runner
        state.module_manager.look_at(context.module)
        state.closers += [end_of_watch, self.close, *(begin() for begin in state.at_model)]
        enter(Phase.READY)

    def _begin(
        self, module: nn.Module, measures: Measures, divisor: int, script: Script
    ) -> tuple[StepContext, Callable[[], None]]:
        """Distribute and cast the module. Returns the context of its steps, and the function that ends their observation."""
        session = state.session
        distribution = Distribution(module, session, state.registry)
        module = distribution.module
        precision = Precision(half_dtype(session.config), script)
        cast_module(module, precision.dtype)
        tensors = make_compiled_tensors(module, session, distribution.slices, measures=bool(measures))
        if tensors is not None:
            distribution.take_over(tensors)
        is_first = script is state.scripts[0]
        experts = divide_experts(module, session, distribution.slices, needs_some=is_first)
        sequences = make_shared_sequences(module, session)
        placement = Placement(module, session.mesh.pp_rank(session.rank), session.device, distribution.slices)
        if experts is not None:
            experts.place(placement)
        has_pipeline = session.mesh.pp_size > 1 or tensors is not None or sequences is not None
        held = partial(held_tensors, module, script, has_pipeline=has_pipeline)
        first = None if is_first else state.scripts[0].model
        asked = session.observation if first is None else None  # the launcher's options apply to the first model
        observer, end_of_watch = make_observer(session, asked, held, self._predicted)
        context = StepContext(
            module=module,
            session=session,
            script=script,
            precision=precision,
            supervision=Supervision(session, None if first is None else first._context.supervision),
            observer=observer,
            distribution=distribution,
            placement=placement,
            hooks=ModelHooks(self, script),
            measures=measures,
            tensors=tensors,
            sequences=sequences,
            experts=experts,
            divisor=divisor,
        )
        return context, end_of_watch

    def _make_steps(self) -> StepRunner:
        """With a pipeline, the first step cuts the model; without one it is placed now, and made equal to replica 0's."""
        context = self._context
        session, supervision = context.session, context.supervision
        if context.has_program:
            transport, control = make_transport(session), make_control(session)
            pipeline = self._pipeline = Pipeline(context, transport, control, self._replication.make)
            self._exchange = StateExchange(context, make_state_control(session, control))
            supervision.follow(lambda: pipeline.where, lambda: pipeline.position, self.close)
            return StepRunner(context, pipeline, None)
        apply_marks(self.module, session.config)
        context.placement.apply()
        context.is_cut = True
        self._exchange = StateExchange(context, make_state_control(session, None))
        supervision.follow(lambda: "a step", lambda: 0, self.close)
        single = Single(context, self._replication.make({0: self.module}))
        return StepRunner(context, single, single)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output for one microbatch, in a step function, or for the batch. Raises StepError elsewhere with a pipeline."""
        dynamo = sys.modules.get("torch._dynamo.eval_frame")  # without it, nothing has been compiled
        if dynamo is not None and dynamo.__dict__["_is_in_optimized_module"]():
            raise compiled_wrapper()
        calls = self._context.calls or self._outside("the model", args, kwargs)
        half = self._context.precision.dtype
        if half is None:
            return calls.forward(args, kwargs)
        args, kwargs = cast_inputs((args, kwargs), half)
        return cast_outputs(calls.forward(args, kwargs), half)

    def backward(self, tensors: Tensors, grad_tensors: Gradients = None) -> None:
        """The backward pass of one microbatch, in a step function; like `torch.autograd.backward(tensors, grad_tensors)`.

        `tensors`: a tensor of one element, or tensors with a gradient of the same shape each. Raises StepError elsewhere with a pipeline.
        """
        (self._context.calls or self._outside("model.backward", (), {})).backward(tensors, grad_tensors)

    def _outside(self, what: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ModelCalls:
        """Runs the model outside steps."""
        state.check_current(self._context.session, "smp.DistributedModel")
        return self._runner.outside(what, args, kwargs)

    def run_step(self, body: StepBody, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run a step function on the whole batch, as a call of the function does."""
        return self._runner.run(body, args, kwargs)

    @property
    def exchanged(self) -> Mapping[nn.Parameter, nn.Parameter]:
        """Parameters that have replaced others, as `fully_shard` makes them."""
        return self._replication.exchanged

    def optimizer_step(self) -> contextlib.AbstractContextManager[None]:
        """Around the optimizer's step; DistributedOptimizer calls it."""
        return self._context.observer.optimizer_step()

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the stages, or the module without a pipeline, with torch.compile's arguments. Before the first step."""
        if self._pipeline is not None and self.partitioned:
            raise UsageError(
                "model.compile: the stages are made in the first step, and they are there already; call it before"
            )
        self._context.module.compile(*args, **kwargs)

    def cpu(self) -> DistributedModel:
        """Gather the whole model, all stages and slices of it, on every rank of the replica, on the CPU. Collective, like `state_dict`.

        The next step moves every rank's part back to its device.
        """
        state.check_current(self._context.session, "smp.DistributedModel")
        state.script_of(self).check_filled("model.cpu", "model")
        self._exchange.to_cpu(super().cpu)
        return self

    @property
    def partitioned(self) -> bool:
        """Whether the model has been partitioned: by the first step, or from the start without a pipeline."""
        return self._context.is_cut

    @property
    def has_cut(self) -> bool:
        """Whether this rank has only a part of the model."""
        return self._pipeline is not None and self._context.is_cut

    @property
    def is_in_step(self) -> bool:
        """Whether a step function is running on this rank."""
        return self._context.calls is not None

    @property
    def is_joining(self) -> bool:
        """Whether `join` lets replicas end at different times."""
        return self._context.join is not None

    def close(self) -> None:
        """End the connections of this model; its steps cannot run afterwards. `smp.shutdown` calls it."""
        if self._pipeline is not None:
            self._pipeline.close()
        self._exchange.close()

    def register_post_partition_hook(self, hook: Hook) -> RemovableHandle:
        """Call `hook(model, optimizer)` in the first step, once the model is partitioned and before anything runs.

        `optimizer` is the DistributedOptimizer, None if there is none. After the first step it is called at once.
        """
        return self._context.hooks.register_post_partition(hook)

    def register_post_step_hook(self, hook: Hook) -> RemovableHandle:
        """Call `hook(model, optimizer)` after the first step, and never again; at once if that is over."""
        return self._context.hooks.register_post_step(hook)

    def register_comm_hook(self, state: object, callable: Callable[[Any, Any], Any]) -> None:
        """Replace the averaging of gradients over replicas: see DistributedDataParallel.register_comm_hook.

        The hook gets sums over the microbatches, and averages over these and the replicas itself. Raises ConfigError without replicas. To
        be called once.
        """
        self._replication.register_comm_hook(state, callable)

    @contextlib.contextmanager
    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Iterator[None]:
        """Train with uneven inputs over replicas; on every rank, with the same arguments. See DistributedDataParallel.join.

        A replica that leaves the body takes part in the others' steps until all have left. Then all get the last replica's parameters,
        buffers and optimizer state. `divide_by_initial_world_size`: gradients are divided by the number of all replicas, else by the
        number of replicas that still have data. `throw_on_early_termination`: raise StepError on all ranks when the first one has none
        left. Raises ConfigError without `ddp`, ConfigUnsupportedError for tensor parallelism with several `backward_passes_per_step`.
        """
        context, pipeline = self._context, self._pipeline
        if not context.session.config.ddp:
            raise ConfigError("join: there are no data-parallel replicas; set ddp: true, and start several replicas")
        if context.join is not None:
            raise UsageError("join: there is one already around this one; use one at a time")
        if context.session.mesh.rdp_size == 1 or not enable:
            yield
            return
        check_join(self._replication.options, context.session)
        join = Join(
            context,
            lambda: self._replication.replicas,
            None if pipeline is None else pipeline.partition_without_data,
            divide_by_initial_world_size=divide_by_initial_world_size,
            throw_on_early_termination=throw_on_early_termination,
        )
        with join.around():
            yield
