"""Calls of the model outside steps, without a pipeline: tensor and data parallelism only.

    loss = model(ids, labels=ids).loss
    loss.backward()                          # or model.backward(loss)
    optimizer.step()

The first gradient that reaches an output of the model schedules the reduction of gradients at the end of that backward pass. The whole
batch is one microbatch. All replicas must call the model equally often, and differentiate the same outputs.

A call without a backward counts as no step. Where parameters lie in parts, it leaves none of them whole: they may change before the next.

Source: public SMP v1 API ("using @smp.step decorators is not required when tensor parallelism is used by itself").
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable

from smpc.executor.replicas.fully_shard import ModuleShards
from smpc.executor.replicas.group_hooks import innermost
from smpc.executor.replicas.step_hooks import StepHooks
from smpc.v1.steps.calls import Gradients, Tensors, make_roots, tensors_within
from smpc.v1.steps.context import StepContext


class Direct:
    """Runs the whole module. `hooks`: the reduction of gradients over replicas and tensor-parallel ranks, if there are any."""

    def __init__(self, context: StepContext, hooks: StepHooks | None) -> None:
        self._context, self._module, self._hooks = context, context.module, hooks
        self._is_open = False  # the module was called, and no gradient has come back
        self._is_reducing = False

    def forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The module's output."""
        with self._supervised():
            return self._forward(args, kwargs)

    def _forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        hooks = self._hooks
        if hooks is None or not torch.is_grad_enabled():
            return self._module(*args, **kwargs)
        self.close()
        self._start()
        output = self._module(*args, **kwargs)
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
        roots = make_roots(tensors, gradients, 1 / self._context.precision.loss_scale, "(none: outside of steps)")
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


def _at_end_of_backward(act: Callable[[], None]) -> None:
    Variable._execution_engine.queue_callback(act)
