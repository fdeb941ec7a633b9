"""Steps, and calls outside of steps, without a pipeline: the whole model is on this rank, and so is the whole step function.

Microbatches of a step run one after another, each with its own backward pass. With replicas, gradients are averaged in the backward pass of
the last microbatch.

`Direct` has calls of the model outside of steps, with tensor and data parallelism only:

    loss = model(ids, labels=ids).loss
    loss.backward()                          # or model.backward(loss)
    optimizer.step()

The first gradient that reaches an output of the model schedules the reduction of gradients at the end of that backward pass. The whole
batch is one microbatch. All replicas must call the model equally often, and differentiate the same outputs.

A call without a backward counts as no step. Where parameters are in parts, it leaves none of them whole: they may change before the next.

Source: public SMP v1 API ("using @smp.step decorators is not required when tensor parallelism is used by itself").
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.utils._pytree import tree_leaves

from smpc.codegen.recompute import Checkpointing
from smpc.errors import StepError
from smpc.executor.replicas.fully_shard import ModuleShards
from smpc.executor.replicas.group_hooks import StepHooks, innermost
from smpc.mesh import Axis
from smpc.nn.script_writes.compare_writes import compare_scripts
from smpc.observe.observer import StepWatch, batch_of
from smpc.sample_inputs import Inputs
from smpc.sharding.conversions import conversions_refused
from smpc.tracer.ir import Autocast
from smpc.v1.steps.arguments import Arguments, StepBody, on_device
from smpc.v1.steps.context import StepContext
from smpc.v1.steps.model_calls import Gradients, KeptOutputs, LocalCall, Tensors, check_loss, make_roots
from smpc.v1.steps.programs.signature import ModeReader, Signature, read_signature
from smpc.v1.steps.results import Losses, agree, read_results, take
from smpc.v1.steps.same_layers import SameLayers
from smpc.v1.steps.tensors_within import tensors_within


class Direct:
    """Runs the whole module. `hooks`: the reduction of gradients over replicas and tensor-parallel ranks, if there are any."""

    def __init__(self, context: StepContext, hooks: StepHooks | None) -> None:
        self._context, self._module, self._hooks = context, context.module, hooks
        self._first_node = 0  # of autograd, after the module's last call
        self._is_open = False  # the module was called, and no gradient has come back
        self._is_reducing = False
        self._is_first = hooks is not None

    def forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The module's output."""
        with self._supervised(), Checkpointing():
            if not self._is_first:
                return self._forward(args, kwargs)
            with conversions_refused([self._module], "smp.DistributedModel"):
                found = self._forward(args, kwargs)
            self._is_first = False
            return found

    def _forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        compare_scripts(self._module)
        hooks = self._hooks
        if hooks is None or not torch.is_grad_enabled():
            with _running(hooks, trains=False):
                return self._module(*args, **kwargs)
        self.close()
        self._start()
        with _running(
            hooks, trains=False
        ):  # what is whole now is gathered again in the backward, as blocks were called
            output = self._module(*args, **kwargs)
        self._first_node = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
        shards = innermost(hooks)
        if isinstance(shards, ModuleShards):
            shards.release()
        for tensor in tensors_within(output):
            if tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(self._note)  # type: ignore[no-untyped-call]
        return output

    def close(self) -> None:
        """A new step begins: a call that no backward has followed, or whose backward has failed, counts as none."""
        if self._is_open and self._hooks is not None:
            self._hooks.did_not_train()
        self._is_open = self._is_reducing = False

    def backward(self, tensors: Tensors, gradients: Gradients) -> None:
        """The backward pass, with the loss scaled as in a step."""
        where = "(none: outside of steps)"
        roots = make_roots(tensors, gradients, 1 / self._context.precision.loss_scale, where)
        if self._is_open and self._context.shares_parameters:
            check_loss(roots, self._first_node, self._context.shared_use_of, where)
        with self._supervised():
            torch.autograd.backward([tensor for tensor, _ in roots], [gradient for _, gradient in roots])

    @contextlib.contextmanager
    def _supervised(self) -> Iterator[None]:
        """A failing rank tells the ranks that wait for it."""
        supervision = self._context.supervision
        with supervision.step(), supervision.guard():
            yield
        supervision.end_start()

    def _note(self, grad: Tensor) -> None:
        """Called whenever a gradient reaches an output: reduce at the end of this backward pass, after other callbacks of its end."""
        if not self._is_reducing:
            if not self._is_open:  # differentiated once more
                self._start()
            self._is_reducing = True
            _at_end_of_backward(lambda: _at_end_of_backward(self._finish))

    def _start(self) -> None:
        assert self._hooks is not None, "there is something to reduce"
        self._hooks.start_of_step()
        self._is_open = True

    def _finish(self) -> None:
        self._is_reducing = self._is_open = False
        hooks = self._hooks
        assert hooks is not None, "there is something to reduce"
        more = hooks.before_last_backward(0, [])
        if more is not None:  # everything has its gradient, so all is reduced at once
            torch.autograd.backward([more[0]], [more[1]])
        hooks.end_of_step()
        optimizer = self._context.script.optimizer
        if optimizer is not None:
            optimizer.gradients_changed()


def _running(hooks: StepHooks | None, *, trains: bool) -> contextlib.AbstractContextManager[None]:
    """Around what calls the module."""
    shards = innermost(hooks)
    return shards.running(trains=trains) if isinstance(shards, ModuleShards) else contextlib.nullcontext()


def _at_end_of_backward(act: Callable[[], None]) -> None:
    Variable._execution_engine.queue_callback(act)


class Single:
    """Runs steps on the whole module. `replicas`: averages gradients, if there are replicas."""

    def __init__(self, context: StepContext, replicas: StepHooks | None) -> None:
        self._context, self._session, self._replicas = context, context.session, replicas
        self._modes = ModeReader(context.module)
        if context.session.mesh.tp_size > 1:
            SameLayers(context.module, context.session.groups[Axis.TP])
        self._first_modes = self._modes.read()
        self._evaluations: set[int] = set()  # step functions that were never followed by a backward
        self._is_first = replicas is not None
        self.direct = Direct(context, replicas)  # outside of steps
        self.observed: Signature | None = None  # of the microbatches of the last training step that was observed
        self.keeps_outputs = False  # the step function of that step, in its backward

    def settle(self) -> None:
        """Before the model runs: move it to its device, after cpu(); run the hooks that wait for the first call."""
        if not self._context.placement.is_spread:
            self._context.placement.spread()
        if not self._context.hooks.have_run:
            self._context.hooks.run()

    def follow(self, *, trains: bool) -> None:
        """Without a batch: take part in what other replicas gather in a step."""
        self.settle()
        shards = innermost(self._replicas)
        assert isinstance(shards, ModuleShards), "others have no need of this rank"
        for _ in range(self._session.config.microbatches):
            shards.follow(trains=trains)

    def step(self, body: StepBody, own: Callable[[], Arguments], watch: StepWatch) -> tuple[Any, int]:
        """One step; returns its result and the verdict on its losses. Raises StepError for a batch that does not divide."""
        self.settle()
        context, session = self._context, self._session
        supervision, join, experts = context.supervision, context.join, context.experts
        failure: Exception | None = None
        # Outside of the guard unless it exchanges anything: no rank has begun, so a script may catch an error and go on.
        with supervision.guard() if context.distribution.checks_batch else contextlib.nullcontext():
            try:
                device = session.device
                microbatches = body.split(on_device(own(), device), session.config.microbatches, device)
            except Exception as error:
                if experts is None:
                    raise
                failure = error
        if join is not None:
            join.begin_step(trains=self._may_train(body))
        with supervision.step():
            if experts is not None:
                with supervision.guard():
                    failure = experts.agree(body.name, self._may_train(body), failure)
            if failure is not None:
                if session.mesh.dp_size > session.mesh.ep_size:
                    supervision.report(failure)  # ranks outside of the group would wait for this one
                raise failure
            with supervision.guard():
                if self._is_first:
                    return self._run_first(body, microbatches, watch)
                return self._run(body, microbatches, watch)

    def _run_first(self, body: StepBody, microbatches: list[Arguments], watch: StepWatch) -> tuple[object, int]:
        with conversions_refused([self._context.module], "smp.DistributedModel"):
            found = self._run(body, microbatches, watch)
        self._is_first = False
        return found

    def _run(self, body: StepBody, microbatches: list[Arguments], watch: StepWatch) -> tuple[object, int]:
        context = self._context
        compare_scripts(context.module)
        replicas = self._replicas if self._may_train(body) else None
        if replicas is not None:
            self.direct.close()
            self._modes.check_none_unfrozen(self._first_modes, self._modes.read())
            replicas.start_of_step()
        values, backwards, losses = [], [], Losses(context.precision)
        scale = context.scale
        shared = context.shared_use_of if context.shares_parameters else None
        for index, microbatch in enumerate(microbatches):
            is_last = index == len(microbatches) - 1
            more = self._more_roots(replicas) if is_last else None
            whole = LocalCall(body.name, context.module, scale, more, shared)
            context.calls = whole
            outputs = context.outputs = KeptOutputs() if watch.is_wanted else None
            try:
                with _running(self._replicas, trains=replicas is not None):
                    values.append(take(body.call(microbatch), body.detach_outputs))
                if outputs is not None and whole.did_backward and whole.inputs is not None:
                    self._note(whole.inputs, whole.autocast)
                    self.keeps_outputs = outputs.are_kept
            finally:
                context.calls = context.outputs = None
                whole.close()
            if not whole.called:
                raise StepError(
                    f"step function {body.name} returned without calling the model; call model(...) in it once"
                )
            backwards.append(whole.did_backward)
            losses.add(index, whole.losses)
        self._finish(body, backwards, replicas)
        value = read_results(values, body.name).join()
        verdict = context.verdict(losses)
        if any(backwards):
            verdict = agree(verdict, body, self._session)
        if watch.is_wanted:
            watch.loss, watch.training = losses.mean, any(backwards)
            watch.samples, watch.tokens = batch_of(_specs(microbatches[0]), len(microbatches))
        return value, verdict

    def _note(self, inputs: Inputs, autocast: Autocast | None) -> None:
        """What predictions of the step are made for; nothing, where a pipeline could not take the inputs."""
        with contextlib.suppress(StepError):
            self.observed = read_signature(inputs, self._first_modes, True, autocast)

    def _may_train(self, body: StepBody) -> bool:
        """Whether a step of the function may do a backward; replicas then exchange buffers before it."""
        return torch.is_grad_enabled() and body.number not in self._evaluations

    def _finish(self, body: StepBody, backwards: list[bool], replicas: StepHooks | None) -> None:
        if any(backwards) and self._replicas is not None and (not backwards[-1] or replicas is None):
            raise StepError(
                f"step function {body.name} called model.backward in microbatches {[i for i, b in enumerate(backwards) if b]} of "
                f"{len(backwards)}, so gradients were not averaged over the replicas; call it in every microbatch of every step "
                "of the function, or in none"
            )
        if replicas is not None:
            join = self._context.join
            if join is not None and (join.repeats_acts or not any(backwards)):
                join.end_step(did_backward=any(backwards))
            if any(backwards):
                replicas.end_of_step()
            else:
                replicas.did_not_train()
        if not any(backwards):
            self._evaluations.add(body.number)

    def _more_roots(self, replicas: StepHooks | None) -> Callable[[list[Tensor]], tuple[Tensor, Tensor] | None] | None:
        if replicas is None:
            return None

        def before_last(roots: list[Tensor]) -> tuple[Tensor, Tensor] | None:
            join = self._context.join
            if join is not None and not join.repeats_acts:  # of parts, others follow this backward
                join.end_step(did_backward=True)
            return replicas.before_last_backward(0, roots)

        return before_last


def _specs(arguments: Arguments) -> list[tuple[tuple[int, ...], bool]]:
    tensors = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]
    return [(tuple(tensor.shape), tensor.dtype in (torch.int64, torch.int32)) for tensor in tensors]
