"""Tensors as bytes, and the names that safetensors gives to dtypes.

dtype_name(torch.bfloat16) -> "BF16"        dtype_of("BF16") -> torch.bfloat16
byte_view(tensor) -> memoryview             of a contiguous tensor on the CPU; no copy
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from smpc.errors import CheckpointError

MAX_DIMS = 64  # as torch has it
LARGEST = 1 << 58  # of numbers of elements: their bytes fit into 64 bits

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """The name in files. Raises CheckpointError for a dtype that safetensors has not."""
    try:
        return _NAMES[dtype]
    except KeyError:
        raise CheckpointError(
            f"tensors of {dtype} cannot be saved; supported are {', '.join(map(str, _NAMES))}"
        ) from None


def dtype_of(name: object) -> torch.dtype:
    """The dtype of a name in a file."""
    if not isinstance(name, str) or name not in _DTYPES:
        raise CheckpointError(f"expected one of the dtypes {', '.join(_DTYPES)}, found {name!r}")
    return _DTYPES[name]


def num_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    """The bytes of a contiguous tensor."""
    return math.prod(shape) * dtype.itemsize


def checked_shape(values: Any) -> tuple[int, ...]:
    """The shape in a file. Raises ValueError for an impossible shape, which would take for ever to multiply or to allocate."""
    if not isinstance(values, (list, tuple)) or len(values) > MAX_DIMS:
        raise ValueError(f"expected a shape of at most {MAX_DIMS} dimensions")
    if any(type(size) is not int or not 0 <= size < LARGEST for size in values):
        raise ValueError("a size in a shape is not a whole number, or too large")
    if math.prod(max(size, 1) for size in values) >= LARGEST:
        raise ValueError("a shape of more elements than any tensor has")
    return tuple(values)


def byte_view(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, shared with it."""
    assert tensor.is_contiguous(), "its bytes are not contiguous"
    flat: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()  # raises if it is not on the CPU
    return memoryview(flat)
