"""Parameters, buffers and tensor attributes of a model that share memory.

    self.register_buffer("window", self.table[1:])          # what is written into one is read from the other
    self.register_buffer("shadow", self.weight.data)        # the optimizer writes into both

A recording sees that they are one only if their stand-ins share memory in the same way. Views of one storage that do not overlap, such
as the weights of an LSTM made contiguous, have nothing to do with each other, and count as tensors of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

_TABLES = ("_parameters", "_buffers", "_modules")
_ALIGNMENT = 16  # bytes: every dtype may begin there


def overlaps(model: nn.Module) -> list[list[Tensor]]:
    """Groups of tensors of the model that overlap in memory, at least one of them a parameter or buffer."""
    state = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    every = state | {id(tensor): tensor for tensor in _attributes(model)}
    by_storage: dict[int, list[Tensor]] = {}
    for tensor in every.values():
        if tensor.layout is torch.strided and tensor.numel():
            by_storage.setdefault(tensor.untyped_storage()._cdata, []).append(tensor)
    groups = (group for tensors in by_storage.values() if len(tensors) > 1 for group in _touching(tensors))
    return [group for group in groups if any(id(tensor) in state for tensor in group)]


def alike(group: Sequence[Tensor], device: torch.device | str) -> list[Tensor]:
    """Tensors that overlap as those of the group do, without their values; they require no grad."""
    with torch.no_grad():
        size = max(_interval(tensor)[1] for tensor in group)
        memory = torch.empty(-(-size // _ALIGNMENT) * _ALIGNMENT, dtype=torch.uint8, device=device)
        return [memory.view(t.dtype).as_strided(t.shape, t.stride(), t.storage_offset()).detach() for t in group]


def on_meta(model: nn.Module) -> dict[int, Tensor]:
    """Stand-ins on the meta device for buffers and attributes that share memory, by their ids."""
    found: dict[int, Tensor] = {}
    for group in overlaps(model):
        pairs = zip(group, alike(group, "meta"), strict=True)
        found.update((id(tensor), meta) for tensor, meta in pairs if not isinstance(tensor, nn.Parameter))
    return found


def _touching(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Groups of two and more whose memory, from first byte to last, overlaps."""
    group: list[Tensor] = []
    end = 0
    for tensor in sorted(tensors, key=_interval):
        first, last = _interval(tensor)
        if first >= end:
            if len(group) > 1:
                yield group
            group = []
        group.append(tensor)
        end = max(end, last)
    if len(group) > 1:
        yield group


def _interval(tensor: Tensor) -> tuple[int, int]:
    """First byte of a tensor in its storage, and the one after its last."""
    first = int(tensor.storage_offset())
    last = first + sum((int(size) - 1) * int(step) for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return first * tensor.element_size(), (last + 1) * tensor.element_size()


def _attributes(model: nn.Module) -> Iterator[Tensor]:
    """Tensors that modules hold as plain attributes, also in lists, tuples and dicts."""
    for module in model.modules():
        for key, value in vars(module).items():
            items = (
                value if isinstance(value, (list, tuple)) else value.values() if isinstance(value, dict) else (value,)
            )
            yield from (item for item in items if isinstance(item, Tensor) and key not in _TABLES)
