"""Forwards without gradients leave no unit of FSDP whole, in sessions that change nothing else of how units are gathered.

torch leaves the outermost unit whole, and units that a script wants so, until a backward has used them. Where none comes, what an optimizer
or a script writes into the parts next is not in the whole parameters, and the next forward computes with the old ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

from smpc.optimizers.torch_patches import Undo, replace_method
from smpc.sharding.backwards import is_in_backward
from smpc.v2.session.flat_units import let_go
from smpc.v2.session.ranks_in_step import let_go_without_gradients


def let_go_after_evaluations() -> Iterator[Undo]:
    """Patch FSDP1 and FSDP2; the functions that take it back."""
    yield replace_method(FullyShardedDataParallel, "forward", _forward)
    yield replace_method(FSDPState, "_lazy_init", _lazy_init)


def _forward(original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(unit: Any, *args: Any, **kwargs: Any) -> Any:
        output = original(unit, *args, **kwargs)
        if unit._is_root and not torch.is_grad_enabled() and not is_in_backward():
            let_go(unit)
        return output

    return forward


def _lazy_init(original: Callable[..., None]) -> Callable[..., None]:
    def lazy_init(state: FSDPState) -> None:
        is_first = state._is_root is None
        original(state)
        if is_first and state._is_root:
            for module in state._modules:
                module.register_forward_hook(let_go_without_gradients)

    return lazy_init
