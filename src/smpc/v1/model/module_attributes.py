"""Attributes of the wrapped module that a distributed model shows, for code that inspects a model.

    inspect.signature(model.forward)      the module's own, which libraries read to know the columns of a batch
    model.config, model.generation_config any plain value of the module
    model.device, model.dtype             where this rank computes; the dtype of the module's parameters
    model.generate(...)                   the whole model, gathered for the call

The module's methods and submodules are not shown. A method would run on this rank's part only; `model.get_module()` has them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from smpc.errors import ConfigUnsupportedError, StepError
from smpc.v1.model.stateful import StatefulModel
from smpc.v1.session.state import state
from smpc.v1.steps.arguments import map_tensors

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
            args, kwargs = map_tensors((args, kwargs), lambda tensor: tensor.cpu())
            result = self._exchange.on_first("generate", lambda: method(*args, **kwargs))
        finally:
            self.spread()
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
        return map_tensors(result, lambda tensor: tensor.to(session.device))
