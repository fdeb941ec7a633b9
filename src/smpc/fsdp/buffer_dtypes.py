"""Floating-point buffers in the dtype that units compute in, while state dicts have them as they were.

    between steps     module.scale is bf16, cast once; the fp32 values are beside it
    state_dict()      fp32: what was there, and where forward has changed the buffer since, what it has now
    load_state_dict   fills both

    a buffer of                   is cast to the buffer_dtype of
    a module of a unit            the innermost unit around it
    a child without parameters    the configuration
    BatchNorm and InstanceNorm, torchmetrics, ignored_modules, and the model itself: none, it stays as it is

Recomputation in backward sees the same buffers, since they are never cast back.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase


class CastBuffers:
    """The buffers of one module that are cast. Made by `cast_buffers`; `kept`: the values before, by name."""

    def __init__(self, module: nn.Module, kept: Mapping[str, Tensor]) -> None:
        self._module, self._kept = module, dict(kept)
        # a partial: of a method torch could not note that it is a hook of this kind
        module.register_state_dict_post_hook(functools.partial(self._give))  # type: ignore[no-untyped-call]
        module.register_load_state_dict_pre_hook(self._take)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def settle(self) -> None:
        """Cast again what is kept: a checkpoint has been read into it."""
        for name, kept in self._kept.items():
            now = self._module._buffers.get(name)
            if now is not None and _is_alike(now, kept):
                now.copy_(kept)  # in place: it may have several names

    @torch.no_grad()
    def _give(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: object) -> None:
        for name, kept in self._kept.items():
            now = module._buffers.get(name)
            if prefix + name in state and now is not None and _is_alike(now, kept):
                kept.copy_(torch.where(now == kept.to(now.dtype), kept, now.to(kept.dtype)))
                state[prefix + name] = kept

    @torch.no_grad()
    def _take(self, module: nn.Module, state: Mapping[str, Any], prefix: str, *others: object) -> None:
        for name, kept in self._kept.items():
            given = state.get(prefix + name)
            if isinstance(given, Tensor) and given.shape == kept.shape:
                kept.copy_(given)


def _is_alike(now: Tensor, kept: Tensor) -> bool:
    return now.shape == kept.shape and now.device == kept.device and now.is_floating_point()


def cast_buffers(
    roots: Mapping[str, nn.Module],
    dtypes: Mapping[str, Mapping[str, torch.dtype | None]],
    ignored: Sequence[nn.Module],
) -> tuple[CastBuffers, ...]:
    """Cast the buffers of children of a model, in place.

    `dtypes`: of each child's units, by name, "" being the child itself; None: they stay as they are.
    """
    left = {id(inner) for module in ignored for inner in module.modules()}
    shared: dict[tuple[int, torch.dtype], Tensor] = {}  # one buffer may have several names
    found = []
    for root, child in roots.items():
        for name, module in child.named_modules():
            dtype = dtypes[root][_innermost_unit_of_buffer(name, dtypes[root])]
            if dtype is None or id(module) in left or _buffer_stays(module):
                continue
            kept = {
                each: buffer
                for each, buffer in module._buffers.items()
                if buffer is not None
                and type(buffer) is Tensor
                and buffer.is_floating_point()
                and buffer.dtype != dtype
            }
            for each, buffer in kept.items():
                module._buffers[each] = shared.setdefault((id(buffer), dtype), buffer.to(dtype))
            if kept:
                found.append(CastBuffers(module, kept))
    return tuple(found)


def _innermost_unit_of_buffer(name: str, units: Mapping[str, object]) -> str:
    while name not in units:
        name = name.rpartition(".")[0]
    return name


def _buffer_stays(module: nn.Module) -> bool:
    return isinstance(module, _NormBase) or type(module).__module__.startswith("torchmetrics")
