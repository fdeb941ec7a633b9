"""torch's own functions that clip gradients, exchanged for others that know more of parameters.

    undo = replace_clipping({"clip_grad_norm_": lambda original: ...})

Each of torch's functions is `_no_grad(function)`, a closure over the inner function. The content of that cell is exchanged, so that names
imported earlier (`from torch.nn.utils import clip_grad_norm_`, accelerate) change, too, and no attribute of torch is replaced.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.nn.utils import clip_grad

Tensors = Tensor | Iterable[Tensor]
Maker = Callable[[Callable[..., Any]], Callable[..., Any]]


def replace_clipping(makers: Mapping[str, Maker]) -> Callable[[], None]:
    """Exchange functions of torch.nn.utils.clip_grad, by name, for what is made of each; the function that undoes it."""
    before: list[tuple[Any, Callable[..., Any]]] = []
    for name, make in makers.items():
        cell = _cell_of(getattr(clip_grad, name))
        before.append((cell, cell.cell_contents))
        cell.cell_contents = make(cell.cell_contents)

    def undo() -> None:
        for cell, original in reversed(before):
            cell.cell_contents = original

    return undo


def listed(given: Tensors) -> tuple[Tensors, list[Tensor]]:
    """The argument, to be passed on unchanged, and as a list."""
    if isinstance(given, Tensor):
        return given, [given]
    tensors = list(given)
    if isinstance(given, types.GeneratorType):
        return (tensor for tensor in tensors), tensors  # torch warns of empty ones
    return tensors, tensors


def _cell_of(wrapper: Any) -> Any:
    """The cell in which a function under `_no_grad` finds what it calls, torch's own or what another session has put there."""
    cells: tuple[Any, ...] = tuple(wrapper.__closure__ or ())
    assert len(cells) == 1, f"torch.nn.utils.{wrapper.__name__} is not what it was up to torch 2.13"
    return cells[0]
