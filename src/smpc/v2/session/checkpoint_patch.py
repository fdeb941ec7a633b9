"""The changes of `tsm.init` to torch.distributed.checkpoint's `save`, `async_save` and `load`; part of `fsdp_patch`.

Ranks have parts of some weights under the same names: slices that are no DTensors, and experts. Of tensors of one name torch writes the
first rank's. Where all ranks that divide a weight save into one place, or load from it, these become boxes of the whole tensor, as in
`smpc.v2.distributed.checkpoint`; groups of ranks with the same parts have them as they are, in a place of each.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

from smpc.mesh import Axis
from smpc.optimizers.torch_patches import replace_method
from smpc.v2.state_handler import Session
from smpc.v2.transforming.transformed_slices import as_boxes, take_over


def patch_distributed_checkpoints(session: Session) -> list[Callable[[], None]]:
    """Patch torch for a session; the functions that take it back."""

    def saving(original: Callable[..., Any]) -> Callable[..., Any]:
        def save(*args: Any, **kwargs: Any) -> Any:
            given = inspect.signature(original).bind(*args, **kwargs)
            if _is_divided(session, given.arguments):
                given.arguments["state_dict"] = as_boxes(given.arguments["state_dict"])
            return original(*given.args, **given.kwargs)

        return save

    def loading(original: Callable[..., Any]) -> Callable[..., Any]:
        def load(*args: Any, **kwargs: Any) -> Any:
            given = inspect.signature(original).bind(*args, **kwargs)
            own = given.arguments["state_dict"]
            if _is_divided(session, given.arguments):
                given.arguments["state_dict"] = as_boxes(own)
            found = original(*given.args, **given.kwargs)
            if given.arguments["state_dict"] is not own:
                take_over(own, given.arguments["state_dict"])
            return found

        return load

    return [
        replace_method(state_dict_saver, "_save_state_dict", saving),
        replace_method(state_dict_loader, "_load_state_dict", loading),
    ]


def _is_divided(session: Session, given: Mapping[str, Any]) -> bool:
    """Whether the ranks that are given have all parts of what ranks divide."""
    mesh, group = session.mesh, given.get("process_group")
    if given.get("no_dist", False):
        return False
    ranks = range(mesh.world_size) if group is None else dist.get_process_group_ranks(group)
    kinds = {tuple(mesh.axis_rank(axis, rank) for axis in (Axis.TP, Axis.EP)) for rank in ranks}
    return len(kinds) == mesh.size(Axis.TP) * mesh.size(Axis.EP) > 1
