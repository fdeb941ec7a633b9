"""What a call costs, read off its fake run: FLOPs, bytes, random draws, and what autograd saves.

`Meter` is a TorchDispatchMode that sees the aten operations under a recorded torch function; `saved_storages` is a
`saved_tensors_hooks` pair that lists the storages which autograd keeps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from smpc.tracer.effects.torch_calls import same_memory
from smpc.tracer.operations.dtypes import check_dtypes


def _attention_flops(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    """FLOPs of softmax(q k^T) v for shapes [batch, heads, queries, d] and [batch, heads, keys, d]: two matrix products."""
    batch, heads, queries, width = query.shape
    return int(2 * batch * heads * queries * key.shape[-2] * (width + value.shape[-1]))


# torch's registry lacks the fused attention of CPUs.
_OWN_FORMULAS: dict[Any, Callable[..., int]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
}


class Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the FLOPs of the aten operations that pass, and notes whether one draws random numbers."""

    supports_higher_order_operators = True  # `torch.cond` and the like pass, not counted

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0
        self.random = False

    def reset(self) -> None:
        """Starts again at zero."""
        self.flops, self.random = 0, False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        check_dtypes(func, args, kwargs or {})
        self.add(func, args, kwargs or {}, out)
        return out

    def add(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> None:
        """Adds an operation that has returned `out`."""
        if isinstance(func, torch._ops.HigherOrderOperator):
            return
        packet = func._overloadpacket
        if packet in flop_registry:
            self.flops += int(flop_registry[packet](*args, **kwargs, out_val=out))
        elif packet in _OWN_FORMULAS:
            self.flops += _OWN_FORMULAS[packet](*args, **kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.random = True


def moved_bytes(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], writes: bool) -> int:
    """Bytes that a call reads and writes; none if it only makes views."""
    if not writes and all(any(same_memory(output, tensor) for tensor in inputs) for output in outputs):
        return 0
    return sum(touched_bytes(tensor) for tensor in (*inputs, *outputs))


def touched_bytes(tensor: torch.Tensor) -> int:
    """Bytes that reading the whole tensor moves: an expanded tensor counts its memory once."""
    if tensor.layout is not torch.strided:
        return int(tensor.numel() * tensor.element_size())
    distinct = math.prod(size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride or not size)
    return distinct * tensor.element_size()
