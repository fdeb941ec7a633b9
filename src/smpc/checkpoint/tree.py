"""Nested plain values with tensors in them, as JSON beside named tensors; no pickle.

    flatten({"step": 3, "ema": tensor}, "user")
        -> {"step": 3, "ema": {"$": "tensor", "name": "/ema"}}, {"/ema": tensor}
    rebuild(values, read)
        -> the same again; `read(name)` brings a tensor

Supported: None, bool, int, float (NaN and infinities too), str, bytes, list, tuple, dict with any of these as keys, collections.Counter
(MultiStepLR has one), torch.Tensor, numpy.ndarray (comes back as a tensor), numpy's numbers (come back as Python's). DTensors are refused,
as they would have to be gathered. Anything else raises CheckpointError, naming where it stands.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from smpc.errors import CheckpointError

_TAG = "$"


def flatten(tree: Any, what: str) -> tuple[Any, dict[str, Tensor]]:
    """JSON values, and the tensors that they refer to. `what` names the tree in errors, of which all are listed."""
    tensors: dict[str, Tensor] = {}
    wrong: list[str] = []
    try:
        values = _flatten(tree, "", tensors, wrong)
    except RecursionError:
        raise CheckpointError(f"{what} is nested too deeply, or contains itself") from None
    if wrong:
        raise CheckpointError(
            "\n".join(
                f"{what}{place}; saved are plain values, lists, tuples, dicts and tensors. Convert it, or ask for pickle by name"
                for place in wrong
            )
        )
    return values, tensors


def rebuild(values: Any, read: Callable[[str], Any]) -> Any:
    """The tree of JSON values that `flatten` made."""
    if isinstance(values, list):
        return [rebuild(item, read) for item in values]
    if not isinstance(values, dict):
        return values
    tag = values.get(_TAG)
    if tag is None:
        return {key: rebuild(item, read) for key, item in values.items()}
    try:
        return _special(str(tag), values, read)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"a saved value of the type {tag!r} is damaged, or a later release wrote it: {error}"
        ) from error


def _special(tag: str, values: dict[str, Any], read: Callable[[str], Any]) -> Any:
    if tag == "tensor":
        return read(values["name"])
    if tag == "tuple":
        return tuple(rebuild(item, read) for item in values["items"])
    if tag == "dict":
        return {rebuild(key, read): rebuild(item, read) for key, item in values["items"]}
    if tag == "bytes":
        return bytes.fromhex(values["hex"])
    if tag == "float":
        return float(values["value"])
    if tag == "counter":
        return Counter({rebuild(key, read): rebuild(item, read) for key, item in values["items"]})
    raise ValueError("unknown type")


def _flatten(tree: Any, place: str, tensors: dict[str, Tensor], wrong: list[str]) -> Any:
    if isinstance(tree, (np.bool_, np.integer, np.floating)):
        tree = tree.item()
    if tree is None or type(tree) in (bool, int, str):
        return tree
    if isinstance(tree, float):
        return float(tree) if math.isfinite(tree) else {_TAG: "float", "value": repr(float(tree))}
    if isinstance(tree, bytes):
        return {_TAG: "bytes", "hex": tree.hex()}
    if isinstance(tree, np.ndarray) and tree.dtype.kind in "biuf":
        tree = torch.from_numpy(np.array(tree))
    if isinstance(tree, Tensor) and not isinstance(tree, DTensor):
        tensors[place or "/"] = tree.detach()
        return {_TAG: "tensor", "name": place or "/"}
    if type(tree) in (list, tuple, torch.Size):
        items = [_flatten(item, f"{place}/{index}", tensors, wrong) for index, item in enumerate(tree)]
        return items if type(tree) is list else {_TAG: "tuple", "items": items}
    if isinstance(tree, dict):
        pairs = [
            (_flatten(key, f"{place}/key {i}", tensors, wrong), _flatten(item, f"{place}/{key}", tensors, wrong))
            for i, (key, item) in enumerate(tree.items())
        ]
        if all(type(key) is str for key, _ in pairs) and _TAG not in tree and not isinstance(tree, Counter):
            return dict(pairs)
        return {_TAG: "counter" if isinstance(tree, Counter) else "dict", "items": [list(pair) for pair in pairs]}
    wrong.append(f"{place or ' itself'} is a {type(tree).__module__}.{type(tree).__qualname__}")
    return None
