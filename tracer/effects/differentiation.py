"""Autograd calls of the model's own Python while it runs: which of them a trace can hold, and which it cannot.

A trace holds operations on values. It does not hold a graph that somebody walks, differentiates or hangs hooks on by other means.

    done to             a value made during the run                    a parameter or buffer
    ------------------------------------------------------------------------------------------------------------------
    requires_grad_,     recorded, as an effect on the value            refused, unless undone within a module that is
    detach_                                                            called whole
    register_hook       recorded, as an effect on the value            refused: it would be there twice in the next call
    x.data = y          recorded, as an effect on the value            refused: other microbatches are under way
    x.grad              None, as in plain PyTorch; writing: whole      refused: other microbatches are under way
    retain_grad,        its module is called whole                     nothing to be done
    x.grad_fn, is_leaf
    x._version          its module is called whole                     refused: recording and placing a model write, too
    torch.autograd.grad, backward, torch.func and what is built on them: the module whose code calls them is called whole

Called whole, a module does all of this by itself, on one stage. That is plain PyTorch's result only if all of it happens inside:
`smpc.tracer.operations.opaque` checks that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import graph

from smpc.tracer.recording.untraceable import calling_frame, is_users

_MARKS = ("requires_grad_", "detach_", "retain_grad", "register_hook", "register_post_accumulate_grad_hook", "set_")
_READ = ("grad", "grad_fn", "is_leaf", "_version")
_MARKED_ATTRIBUTES = ("requires_grad", "data", "grad")

OF_GRAPH = ("retain_grad", "grad_fn", "is_leaf", "_version", "grad =")  # marks that a trace cannot hold
OF_FLAG = ("requires_grad_", "requires_grad =", "detach_")  # marks that may change `requires_grad`
OWN_MODULE = (
    "what to do: put what differentiates, with all that is differentiated, into a module of its own; it is then called whole, on one "
    "stage"
)
WHOLE = "what to do: do it in a module of its own, which is then called whole, or outside the model"
OUTSIDE = "what to do: do it outside the model, before or after the step"
CONVERT = (
    "what to do: convert it once, before the model is used, or for one use at a time (`F.linear(x, layer.weight.to(x.dtype))`); where the "
    "model is cast (bf16, fp16), have forward ask for that type, which the configuration of a model may say"
)

_HOOK = (
    "hangs a hook on {fqn}, which would hang there again after every call",
    "what to do: register it once, outside forward",
)
_GRADIENT = "uses the gradient of {fqn}, which other microbatches add to", OUTSIDE
_MEMORY = (
    "gives {fqn} other memory, while other microbatches need the old",
    "what to do: write into it (copy_) under torch.no_grad(), or do it outside the model",
)
FORBIDDEN = {  # marks that no parameter or buffer may get in forward, wherever: why, and the way out
    "register_hook": _HOOK,
    "register_post_accumulate_grad_hook": _HOOK,
    "grad": _GRADIENT,
    "grad =": _GRADIENT,
    "data =": _MEMORY,
    "set_": _MEMORY,
    "_version": ("counts the writes into {fqn}, of which others make some, too", OUTSIDE),
}


def mark_of(func: Callable[..., Any]) -> str:
    """The side effect of a torch call on its first argument: "detach_", "requires_grad =", "grad_fn", ...; "" for others."""
    name = getattr(func, "__name__", "")
    if name in _MARKS:
        return name
    if name not in ("__get__", "__set__", "__delete__"):
        return ""
    descriptor: Any = func.__self__  # type: ignore[attr-defined]
    getter = descriptor.fget if isinstance(descriptor, property) else descriptor
    attribute = str(getattr(getter, "__name__", ""))
    if name == "__get__":
        is_asked = attribute in _READ and (attribute != "_version" or is_users(calling_frame()))
        return attribute if is_asked else ""
    return f"{attribute} =" if attribute in _MARKED_ATTRIBUTES else ""


def changes_flag(mark: str, args: Sequence[Any]) -> bool:
    """Whether a call with this mark gives its first argument another `requires_grad`."""
    if mark not in OF_FLAG:
        return False
    wanted = mark != "detach_" and bool(args[1] if len(args) > 1 else True)
    return bool(args[0].requires_grad != wanted)


@contextmanager
def watching_backward(differentiates: Callable[[Sequence[Any], Sequence[Any], bool], None]) -> Iterator[None]:
    """In this context `differentiates(outputs, inputs, accumulates)` is called before every run of autograd's engine."""
    original = graph._engine_run_backward

    def run(outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        inputs = kwargs.get("inputs", args[3] if len(args) > 3 else ())
        differentiates(outputs, inputs or (), bool(kwargs.get("accumulate_grad")))
        return original(outputs, *args, **kwargs)

    homes: tuple[Any, ...] = (graph, torch.autograd)  # both look it up by name
    for home in homes:
        home._engine_run_backward = run
    try:
        yield
    finally:
        for home in homes:
            home._engine_run_backward = original


def joined(fake: Tensor, sources: Iterable[Tensor]) -> Tensor:
    """The tensor, with a history that leads to the sources that require grad, as if it were computed from them.

    It replaces a tensor that was computed where nothing was recorded. Without such sources it is the result of a clone, and no leaf either.
    """
    with torch.enable_grad():
        history = [tensor for tensor in sources if tensor.requires_grad and tensor.layout is torch.strided]
        if not history:
            return fake.requires_grad_().clone()
        for tensor in history:
            real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
            fake.add_(real.sum().to(fake.dtype))
    return fake


def leads_to(origins: Iterable[Tensor], targets: Sequence[Any]) -> bool:
    """Whether autograd's graph leads from one of the origins to one of the targets, which are tensors or edges."""
    wanted = {id(node) for node in map(_node_of, targets) if node is not None}
    variables = {id(target) for target in targets if isinstance(target, Tensor)}
    pending = [tensor.grad_fn for tensor in origins if tensor.grad_fn is not None]
    seen: dict[int, Any] = {}
    while pending:
        node = pending.pop()
        if id(node) in seen:
            continue
        seen[id(node)] = node
        if id(node) in wanted or id(getattr(node, "variable", None)) in variables:
            return True
        pending.extend(following for following, _ in node.next_functions if following is not None)
    return False


def _node_of(target: Any) -> Any:
    return target.grad_fn if isinstance(target, Tensor) else getattr(target, "node", None)
