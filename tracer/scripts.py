"""Calls of TorchScript functions, each recorded as one node that calls the function again.

The script's interpreter is C++ and runs kernels without telling Python, so that nothing inside can be recorded; its backward comes with it
wherever it is called. A function needs a name that leads to it: `@torch.jit.script` at the top of a module. TorchScript modules are called
whole (see `smpc.tracer.record`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from smpc.tracer import targets
from smpc.tracer.effects import tensors_in, version_of
from smpc.tracer.measure import moved_bytes
from smpc.tracer.recorder import Recorder


def call_script(
    recorder: Recorder,
    function: Any,
    run: Callable[[], Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    """What `run` returns, which calls the torch.jit.ScriptFunction with these arguments; adds the node of that call."""
    with torch._C.DisableTorchFunction():
        target = _name(recorder, function)
        arguments = recorder.arguments(target, args, kwargs)
        given = list(tensors_in((args, kwargs)))
        before = [(tensor, version_of(tensor)) for tensor in given]
    with recorder.inside_call():
        out = run()
    with torch._C.DisableTorchFunction():
        written = [tensor for tensor, version in before if version_of(tensor) != version]
        recorder.add_call(target, arguments, out, written, moved_bytes(given, list(tensors_in(out)), bool(written)))
    return out


def _name(recorder: Recorder, function: Any) -> str:
    origin: Any = vars(function).get("_torchdynamo_inline")  # the Python that was compiled
    name = f"{origin.__module__}.{origin.__qualname__}" if origin is not None else function.name
    try:
        found = targets.function(name)
    except KeyError:
        found = None
    if found is not function:
        raise recorder.error(
            f"TorchScript function {function.name} must be defined at the top of a module, where its name leads to it"
        )
    return name
