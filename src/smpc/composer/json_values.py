"""JSON in which values of Python come back as they were: what a data loader's `state_dict` is made of, without pickling anything.

>>> decoded(encoded({"rows": (1, 2), "seen": b"ab"}))
{'rows': (1, 2), 'seen': b'ab'}

Kinds: None, bool, numbers, text, bytes, lists, tuples, dicts with plain keys, counters, tensors, and arrays; numbers of NumPy come back as
Python's.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from smpc.errors import CheckpointError


def encoded(value: Any) -> str:
    """One line of JSON. Raises CheckpointError for a value of another kind."""
    return json.dumps(_encoded_value(value, "state"))


def encodable(value: Any) -> Any:
    """The value without dict entries of other kinds: the object's owner makes those again."""
    if isinstance(value, Mapping) and not isinstance(value, Counter):
        return {key: encodable(inner) for key, inner in value.items() if _is_encodable(inner)}
    if isinstance(value, list | tuple):
        return type(value)(map(encodable, value)) if type(value) in (list, tuple) else tuple(map(encodable, value))
    return value


def _is_encodable(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_encodable, value))
    is_plain = isinstance(value, bool | int | float | str | bytes | None | Tensor | Mapping | np.generic)
    return is_plain or (isinstance(value, np.ndarray) and value.dtype != object)


def decoded(text: str) -> Any:
    """The decoded value. Raises ValueError, TypeError or KeyError for other text."""
    return _decoded_value(json.loads(text))


def _encoded_value(value: Any, where: str) -> Any:
    """A value of Python as JSON has it; an error names its place."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.ndarray) and value.dtype != object:
        return {"array": value.tolist(), "dtype": str(value.dtype)}
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, Tensor):
        return {"tensor": value.tolist(), "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, list | tuple):
        items = [_encoded_value(inner, f"{where}[{index}]") for index, inner in enumerate(value)]
        return items if isinstance(value, list) else {"tuple": items}
    if isinstance(value, Mapping):
        return {
            "counts" if isinstance(value, Counter) else "items": [
                [_encoded_value(key, f"{where}'s key"), _encoded_value(inner, f"{where}[{key!r}]")]
                for key, inner in value.items()
            ]
        }
    raise CheckpointError(f"{where}: expected plain values and tensors, found {type(value).__name__}")


def _decoded_value(value: Any) -> Any:
    """The value of Python that a JSON value stands for."""
    if isinstance(value, list):
        return [_decoded_value(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    if "bytes" in value:
        return bytes.fromhex(value["bytes"])
    if "tensor" in value:
        dtype = getattr(torch, value["dtype"])
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"{value['dtype']!r} is no dtype")
        return torch.tensor(value["tensor"], dtype=dtype)
    if "array" in value:
        return np.array(value["array"], dtype=value["dtype"])
    if "tuple" in value:
        return tuple(_decoded_value(inner) for inner in value["tuple"])
    if "counts" in value:  # of milestones
        return Counter({_decoded_value(key): _decoded_value(inner) for key, inner in value["counts"]})
    return {_decoded_value(key): _decoded_value(inner) for key, inner in value["items"]}
