"""What a module keeps of the rows that it is called with: a count of tokens, the last result, a running average.

A rank's experts get other rows than in one process: the rows of all ranks, for some of the experts. So what they keep of the rows differs,
and so does what a router, a loss or a checkpoint makes of it.

    load = [3, 5, 2, 6]        in one process
    load = [7, 9]              on rank 0 of 2, of the tokens of both

A copy of the module is run on two inputs; an attribute or buffer that has changed, and is not the same after both, is kept of the rows.
A number of calls is not kept of the rows: it is the same after both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn


def kept_of_rows(make: Callable[[], nn.Module], runs: Sequence[Callable[[nn.Module], object]]) -> list[str]:
    """The attributes and buffers that depend on which of two `runs` a new module of `make` has been called by."""
    first, second = [_changes(make(), run) for run in runs]
    return [name for name in (first | second) if not _same(first.get(name, _ABSENT), second.get(name, _ABSENT))]


def changed_buffers(module: nn.Module, run: Callable[[nn.Module], object]) -> list[str]:
    """The buffers that a call changes."""
    buffers = {name for name, _ in module.named_buffers()}
    return [name for name in _changes(module, run) if name in buffers]


_ABSENT = object()
_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, type(None))


def _changes(module: nn.Module, run: Callable[[nn.Module], object]) -> dict[str, object]:
    """What is there, by name, after a call and was not before."""
    before = _held(module)
    run(module)
    after = _held(module)
    return {name: value for name, value in after.items() if not _same(before.get(name, _ABSENT), value)}


def _held(module: nn.Module) -> dict[str, object]:
    usual = vars(nn.Module())
    found: dict[str, object] = {}
    for prefix, part in module.named_modules():
        own = {key: value for key, value in vars(part).items() if key not in usual} | part._buffers
        found |= {f"{prefix}.{key}" if prefix else key: _copied(value) for key, value in own.items()}
    return found


def _copied(value: object) -> object:
    """A value that stays as it is when the original is written into."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, list | tuple | set | frozenset):
        return [_copied(each) for each in value]
    if isinstance(value, dict):
        return {key: _copied(each) for key, each in value.items()}
    return value


def _same(first: object, second: object) -> bool:
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return first.shape == second.shape and first.dtype == second.dtype and _equal(first, second)
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(_same(*both) for both in zip(first, second, strict=True))
    if isinstance(first, dict) and isinstance(second, dict):
        return list(first) == list(second) and all(_same(first[key], second[key]) for key in first)
    if isinstance(first, _PLAIN) and isinstance(second, _PLAIN):
        return first == second
    return first is second


def _equal(first: Tensor, second: Tensor) -> bool:
    if first.is_meta or second.is_meta:
        return first.device == second.device
    return torch.equal(first, second) or torch.allclose(first, second, rtol=0, atol=0, equal_nan=True)
