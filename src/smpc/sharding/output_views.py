"""Outputs of sharded units that are views of what the unit has computed: what a script writes into one reaches those that share its memory.

torch gathers a unit for its backward when a gradient comes to one of its outputs, by a hook on the output. A write into a view drops that
hook, as autograd then goes another way: from the view to what it is a view of.

    h = lin(x)
    return h[:, 0]                      a copy, which is no view
    return h, h[:, 0]                   h has the hook, to which the gradient of a view comes in any case
    return h[:, 0], h[:, 1]             two copies, as they share no memory
    return h.view(8), h.t()             views of one copy of h, which has the hook
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from smpc.containers import map_tensors, tensors_in


def without_lost_hooks(module: nn.Module, inputs: object, output: Any) -> Any:
    """The outputs of a unit, as above. An output that comes several times stays one tensor. A forward hook, before torch's."""
    whole: set[int] = set()
    views: dict[int, dict[int, Tensor]] = {}  # by what they are views of
    for value in tensors_in(output):
        if not value._is_view():
            whole.add(id(value))
        elif value.requires_grad:
            views.setdefault(id(value._base), {})[id(value)] = value
    made: dict[int, Tensor] = {}
    for base, own in views.items():
        if base not in whole:
            made.update(zip(own, _copies(list(own.values())), strict=True))
    return map_tensors(lambda value: made.get(id(value), value), output) if made else output


def _copies(views: Sequence[Tensor]) -> list[Tensor]:
    """Copies of views of one tensor: each by itself, or views of one copy."""
    if not _overlap(views):
        return [view.clone() for view in views]
    base = views[0]._base
    assert base is not None, "they are views"
    copied = base.clone()
    return [view._view_func(copied) for view in views]  # type: ignore[attr-defined]


def _overlap(views: Sequence[Tensor]) -> bool:
    """Whether the memory of some of them, from the first element to the last, overlaps."""
    found = sorted(map(_interval, views))
    return any(first < end for (_, end), (first, _) in itertools.pairwise(found))


def _interval(view: Tensor) -> tuple[int, int]:
    first = int(view.storage_offset())
    last = sum((int(size) - 1) * int(step) for size, step in zip(view.shape, view.stride(), strict=True))
    return first, first + last + 1 if view.numel() else first


def hook_what_is_viewed(unit: Any) -> None:
    """Have torch put its hooks on what the outputs of a unit are views of, where it is not dropped."""
    state = unit._get_fsdp_state()
    state._register_pre_backward_hook = functools.partial(_hook_bases, state._register_pre_backward_hook)


def _hook_bases(original: Callable[[Any], Any], output: Any) -> Any:
    values = list(tensors_in(output))
    found = [value if value._base is None else value._base for value in values]
    has_views = any(hooked is not value for hooked, value in zip(found, values, strict=True))
    if not has_views or torch._C._are_functorch_transforms_active():
        return original(output)
    original([tensor for tensor in {id(hooked): hooked for hooked in found}.values() if tensor.requires_grad])
    return output
