"""Conversions of a module's tensors in forward: `self.router = self.router.to(torch.float32)`, `.half()`, `.cuda()`.

parameters that are so already    they stay as they are, and nothing is recorded; their types are guarded
other parameters                  refused, wherever: plain PyTorch would give them other memory, and the optimizer another type
buffers                           recorded: the module holds another buffer afterwards
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from smpc.tracer.effects.differentiation import CONVERT
from smpc.tracer.effects.torch_calls import version_of

if TYPE_CHECKING:
    from smpc.tracer.recording.recorder import Recorder

_Convert = Callable[[Tensor], Tensor]


@contextmanager
def watching_conversions(recorder: Recorder) -> Iterator[None]:
    """In this context the model's modules are converted as a trace can hold it; others as by torch."""
    original, thread = nn.Module._apply, threading.get_ident()

    def apply(module: nn.Module, fn: _Convert, recurse: bool = True) -> Any:
        is_own = id(module) in recorder.modules and threading.get_ident() == thread
        if not is_own or torch.__future__.get_overwrite_module_params_on_conversion():
            return original(module, fn, recurse)  # type: ignore[no-untyped-call]
        for child in module.children() if recurse else ():
            child._apply(fn)  # type: ignore[no-untyped-call]
        for parameter in module._parameters.values():
            if parameter is not None:
                recorder.watch.converted[id(module)] = None
                _check(recorder, parameter, fn)
        module._buffers.update({key: fn(buffer) for key, buffer in module._buffers.items() if buffer is not None})
        return module

    nn.Module._apply = apply  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._apply = original  # type: ignore[method-assign]


def _check(recorder: Recorder, parameter: Tensor, fn: _Convert) -> None:
    """Raises TraceError unless the conversion of a parameter is the parameter as it was."""
    version = version_of(parameter)
    with torch.no_grad():
        found = fn(parameter)
    if found is parameter and version_of(parameter) == version:
        return
    before, after = (f"{tensor.dtype} on {tensor.device.type}" for tensor in (parameter, found))
    change = f"from {before} to {after}" if before != after else "in other memory, or with other values"
    recorder.watch.refuse_everywhere(f"forward converts {recorder.known(parameter)} {change}", CONVERT)
