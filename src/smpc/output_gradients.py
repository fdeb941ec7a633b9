"""Gradients of what a program returns: right where that is the very tensor the model goes on with, refused elsewhere.

    tanh_gathered = tensor_ops.all_gather(tanh, 1, self.context_group)     # returned as out["hidden"]
    head = F.linear(tanh, head_weight_in, head_bias_in)                    # what the model goes on with

In plain PyTorch `out["hidden"].register_hook(clip)` changes the gradient that comes from the head, `retain_grad()` keeps it, and
`torch.autograd.grad(loss, out["hidden"])` has it. Here the script has a copy, to which nothing comes from the head. So it is where an
earlier stage of a pipeline goes on with what the last one returns. Of an output that nothing else of the model uses, or the last stage
alone, as it is, all of these are right.

Hooks of FSDP's around the model only learn that a backward has come. They change no gradient, so copies may have them.

A copy is told by its node in autograd's graph. Autograd's engine is asked for gradients of such nodes after the first copy alone.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd import graph

from smpc.codegen.rewrite.tensor_parallel.layouts import CONVERSIONS
from smpc.errors import StepError
from smpc.partitioner.graph.plan import Plan
from smpc.tracer.ir import Node, Trace
from smpc.tracer.targets import TENSOR_OPS

_CONVERSIONS = frozenset(f"{TENSOR_OPS}.{step.function}" for steps in CONVERSIONS.values() for step in steps)


def copied_outputs(trace: Trace, plan: Plan | None = None) -> frozenset[str]:
    """The outputs of a rewritten trace, by name, that are not all that the model goes on with. `plan`: its stages, if there are several."""
    stages = {} if plan is None else dict(plan.assignment)
    last = 0 if plan is None else len(plan.stages) - 1
    by_name = {node.name: node for node in trace.nodes}
    users: dict[str, list[Node]] = {}
    for node in trace.nodes:
        if node.spec is None or node.spec.requires_grad or node.mutates:  # others have no gradient
            for name in node.inputs:
                users.setdefault(name, []).append(node)

    def is_copied(name: str) -> bool:
        if any(stages.get(user.name, last) != last for user in users.get(name, ())):
            return True
        node = by_name[name]
        while node.target in _CONVERSIONS:
            source = next(each for each in node.inputs if by_name[each].spec is not None)
            if any(user is not node for user in users.get(source, ())):
                return True
            node = by_name[source]
        return False

    return frozenset(name for name in trace.output_names if is_copied(name))


_COPIES = "smpc_copies"  # in a node's metadata: which of its results are copies


def without_gradient(tensor: Tensor) -> Tensor:
    """The same tensor, one of `copied_outputs`: a script's hooks on it, and gradients with respect to it, raise StepError."""
    if tensor.requires_grad and not isinstance(tensor, nn.Parameter):
        register = functools.partial(_register_hook, weakref.ref(tensor))
        vars(tensor).update(register_hook=register, retain_grad=_refuse_hook)
        node: Any = tensor.grad_fn
        if node is not None:
            _look_at_backwards()
            node.metadata.setdefault(_COPIES, set()).add(tensor.output_nr)
    return tensor


def _register_hook(copy: weakref.ref[Tensor], hook: Callable[..., Any]) -> Any:
    """In the place of `Tensor.register_hook`: for hooks of FSDP's alone."""
    function: Any = hook
    while isinstance(function, functools.partial):
        function = function.func
    tensor = copy()
    if tensor is None or not getattr(function, "__module__", "").startswith("torch.distributed.fsdp."):
        _refuse_hook()
    return Tensor.register_hook(tensor, hook)  # type: ignore[no-untyped-call]


def _refuse_hook(*_: object) -> NoReturn:
    raise _refusal("register_hook and retain_grad on outputs", "them on one")


def _refusal(expected: str, found: str) -> StepError:
    return StepError(
        f"expected {expected} that the model itself does not go on with, found {found} that it uses, too: on its ranks it goes on with "
        "slices of it, or on another stage, and the script has a copy, which the gradient does not pass; have a module of the model do it "
        "in its forward, or return what only the script uses"
    )


@functools.cache
def _look_at_backwards() -> None:
    """From now on, whoever asks autograd for gradients of a copy gets an error."""
    original = graph._engine_run_backward

    @functools.wraps(original)
    def run(outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        inputs = kwargs.get("inputs", args[3] if len(args) > 3 else ())
        for each in inputs or ():
            node: Any
            node, number = (each.grad_fn, each.output_nr) if isinstance(each, Tensor) else each[:2]
            if node is not None and number in node.metadata.get(_COPIES, ()):
                raise _refusal("gradients (torch.autograd.grad, backward with inputs) with respect to outputs", "one")
        return original(outputs, *args, **kwargs)

    homes: tuple[Any, ...] = (graph, torch.autograd)  # both look it up by name
    for home in homes:
        home._engine_run_backward = run
