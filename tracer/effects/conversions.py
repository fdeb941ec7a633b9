"""Conversions of a module's tensors in forward: `self.router = self.router.to(torch.float32)`, `.half()`, `.cuda()`.

parameters, buffers that are so already    they stay as they are, and nothing is recorded; their types are guarded
others                                     refused, wherever: plain PyTorch would give a parameter other memory, and the optimizer another
                                           type; a buffer would have another type in the next step, on the rank of its stage alone
buffers that forward has computed          converted as by torch, which is recorded
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
        for name, buffer in module._buffers.items():
            if buffer is not None and id(buffer) in recorder.state.names:
                _check(recorder, buffer, fn)
            elif buffer is not None:
                module._buffers[name] = fn(buffer)
        return module

    nn.Module._apply = apply  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._apply = original  # type: ignore[method-assign]


def _check(recorder: Recorder, tensor: Tensor, fn: _Convert) -> None:
    """Raises TraceError unless the conversion of a parameter or buffer is the tensor as it was."""
    version = version_of(tensor)
    with torch.no_grad():
        found = fn(tensor)
    if found is tensor and version_of(tensor) == version:
        return
    before, after = (f"{value.dtype} on {value.device.type}" for value in (tensor, found))
    change = f"from {before} to {after}" if before != after else "in other memory, or with other values"
    lasting = "which lasts: from then on it would be trained in a type that its optimizer was not given"
    lasting = f", {lasting}" if before != after and isinstance(tensor, torch.nn.Parameter) else ""
    recorder.watch.refuse_everywhere(f"forward converts {recorder.known(tensor)} {change}{lasting}", CONVERT)
