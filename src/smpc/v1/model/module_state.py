"""What a distributed model shows of its module: its state, and its attributes.

The state methods are state dicts, access for checkpoints, and moves to the CPU and back.

`StateExchange` knows the ranks that hold the model, and how long they wait for each other; `smpc.v1.state_dicts.rank_state.ModelState`
reads and writes. `StatefulModel` offers both under the names that scripts and checkpoints call.

`ShownModel` has the attributes of the wrapped module that a distributed model shows, for code that inspects a model.

    inspect.signature(model.forward)      the module's own, which libraries read to know the columns of a batch
    model.config, model.generation_config any plain value of the module
    model.device, model.dtype             where this rank computes; the dtype of the module's parameters
    model.generate(...)                   the whole model, gathered for the call

The module's methods and submodules are not shown. A method would run on this rank's part only; `model.get_module()` has them.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from smpc.checkpoint.stateful import LocalStateDict, asked_by_torch
from smpc.containers import map_tensors
from smpc.errors import ConfigUnsupportedError, StepError
from smpc.mesh import Axis
from smpc.partitioner.graph.plan import Plan
from smpc.v1.model.checks import check_cut
from smpc.v1.session.process_state import state
from smpc.v1.session.skipped_calls import Whereabouts
from smpc.v1.session.step_errors import describe, raise_error_on_all_ranks
from smpc.v1.session.step_messages import Control
from smpc.v1.state_dicts.rank_state import PARTIAL, IncompatibleKeys, ModelState
from smpc.v1.steps.context import StepContext
from smpc.v1.steps.pipeline import Pipeline


class StateExchange:
    """How the ranks gather the state of one model. `control`: messages between the ranks that hold it; None if one rank has all of it."""

    def __init__(self, context: StepContext, control: Control | None) -> None:
        self._context, self._control = context, control
        self.local = ModelState(
            context.module, context.placement, context.distribution.slices, control, context.precision.dtype
        )

    def close(self) -> None:
        """End the connections."""
        if self._control is not None:
            self._control.close()

    def meet(self, what: str) -> Control | None:
        """See `DistributedModel.meet`."""
        context, control = self._context, self._control
        mesh = context.session.mesh
        if control is None or not (context.is_cut or mesh.tp_size > 1 or mesh.ep_size > 1):
            return None
        timeout = datetime.timedelta(seconds=context.session.config.checkpoint_timeout)
        control.meet(what, timeout, context.supervision.whereabouts)
        return control

    def meet_holders(self, what: str) -> None:
        """In `join`: raise UsageError if ranks that hold parts of what is gathered are over."""
        join = self._context.join
        if join is not None and join.repeats_acts:
            join.meet_all(what)

    def watch(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Limits how long an exchange of state may take, to `checkpoint_timeout`."""
        return self._context.supervision.wait(what, self._context.session.config.checkpoint_timeout)

    def gather(self, *, only_on_rank_0: bool) -> dict[str, Any]:
        """The whole state. Collective."""
        context = self._context
        self.meet_holders("model.state_dict")
        context.placement.draw()
        if self.meet("state_dict") is None:
            return self.local.own_whole()
        with self.watch("state_dict"):
            mesh, rank = context.session.mesh, context.session.rank
            return self.local.full(wanted=not only_on_rank_0 or mesh.axis_rank(Axis.MP, rank) == 0)

    def load(self, given: Mapping[str, Any], *, strict: bool, same_partition: bool) -> IncompatibleKeys:
        """Load a whole state, or the parts that the ranks have of one; before the partition every rank gets all of it."""
        if isinstance(given, LocalStateDict):
            return self.local.load_held(given)
        if not given.get(PARTIAL, False) or self._control is None:
            return self.local.load(given, strict=strict)
        if same_partition and self._context.is_cut:
            return self.local.load_own_part(given, strict=strict)
        self._context.placement.draw()
        with self.watch("load_state_dict"):
            return self.local.load_parts(given, strict=strict)

    def on_first(self, what: str, work: Callable[[], Any]) -> Any:
        """Runs `work` on the first of these ranks and returns its result, or raises its error, on all of them. Collective."""
        control = self._control
        assert control is not None, "the model is spread over several ranks"
        result, failure = None, None
        if control.rank == 0:
            try:
                result = work()
            except Exception as error:
                failure = error
        with self.watch(what):
            control.meet(what, datetime.timedelta(seconds=self._context.session.config.checkpoint_timeout))
            description, result = control.broadcast_object((describe(failure), result), 0)
            control.acknowledge(0)
        if description is not None:
            raise_error_on_all_ranks(description, failure)
        return result

    def to_cpu(self, move: Callable[[], object]) -> None:
        """Bring the whole model to the CPU of every rank; `move` does so where this rank has all of it."""
        context = self._context
        if context.experts is not None:
            raise ConfigUnsupportedError(
                "cpu: with expert_parallel_degree above 1 a rank's modules serve the tokens of others; use state_dict()"
            )
        context.placement.draw()
        control = self.meet("cpu")
        if context.session.is_sharded:
            raise ConfigUnsupportedError(
                "cpu: parameters are sharded over the replicas (fully_shard); use state_dict()"
            )
        if control is None or not context.is_cut:
            move()
        elif context.placement.is_spread:
            with self.watch("cpu"):
                context.placement.restore(self.local.all_parts())
        context.placement.is_spread = False


class StatefulModel(nn.Module):
    """State dicts, the state for checkpoints, and how long the ranks wait for each other when they exchange it."""

    module: nn.Module
    _context: StepContext
    _pipeline: Pipeline | None
    _exchange: StateExchange

    def local_state_dict(self) -> dict[str, Any]:
        """The state dict of this rank, with the key `_smp_is_partial`. Raises UsageError before the partition."""
        check_cut(self._context, "local_state_dict")
        self._exchange.meet_holders("model.local_state_dict")
        self.spread()
        return {**self._exchange.local.local(), PARTIAL: True}

    def state_dict(self, gather_to_rank0: bool = False) -> dict[str, Any]:  # type: ignore[override]
        """The state dict of the whole model, equal to the module's in one process.

        Call it on all ranks of a replica (`smp.rdp_rank() == 0`, say), with `expert_parallel_degree` on all ranks of the job: it gathers,
        tensor by tensor, to the CPU. `gather_to_rank0`: only mp_rank 0 gets it, the others {}. Raises CheckpointError, naming the ranks
        that did not call it, after `checkpoint_timeout`. torch.distributed.checkpoint gets this rank's part (`smpc.checkpoint.stateful`).
        """
        state.check_current(self._context.session, "smp.DistributedModel")
        if self._context.is_cut and asked_by_torch() is not None:
            return self._exchange.local.held()
        return self._exchange.gather(only_on_rank_0=gather_to_rank0)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, same_partition_load: bool = False
    ) -> IncompatibleKeys:
        """Load a full state dict, or this rank's partial one; call it on every rank.

        Partial ones are merged over the ranks, so they may come from another partition; `same_partition_load` skips that, once the model
        is partitioned, if this rank saved its own under the same partition. Raises CheckpointError, listing every key that is missing,
        unexpected, or of another shape or dtype; nothing is loaded then.
        """
        state.check_current(self._context.session, "smp.DistributedModel")
        self.spread()
        return self._exchange.load(state_dict, strict=strict, same_partition=same_partition_load)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each parameter on the ranks that hold it, by its name in the module."""
        placement = self._context.placement
        return {name: tuple(placement.shape(name)) for name, _ in self.module.named_parameters()}

    @property
    def checkpoint_state(self) -> ModelState:
        """The module's state for a checkpoint."""
        self.spread()
        return self._exchange.local

    @property
    def plan_json(self) -> str | None:
        """The plan that the model was cut by; None without a pipeline, and before the first step."""
        return self._pipeline.plan.to_json() if self._pipeline is not None and self._context.is_cut else None

    def use_plan(self, text: str) -> None:
        """Cut the model as an earlier job did, if the first step finds the same operations. Raises an error if `text` is no plan."""
        if self._pipeline is not None and not self._context.is_cut:
            self._pipeline.saved_plan = Plan.from_json(text)

    def when_partitioned(self, load: Callable[[], object], *, has_masters: bool) -> None:
        """Call `load`, which fills in the optimizer's state, in the first step as soon as the model is partitioned. `has_masters`:
        that writes parameters, too.
        """
        self._context.hooks.defer(load, has_masters=has_masters)

    def meet(self, what: str) -> Control | None:
        """Wait for the ranks that hold the model, before they exchange state; None if it is whole on each.

        Raises CheckpointError, naming the ranks that do not come within `checkpoint_timeout`.
        """
        return self._exchange.meet(what)

    def watch_checkpoint(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Limits how long an exchange of state may take, to `checkpoint_timeout`."""
        return self._exchange.watch(what)

    @property
    def whereabouts(self) -> Whereabouts | None:
        """Knows which ranks have continued without an exchange of state; None if a rank is alone."""
        return self._context.supervision.whereabouts

    def watch_exchange(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Limits how long the ranks may wait for each other outside a step, to `step_timeout`."""
        return self._context.supervision.wait(what)

    def spread(self) -> None:
        """Move this rank's part to its device, after cpu()."""
        if self._context.is_cut and not self._context.placement.is_spread:
            self._context.placement.spread()


_GENERATE = "generate"


class ShownModel(StatefulModel):
    """Base of a wrapper that looks like the module in it."""

    def show_signature(self, module: nn.Module) -> None:
        """Let `model` and `model.forward` have the signature of the module's forward; on the object, as models differ."""
        try:
            signature = inspect.signature(module.forward)
        except (TypeError, ValueError):  # a forward without a signature
            return
        forward: Any = functools.update_wrapper(functools.partial(self.forward), self.forward)
        forward.__signature__ = signature
        self.__dict__["forward"] = forward
        self.__dict__["__signature__"] = signature

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self._context.session.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the module's first floating-point parameter; torch's default if there is none."""
        found = (p.dtype for p in self._context.module.parameters() if p.is_floating_point())
        return next(found, torch.get_default_dtype())

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__") or "_context" not in self.__dict__:
                raise
        value = getattr(self._context.module, name)
        if name == _GENERATE:
            return functools.partial(self._generate, value)
        if isinstance(value, (nn.Module, Tensor)) or callable(value):
            raise AttributeError(
                f"DistributedModel does not show {name!r} of the module in it, of which this rank may have a part only; it is "
                f"model.get_module().{name}, and what changes the module is to be called before smp.DistributedModel"
            )
        return value

    def computes_with(self, name: str) -> bool | None:
        """Whether the program of the step that runs, or ran last, computes with the input of this name; None where none has run."""
        trace = self._context.trace
        return None if trace is None else trace.computes_with(name)

    def __getitem__(self, key: Any) -> Any:
        """A part of the module in it, if that is a Sequential or another container. Raises TypeError if it is none."""
        module: Any = self._context.module
        return module[key]

    def _generate(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the module's `generate` with the whole model in place; on all ranks of a replica, each of which gets the result.

        With a pipeline the whole model is gathered on the CPU of every rank, and the first rank generates; the arguments of other ranks
        are ignored. Gradients are kept. Raises StepError in a step function, ConfigUnsupportedError if a rank has slices of parameters.
        """
        session, context = self._context.session, self._context
        state.check_current(session, "smp.DistributedModel")
        if context.calls is not None:
            raise StepError("model.generate was called in a step function; call it outside of steps, on every rank")
        if session.mesh.tp_size > 1 or session.is_sharded:
            what = "tensor parallelism" if session.mesh.tp_size > 1 else "sharded parameters"
            raise ConfigUnsupportedError(
                f"model.generate: with {what}, modules compute with parts of parameters; load model.state_dict(), gathered on every "
                "rank, into a module of its own, and generate with that"
            )
        if session.mesh.pp_size == 1:
            self.spread()
            return method(*args, **kwargs)
        parameters = list(context.module.parameters())
        gradients = [None if gradient is None else gradient.detach() for gradient in (p.grad for p in parameters)]
        self._exchange.to_cpu(super().cpu)
        try:
            args, kwargs = map_tensors(lambda tensor: tensor.cpu(), (args, kwargs))
            result = self._exchange.on_first("generate", lambda: method(*args, **kwargs))
        finally:
            self.spread()
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
        return map_tensors(lambda tensor: tensor.to(session.device), result)
