"""Conversions of parameters in forward, which last: `self.classifier = self.classifier.to(torch.float32)` in a model in half precision.

In one process the parameter has the other type from the first forward on. What averages its gradients over ranks, or holds it in parts, was
made for the first type. A recording refuses such a conversion by itself; a model that runs as it is does so here, in its first forward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from smpc.errors import StepError


@contextlib.contextmanager
def conversions_refused(models: Iterable[nn.Module], before: str) -> Iterator[None]:
    """In this context, StepError before a module of the models gets trained parameters of another type.

    `before`: the call before which a script may convert them.
    """
    original = nn.Module._apply
    names = {id(module): name for model in models for name, module in model.named_modules()}

    def apply(module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        if id(module) in names:
            _check_types(module, names[id(module)], fn, before, recurse=recurse)
        return original(module, fn, recurse)  # type: ignore[no-untyped-call]

    nn.Module._apply = apply  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._apply = original  # type: ignore[method-assign]


def _check_types(module: nn.Module, name: str, fn: Callable[[Tensor], Tensor], before: str, *, recurse: bool) -> None:
    for own, parameter in module.named_parameters(recurse=recurse):
        if not parameter.requires_grad:
            continue
        with torch.no_grad():
            found = fn(parameter)
        if found.dtype is not parameter.dtype:
            raise StepError(
                f"forward converts {'.'.join(filter(None, (name, own)))} from {parameter.dtype} to {found.dtype}, which lasts: expected the"
                " type that its optimizer, and what averages its gradients over ranks, were given; convert it once, before "
                f"{before}, or for one use at a time (F.linear(x, layer.weight.to(x.dtype))), or, where bf16 or fp16 casts the "
                "model, have forward ask for that type, which the configuration of a model may say"
            )
