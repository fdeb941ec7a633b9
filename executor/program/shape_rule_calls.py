"""Modules that are called whole by a shape rule, whose forward no recording has run: what they write is seen when they first run.

A pipeline goes on with the next microbatch before the backward of the first. A module that writes into what autograd keeps of its own, by
a way that counts no version (`self.table.data.mul_(0.9)`, numpy), would have that backward use other values. Others are refused when they
are recorded; these in the first call of a stage, before anything is trained:

    call = first_watched(stage, {"experts": model.experts}, "stage 1")
    call(x)                                   StepError if forward writes into an attribute or a parameter that the backward needs
    call(x)                                   as it is
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from smpc.errors import StepError
from smpc.sharding.dtensors import digest, local
from smpc.tracer.effects.torch_calls import uncompiled, version_of
from smpc.tracer.state.attribute_memory import AttributeMemory, Extent


def first_watched(call: Callable[..., Any], modules: Mapping[str, nn.Module], where: str) -> Callable[..., Any]:
    """`call`, in the first run of which the modules are watched. `where`: of the call, for messages."""
    waiting = [True]

    def run(*arguments: Any) -> Any:
        if not waiting or not torch.is_grad_enabled():
            return call(*arguments)
        with uncompiled(), _watching(modules, where):
            outputs = call(*arguments)
        waiting.clear()
        return outputs

    return run


_lock = threading.Lock()  # stages of one process may run in threads
_watched: dict[int, str] = {}  # modules by identity, for messages
_call: Callable[..., Any] = vars(nn.Module)["_call_impl"]


@contextmanager
def _watching(modules: Mapping[str, nn.Module], where: str) -> Iterator[None]:
    """In this context, StepError after a call of one of the modules that writes into what it has autograd keep."""
    with _lock:
        _watched.update((id(module), f"{where}: module {name!r}") for name, module in modules.items())
        setattr(nn.Module, "_call_impl", _call_watched)  # noqa: B010
    try:
        yield
    finally:
        with _lock:
            for module in modules.values():
                _watched.pop(id(module), None)
            if not _watched:
                setattr(nn.Module, "_call_impl", _call)  # noqa: B010


def _call_watched(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """In place of what calls a module's hooks and its forward."""
    name = _watched.get(id(module))
    if name is None:
        return _call(module, *args, **kwargs)
    own, kept = _Own(module), list[Extent]()

    def keep(tensor: Tensor) -> tuple[Tensor, int]:
        if own.holds(tensor):
            kept.append(Extent.of(tensor))
        return tensor, version_of(tensor)

    with saved_tensors_hooks(keep, _unchanged):
        output = _call(module, *args, **kwargs)
    wrong = own.written(kept)
    if wrong:
        raise StepError(
            f"{name} ({type(module).__name__}), which is called whole by its shape rule: expected a forward that leaves alone what a "
            f"backward needs, as several microbatches are under way at a time, found that it writes into {', '.join(wrong)}; have forward "
            "read a copy (.clone()), or use one microbatch"
        )
    return output


class _Own:
    """A module's attributes and parameters as they are now. Buffers that a backward needs count versions, but for running statistics."""

    def __init__(self, module: nn.Module) -> None:
        self._attributes = AttributeMemory(module)
        found = ((name, local(parameter.detach())) for name, parameter in module.named_parameters())
        self._parameters = {name: each for name, each in found if each.numel() and not each.is_meta}
        self._digests = {name: digest(each) for name, each in self._parameters.items()}
        own = {name: Extent.of(each) for name, each in self._parameters.items()}
        self._extents: Mapping[str, Extent] = {**self._attributes.extents, **own}

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor is in the memory of one."""
        is_real = tensor.layout is torch.strided and not tensor.is_meta and tensor.numel() > 0
        return is_real and any(extent.overlaps(Extent.of(tensor)) for extent in self._extents.values())

    def written(self, kept: list[Extent]) -> list[str]:
        """The names of tensors that have been written into, and of whose memory something is in `kept`."""
        other = [name for name, each in self._parameters.items() if not torch.equal(digest(each), self._digests[name])]
        names = [*self._attributes.written(), *other]
        return [name for name in names if any(self._extents[name].overlaps(each) for each in kept)]


def _unchanged(saved: tuple[Tensor, int]) -> Tensor:
    tensor, version = saved
    if version_of(tensor) != version:
        raise RuntimeError(
            f"one of the variables needed for gradient computation has been modified by an inplace operation: {list(tensor.shape)} is at "
            f"version {tensor._version}; expected version {version} instead"
        )
    return tensor
