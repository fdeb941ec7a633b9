"""`smp.DistributedModel`: the model of a training script, partitioned by its first step.

    model = smp.DistributedModel(module)              # on every rank, after smp.init
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters()))

    @smp.step
    def train_step(model, ids):
        loss = model(input_ids=ids, labels=ids).loss
        model.backward(loss)
        return loss

With a pipeline, the module stays whole on every rank until the first step, which records and cuts it; then each rank keeps its own part.
Without one, it is placed and, with replicas, made equal to that of replica 0 at once. Names are always those of the module itself.

Source: public SMP v1 API ("smdistributed.modelparallel.torch.DistributedModel").
"""

from __future__ import annotations

import contextlib
import datetime
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from smpc.checkpoint.stateful import Held, asked_by_torch
from smpc.errors import (
    CheckpointError,
    CodegenError,
    ConfigError,
    ConfigUnsupportedError,
    NonFiniteLossError,
    PartitionError,
    StepError,
    TraceError,
    UsageError,
)
from smpc.executor import StageReplicas
from smpc.executor.fully_shard import StageShards
from smpc.executor.handler import StepHooks
from smpc.executor.wide_gradients import widen
from smpc.mesh import Axis
from smpc.observe import Watch
from smpc.partitioner.plan import Plan
from smpc.v1.models.checkpointing import apply_marks
from smpc.v1.models.compiled_tensors import make_compiled_tensors
from smpc.v1.models.model_checks import check_arguments, check_fully_shard, check_join, check_marks
from smpc.v1.models.model_view import ModelView
from smpc.v1.models.placement import Placement
from smpc.v1.models.tensor_parallel import Distribution
from smpc.v1.optimization.precision import cast_inputs, cast_module, cast_outputs, half_dtype
from smpc.v1.saving.model_state import PARTIAL, IncompatibleKeys, ModelState
from smpc.v1.saving.slices import Slices
from smpc.v1.state import state
from smpc.v1.steps.calls import Gradients, ModelCalls, Tensors, current_autocast
from smpc.v1.steps.connections import make_control, make_state_control, make_transport
from smpc.v1.steps.control import Control
from smpc.v1.steps.join import EarlyTerminationError, Join
from smpc.v1.steps.nonfinite import describe_verdict
from smpc.v1.steps.pipeline import Pipeline
from smpc.v1.steps.single import Single
from smpc.v1.steps.step_body import Arguments, StepBody
from smpc.v1.steps.supervision import Supervision
from smpc.v1.steps.watching import make_observer

Hook = Callable[["DistributedModel", Any], Any]
# All ranks of a pipeline raise these together, with nothing under way: the next step may go on.
_AGREED = (StepError, TraceError, PartitionError, CodegenError, ConfigError)


class DistributedModel(ModelView):
    """A module, distributed over pipeline ranks and replicas. One per process; construct it on every rank.

    `trace_device`: "cpu" or "gpu"; recording needs no device, so it matters for `trace_execution_times` alone. `trace_execution_times`:
    before the model is cut, one rank runs it on the first microbatch, on its own device, several times, and the plan is made with what it
    measures rather than predicts; that device must hold a copy of the whole model, and `trace_device` must be "gpu" (a rank that
    computes on a CPU measures there). `overlapping_allreduce`: reduce gradients over replicas during the last backward pass, rather
    than after it. `backward_passes_per_step`: steps between two reductions. `average_grads_across_microbatches`: divide gradients by the
    number of microbatches. `trace_memory_usage`: what tensors take is always known exactly; with True, that rank also measures
    what operations take and give back while they work. The other options are DistributedDataParallel's, for replicas.

    `model(...)` and `model.backward(...)` can be called in a step function only.
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
        self._measures = trace_execution_times, trace_memory_usage
        check_marks(module, session)
        self._distribution = Distribution(module, session)
        module = self.module = self._distribution.module
        self._half = half_dtype(session.config)
        cast_module(module, self._half)
        self.slices = Slices(module)  # what tensor-parallel ranks hold parts of
        self.training = module.training
        self._calls: ModelCalls | None = None
        self._post_partition_hooks: OrderedDict[int, Hook] = OrderedDict()  # RemovableHandle wants this class
        self._post_step_hooks: OrderedDict[int, Hook] = OrderedDict()
        self._deferred: list[Callable[[], object]] = []
        self._replicas: StageReplicas | None = None
        self._comm_hook: tuple[object, Callable[[Any, Any], Any]] | None = None
        self._join: Join | None = None
        self._is_spread = False  # whether this rank's part is where it computes
        self._ran_hooks = False
        self._observer, end_of_watch = make_observer(session, self._held, self._plan)

        self._replica_options: dict[str, Any] = {
            "bucket_cap_mb": bucket_cap_mb,
            "gradient_as_bucket_view": gradient_as_bucket_view,
            "broadcast_buffers": broadcast_buffers,
            "overlapping": overlapping_allreduce,
            "backward_passes_per_step": backward_passes_per_step,
        }
        if session.config.fully_shard:
            check_fully_shard(self._replica_options, session)
        self._pipeline: Pipeline | None = None
        self._single: Single | None = None
        self._compiled = make_compiled_tensors(module, session, self.slices, measures=any(self._measures))
        if self._compiled is not None:
            self._distribution.take_over(self._compiled)
        if session.mesh.pp_size > 1 or self._compiled is not None:
            self._cut_later(average_grads_across_microbatches)
        else:
            self._place_now(average_grads_across_microbatches)
        self._supervision = Supervision(session, self._where, self._position, self._close_connections)
        state.model = self
        state.closers += [end_of_watch, self.close]

    def _cut_later(self, average: bool) -> None:
        session = state.session
        self._transport = make_transport(session)
        self._control = make_control(session)
        self._pipeline = Pipeline(
            self.module,
            session,
            self._transport,
            self._control,
            self._make_replicas,
            self._enter,
            average,
            lambda: self._supervision.allow_compilation(),
            *self._measures,
            self._observer,
            self._compiled,
        )
        self._placement = self._pipeline.placement
        self._state_control = make_state_control(session, self._control)
        self._state = ModelState(self.module, self._placement, self.slices, self._state_control)

    def _place_now(self, average: bool) -> None:
        session = state.session
        apply_marks(self.module, session.config)
        self._placement = Placement(self.module, 0, session.device)
        self._placement.apply()
        self._state_control = make_state_control(session, None)
        self._state = ModelState(self.module, self._placement, self.slices, self._state_control)
        self._single = Single(self.module, session, self._make_replicas({0: self.module}), self._enter, average)
        self._single.direct.watched = self._watched
        self._is_spread = True

    def _make_replicas(self, stages: Mapping[int, nn.Module]) -> StepHooks | None:
        """What averages the gradients of this rank's stages over replicas and tensor-parallel ranks; None where there are none."""
        session = state.session
        if self._half is not None and session.config._fp32_grad_accumulation:
            widen(parameter for index in sorted(stages) for parameter in stages[index].parameters())
        if session.mesh.rdp_size > 1 and session.config.fully_shard:
            return self._make_shards(stages)
        if session.mesh.rdp_size > 1:
            self._replicas = StageReplicas(stages, session.groups[Axis.RDP], **self._replica_options)
            if self._comm_hook is not None:
                self._replicas.register_comm_hook(*self._comm_hook)
        return self._distribution.hooks(stages, self._replicas, self._replica_options["backward_passes_per_step"])

    def _make_shards(self, stages: Mapping[int, nn.Module]) -> StageShards:
        session = state.session
        shards = StageShards(
            stages,
            session.groups[Axis.RDP],
            device_type=session.device.type,
            broadcast_buffers=self._replica_options["broadcast_buffers"],
        )
        self._placement.exchange(shards.exchanged)
        if state.optimizer is not None:
            state.optimizer.exchange(shards.exchanged)
        return shards

    # -- in a step -----------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output for one microbatch, in a step function, or for the batch. Raises StepError with a pipeline elsewhere."""
        calls = self._calls or self._without_step("the model", args, kwargs)
        args, kwargs = cast_inputs((args, kwargs), self._half)
        return cast_outputs(calls.forward(args, kwargs), self._half)

    def backward(self, tensors: Tensors, grad_tensors: Gradients = None) -> None:
        """The backward pass of one microbatch, in a step function; like `torch.autograd.backward(tensors, grad_tensors)`.

        `tensors`: a tensor of one element, or tensors with a gradient of the same shape each. Raises StepError with a pipeline elsewhere.
        """
        (self._calls or self._without_step("model.backward")).backward(tensors, grad_tensors)

    def _without_step(
        self, what: str, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> ModelCalls:
        """What runs the model outside of steps."""
        if self._single is None or self._join is not None:
            why = "there is a pipeline" if self._single is None else "of join"
            raise StepError(
                f"{what} was called outside a step; call it in a function decorated with @smp.step, as {why}"
            )
        self._place_again()
        self._distribution.check_batch(
            {f"argument {i}": arg for i, arg in enumerate(args)} | dict(kwargs or {}), "(none)"
        )
        return self._single.direct

    def run_step(self, body: StepBody, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run a step function on the whole batch; `smp.step` calls it."""
        if self._calls is not None:
            raise StepError(f"step function {body.name} was called inside another step; steps do not nest")
        if self._pipeline is not None and current_autocast() is not None:
            raise StepError(
                f"step function {body.name} was called under autocast, which ranks that run none of it do not see; enter autocast in the "
                "step function, around the model and the loss, not around the step function"
            )

        def own() -> Arguments:
            arguments = body.bind(args, kwargs)
            self._distribution.check_batch(arguments, body.name)
            return arguments

        self._check_saving()
        run = self._run_single if self._pipeline is None else self._run_pipeline
        with self._observer.step(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)) as watch:
            result = run(body, own, watch)
        optimizer = state.optimizer
        if optimizer is not None:
            optimizer.gradients_changed()
        for hook in list(self._post_step_hooks.values()):
            hook(self, optimizer)
        return result

    def _check_saving(self) -> None:
        """Raise what a save in the background has failed with; ranks that do not know it yet are told."""
        if state.checkpointer is None:
            return
        try:
            state.checkpointer.check()
        except CheckpointError as error:
            self._supervision.report(error)
            raise

    def _run_pipeline(self, body: StepBody, own: Callable[[], Arguments], watch: Watch) -> Any:
        pipeline = self._pipeline
        assert pipeline is not None, "there is one"
        if self.partitioned and not self._is_spread:
            self._placement.apply()  # after cpu()
            self._is_spread = True
        with self._supervision.step():
            if self._join is not None and not self.partitioned:
                self._guarded_join(self._join, self._join.begin_partition)
            try:
                program, request = pipeline.begin(body, own, self._on_partition)
            except _AGREED as error:
                if state.session.mesh.rdp_size > 1:
                    self._supervision.report(error)  # other replicas would wait for this one
                raise
            except BaseException as error:
                with self._supervision.guard():
                    raise error
            if self._join is not None and pipeline.may_train(body, program):
                self._guarded_join(self._join, self._join.begin_step)
            with self._supervision.guard():
                outcome = pipeline.run(body, own, program, request)
        watch.loss = outcome.loss
        value = outcome.result()
        self._judge(outcome.verdict, body)
        return value

    def _run_single(self, body: StepBody, own: Callable[[], Arguments], watch: Watch) -> Any:
        single = self._single
        assert single is not None, "there is no pipeline"
        self._place_again()
        if self._join is not None and single.may_train(body):
            self._guarded_join(self._join, self._join.begin_step)
        with self._supervision.step(), self._supervision.guard():
            value, verdict = single.run(body, own(), watch)
        self._judge(verdict, body)
        return value

    def _place_again(self) -> None:
        """Without a pipeline: put the model to where it computes, after cpu(); run what waits for the first call."""
        if not self._is_spread:
            self._placement.apply()
            self._is_spread = True
        if not self._ran_hooks:
            self._on_partition()

    def _judge(self, verdict: int, body: StepBody) -> None:
        """Do what `nan_policy` says where a loss is not finite; the verdict is the same on all ranks."""
        if not verdict:
            return
        for parameter in self.module.parameters():
            parameter.grad = None
        session = state.session
        text = describe_verdict(verdict, body.name, session)
        if session.config.nan_policy == "raise":
            raise NonFiniteLossError(text)
        if session.rank == 0:
            warnings.warn(text, stacklevel=5)

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        with self._supervision.step(), self._supervision.guard():
            yield

    def watch_checkpoint(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Limits how long an exchange of state may take, to `checkpoint_timeout`."""
        return self._supervision.wait(what, state.cfg.checkpoint_timeout)

    def watch_exchange(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Limits how long the ranks may wait for each other outside a step, to `step_timeout`."""
        return self._supervision.wait(what)

    @property
    def is_joining(self) -> bool:
        """Whether `join` lets replicas end at different times."""
        return self._join is not None

    def _where(self) -> str:
        return "a step" if self._pipeline is None else self._pipeline.where

    def _position(self) -> int:
        return 0 if self._pipeline is None else self._pipeline.position

    def _close_connections(self) -> None:
        if self._pipeline is not None:
            self._transport.close()
            self._control.close()
        if self._state_control is not None:
            self._state_control.close()

    def _enter(self, calls: ModelCalls | None) -> None:
        self._calls = calls

    def _on_partition(self) -> None:
        self._is_spread = self._ran_hooks = True
        self._supervision.has_started = True
        deferred, self._deferred = self._deferred, []
        for load in deferred:
            load()
        optimizer = state.optimizer
        if optimizer is not None:
            optimizer.load_deferred()
        for hook in list(self._post_partition_hooks.values()):
            hook(self, optimizer)

    def close(self) -> None:
        """End the threads and connections of this model; its steps cannot run afterwards. `smp.shutdown` calls it."""
        self._supervision.stop()
        self._close_connections()

    # -- state ---------------------------------------------------------------------------------------------------------

    def local_state_dict(self) -> dict[str, Any]:
        """The state dict of this rank, with the key `_smp_is_partial`. Raises UsageError before the partition."""
        self._require_partition("local_state_dict")
        return {**self._state.local(), PARTIAL: True}

    def state_dict(self, gather_to_rank0: bool = False) -> dict[str, Any]:  # type: ignore[override]
        """The state dict of the whole model, equal to the module's in one process.

        Call it on all ranks of a replica (`smp.rdp_rank() == 0`, say): it gathers, tensor by tensor, to the CPU. `gather_to_rank0`: only
        mp_rank 0 gets it, the others {}. Raises CheckpointError, naming the ranks that did not call it, after `checkpoint_timeout`.
        torch.distributed.checkpoint gets what this rank holds (`smpc.checkpoint.stateful`).
        """
        if self.partitioned and asked_by_torch() is not None:
            return self._state.held()
        self._placement.draw()
        if self.meet("state_dict") is None:
            return self.module.state_dict()
        with self.watch_checkpoint("state_dict"):
            return self._state.full(only_on_rank_0=gather_to_rank0)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, same_partition_load: bool = False
    ) -> IncompatibleKeys | None:
        """Load a full state dict, or this rank's partial one; call it on every rank.

        Partial ones are merged over the ranks, so that they may come from another partition; `same_partition_load` skips that where this
        rank saved its own under the same partition. Partial ones are loaded once the model is partitioned; then None is returned before.
        Raises CheckpointError, listing every key that is missing, unexpected, or of another shape or dtype; nothing is loaded then.
        """
        if isinstance(state_dict, Held):
            return self._state.load_held(state_dict)
        partial = bool(state_dict.get(PARTIAL, False))
        if not partial or self._state_control is None:
            return self._state.load(state_dict, strict=strict)

        def load() -> IncompatibleKeys:
            if same_partition_load:
                return self._state.load_own_part(state_dict, strict=strict)
            with self.watch_checkpoint("load_state_dict"):
                return self._state.load_parts(state_dict, strict=strict)

        if self.partitioned:
            return load()
        self._deferred.append(load)
        return None

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each parameter on the ranks that hold it, by its name in the module."""
        return {name: tuple(self._placement.shape(name)) for name, _ in self.module.named_parameters()}

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    @property
    def checkpoint_state(self) -> ModelState:
        """What of the module a checkpoint holds."""
        return self._state

    @property
    def plan_json(self) -> str | None:
        """The plan that the model was cut by; None without a pipeline, and before the first step."""
        return self._pipeline.plan.to_json() if self._pipeline is not None and self.partitioned else None

    def use_plan(self, text: str) -> None:
        """Cut the model as an earlier job did, if the first step finds the same operations. Raises an error if `text` is no plan."""
        if self._pipeline is not None and not self.partitioned:
            self._pipeline.saved_plan = Plan.from_json(text)

    def when_partitioned(self, load: Callable[[], object]) -> None:
        """Call `load` now, or in the first step as soon as the model is partitioned."""
        if self.partitioned:
            load()
        else:
            self._deferred.append(load)

    def meet(self, what: str) -> Control | None:
        """Wait for the ranks among which the model lies, before they exchange state; None if it is whole on each.

        Raises CheckpointError, naming the ranks that do not come within `checkpoint_timeout`.
        """
        if self._state_control is None or not (self.partitioned or state.session.mesh.tp_size > 1):
            return None
        self._state_control.meet(what, datetime.timedelta(seconds=state.cfg.checkpoint_timeout))
        return self._state_control

    def cpu(self) -> DistributedModel:
        """Gather all stages on every rank of the replica, on the CPU; slices stay slices. Collective, like `state_dict`.

        The next step puts every rank's part back to where it computes.
        """
        self._placement.draw()
        self.meet("cpu")
        if state.cfg.fully_shard and state.session.mesh.rdp_size > 1:
            raise ConfigUnsupportedError("cpu: parameters lie in parts on the replicas (fully_shard); use state_dict()")
        if self._pipeline is None or not self.partitioned:
            super().cpu()
        else:
            self._placement.restore(self._state.all_stages(self._control))
        self._is_spread = False
        return self

    # -- hooks ---------------------------------------------------------------------------------------------------------

    def register_post_partition_hook(self, hook: Hook) -> RemovableHandle:
        """Call `hook(model, optimizer)` in the first step, once the model is partitioned and before anything runs.

        `optimizer` is the DistributedOptimizer, None if there is none. After the first step it is called at once.
        """
        handle = RemovableHandle(self._post_partition_hooks)
        self._post_partition_hooks[handle.id] = hook
        if self._ran_hooks:
            hook(self, state.optimizer)
        return handle

    def register_post_step_hook(self, hook: Hook) -> RemovableHandle:
        """Call `hook(model, optimizer)` after every step."""
        handle = RemovableHandle(self._post_step_hooks)
        self._post_step_hooks[handle.id] = hook
        return handle

    def register_comm_hook(self, state: object, callable: Callable[[Any, Any], Any]) -> None:
        """Replace the averaging of gradients over replicas: see DistributedDataParallel.register_comm_hook.

        The hook averages over replicas itself. Raises ConfigError without replicas. To be called once.
        """
        self._require_replicas("register_comm_hook")
        if self._comm_hook is not None:
            raise UsageError("register_comm_hook: there is a hook already")
        self._comm_hook = (state, callable)
        if self._replicas is not None:
            self._replicas.register_comm_hook(state, callable)

    @contextlib.contextmanager
    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Iterator[None]:
        """Train with uneven inputs over replicas; on every rank, with the same arguments. See DistributedDataParallel.join.

        A replica that leaves the body waits until all have, and takes part in their steps. Then all have the parameters, buffers and
        optimizer state of the last one. `divide_by_initial_world_size`: gradients are divided by the number of all replicas, else by that
        of those which still have data. `throw_on_early_termination`: raise StepError on all ranks when the first one has none left.
        Raises ConfigError without `ddp`, ConfigUnsupportedError for tensor parallelism with several `backward_passes_per_step`.
        """
        if not state.cfg.ddp:
            raise ConfigError("join: there are no data-parallel replicas; set ddp: true, and start several replicas")
        if self._join is not None:
            raise UsageError("join: there is one already around this one; use one at a time")
        if state.session.mesh.rdp_size == 1 or not enable:
            yield
            return
        check_join(self._replica_options, state.session)
        join = Join(
            state.session,
            lambda: self._replicas,
            self._partition_without_data,
            has_pipeline=self._pipeline is not None,
            divide_by_initial_world_size=divide_by_initial_world_size,
            throw_on_early_termination=throw_on_early_termination,
        )
        self._guarded_join(join, join.enter)
        self._set_join(join)
        try:
            yield
            while self._guarded_join(join, join.shadow):
                pass
            self._guarded_join(join, lambda: join.finish(state.optimizer))
        except NonFiniteLossError:
            if not join.has_shadowed:
                self._guarded_join(join, join.leave)
            raise
        except EarlyTerminationError:
            raise
        except Exception as error:
            self._supervision.report(error, "join")  # the other replicas would wait for this one
            raise
        finally:
            self._set_join(None)

    def _set_join(self, join: Join | None) -> None:
        self._join = join
        if self._single is not None:
            self._single.join = join
        if self._pipeline is not None:
            self._pipeline.join = join

    def _guarded_join(self, join: Join, act: Callable[[], bool | None]) -> bool | None:
        """Do something that waits for the other replicas; raise what all of them have agreed to raise."""
        supervision = self._supervision
        with supervision.wait("join, waiting for the other replicas", supervision.step_timeout), supervision.guard():
            result = act()
        if join.error is not None:
            raise join.error
        return result

    def _partition_without_data(self) -> None:
        assert self._pipeline is not None, "there is a pipeline"
        self._pipeline.partition_without_data(self._on_partition)

    def _require_replicas(self, what: str) -> None:
        if state.session.mesh.rdp_size == 1:
            raise ConfigError(f"{what}: there are no data-parallel replicas; set ddp: true, and start several replicas")
        if state.cfg.fully_shard:
            raise ConfigUnsupportedError(f"{what}: with fully_shard there is no such hook; leave one of the two out")
