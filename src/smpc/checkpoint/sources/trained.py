"""The optimizer in a Trainer's checkpoint (`smpc.composer`, mosaicml), as checkpoints of this library have it.

{"optimizers": {"AdamW": {"state": {"a.weight": {"exp_avg": tensor}}, "param_groups": [...]}}}      mosaicml
{"optimizers": {"AdamW": {"state": ...}}, "plain": '{"groups": [{"lr": 0.1, "params": ["a.weight"]}]}'}      smpc.composer

tensors_of(state)          {"a.weight::exp_avg": tensor}
groups_of(state)           [{"lr": 0.1, "params": ["a.weight"]}]; None where they do not say their parameters
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from torch import Tensor

SEPARATOR = "::"


def tensors_of(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of the optimizer's state."""
    return {
        f"{name}{SEPARATOR}{key}": value
        for saved in state.get("optimizers", {}).values()
        for name, values in saved.get("state", {}).items()
        for key, value in values.items()
        if isinstance(value, Tensor)
    }


def groups_of(state: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """The options of the parameter groups. Raises ValueError for text that is no JSON."""
    if "plain" in state:
        groups = json.loads(state["plain"]).get("groups", [])
    else:
        groups = [group for saved in state.get("optimizers", {}).values() for group in saved.get("param_groups", ())]
    if not groups or any("params" not in group for group in groups):
        return None
    return [{key: _option(key, value) for key, value in group.items()} for group in groups]


def _option(key: str, value: Any) -> Any:
    return tuple(value) if isinstance(value, list) and key != "params" else value
