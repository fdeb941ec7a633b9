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

The parameters, buffers and modules of a distributed model, by their names in the user's module, and which of them this rank holds.

`TensorParallelModel` says which of them tensor parallelism splits, and over which ranks their gradients are averaged.

Source: public SMP v1 API ("smdistributed.modelparallel.torch.DistributedModel").
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from smpc.errors import ConfigError, UsageError
from smpc.executor.collectives import TensorGroup
from smpc.executor.failure.start import StartPhase
from smpc.mesh import Axis
from smpc.v1.declare.recompute import apply_marks
from smpc.v1.layout.experts import divide_experts
from smpc.v1.layout.found_tensor_parallelism import make_compiled_tensors
from smpc.v1.layout.placement import Placement
from smpc.v1.layout.tensor_parallel import Distribution
from smpc.v1.model.checks import (
    NotWrapped,
    check_arguments,
    check_backward,
    check_context,
    check_cut,
    check_experts,
    check_fully_shard,
    check_join,
    check_marks,
    compiled_wrapper,
)
from smpc.v1.model.module_state import ShownModel, StateExchange
from smpc.v1.model.observed import ObservedModel, held_tensors, make_observer
from smpc.v1.model.replication import Replicated, Replication
from smpc.v1.session.pipeline_groups import make_control, make_state_control, make_transport
from smpc.v1.session.precision import Precision, cast_module, half_dtype
from smpc.v1.session.process_state import Script, state
from smpc.v1.session.supervision import Supervision
from smpc.v1.session.wait_limits import enter
from smpc.v1.steps.arguments import StepBody
from smpc.v1.steps.context import Measures, StepContext
from smpc.v1.steps.context_parallel import make_shared_sequences
from smpc.v1.steps.join.join import Join, JoinOptions
from smpc.v1.steps.join.join_of_experts import JoinOfExperts
from smpc.v1.steps.join.join_of_parts import JoinOfParts
from smpc.v1.steps.join.join_of_wholes import JoinOfWholes
from smpc.v1.steps.model_calls import Gradients, ModelCalls, Tensors, cast_inputs, cast_outputs
from smpc.v1.steps.model_hooks import Hook, ModelHooks
from smpc.v1.steps.pipeline import Pipeline
from smpc.v1.steps.step import StepRunner
from smpc.v1.steps.unpipelined import Single


class NamedModel(nn.Module):
    """Base class with these methods."""

    module: nn.Module
    _context: StepContext
    _pipeline: Pipeline | None

    def get_module(self) -> nn.Module:
        """The module that was passed. With a pipeline, parameters of other ranks are empty in it.

        `model.module` is the same without `ddp`; with it, a wrapper, whose `module` is this one.
        """
        held = self._modules["module"]  # without a search for the attribute: it is asked for in every step
        assert held is not None, "there is a module"
        return held.module if isinstance(held, Replicated) else held

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
        enter(StartPhase.MODEL)
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
        enter(StartPhase.READY)

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
        mesh, rank = session.mesh, session.rank
        stages = TensorGroup.of(session.groups[Axis.PP]) if mesh.pp_size > 1 else None
        placement = Placement(
            module, mesh.pp_rank(rank), session.device, distribution.slices, mesh.group(Axis.PP, rank), stages
        )
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
        if half is not None:
            args, kwargs = cast_inputs((args, kwargs), half)
        with self._context.ordinary():
            output = calls.forward(args, kwargs)
        if half is not None:
            output = cast_outputs(output, half)
        if self._context.outputs is not None:
            self._context.outputs.give(output)
        return output

    def backward(
        self,
        tensors: Tensors,
        grad_tensors: Gradients = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: object = None,
    ) -> None:
        """The backward pass of one microbatch, in a step function; like `torch.autograd.backward(tensors, grad_tensors)`.

        `tensors`: a tensor of one element, or tensors with a gradient of the same shape each. Raises StepError elsewhere with a pipeline,
        and for the other options of torch's: a schedule makes one backward pass of a microbatch, through all of the model.
        """
        check_backward(retain_graph=retain_graph, create_graph=create_graph, inputs=inputs)
        if self._context.outputs is not None:
            self._context.outputs.look()
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

    def ordinary_parameters(self) -> contextlib.AbstractContextManager[None]:
        """Around what writes into parameters and their gradients, and is not the script's."""
        return self._context.ordinary()

    def optimizer_step(self) -> contextlib.AbstractContextManager[None]:
        """Around the optimizer's step: its memory counts for the step before it."""
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
    def enclosing_join(self) -> Join | None:
        """The `join` that lets replicas end at different times, if there is one around."""
        return self._context.join

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
        buffers and optimizer state; with `fully_shard` all have followed its updates, and where ranks divide experts they have run its step
        functions, with gradients of zero. `divide_by_initial_world_size`: gradients are divided by the number of all replicas, else by the
        number of those that still have data. `throw_on_early_termination`: raise StepError on all ranks when the first one has none left.

        Raises ConfigError without `ddp`, ConfigUnsupportedError with `shard_optimizer_state`, for tensor parallelism with several
        `backward_passes_per_step`, and for several models that divide experts.
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
        partition = None if pipeline is None else pipeline.partition_without_data
        options = JoinOptions(divide_by_initial_world_size, throw_on_early_termination)
        join: Join
        hooks = (lambda: self._replication.hooks) if pipeline is None else (lambda: pipeline.hooks)
        if context.experts is not None:
            join = JoinOfExperts(context, hooks, self._runner.run, options)
        elif context.session.is_sharded:
            single = self._runner.single
            follow = None if single is None else single.follow
            join = JoinOfParts(context, hooks, follow, partition, options)
        else:
            join = JoinOfWholes(context, lambda: self._replication.replicas, partition, options)
        with join.around():
            yield
