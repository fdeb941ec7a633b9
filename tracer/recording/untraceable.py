"""What a recording cannot hold: operations (where they happened, what they are, and the way out), and hooks of modules.

`current_line` and `innermost_line`: which line of the model's code something happened on, as file.py:line without folders.

`check_hooks` refuses hooks of modules: what they do happens only where their module is called.

A stage computes modules that it does not have whole node by node, without calling them. So a module with hooks is never cut: it is called
whole, hooks and all. The model itself is always cut, and so hooks on it are refused; so are hooks on all modules of the process
(`torch.nn.modules.module.register_module_forward_hook`), which would see stages, not the model.

Hooks of torch's, Hugging Face's and our own compute or collect tensors and nothing else (weight_norm, the capture of hidden states): what
they do is recorded like all else, and their modules may be cut.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Self

from torch import nn
from torch.nn.modules import module as modules

from smpc.errors import TraceError

BUILD_WHOLE = "what to do: run the model once by itself, or change its settings, so that all its modules are there before it is distributed"
CALL_WHOLE = (
    "what to do: compute the value outside the model and pass it in, "
    "or have the module called whole (leaf_modules=[...], smpc.mark_leaf)"
)

REGISTER_HOOK = "what to do: register it before the model is distributed, or do in forward what the hook does"


class UntraceableError(TraceError):
    """A TraceError inside `module`, the innermost one that was being called; None if that was the model itself."""

    def __init__(self, text: str, module: nn.Module | None) -> None:
        super().__init__(text)
        self.module = module

    @classmethod
    def inside(cls, module: nn.Module | None, fqn: str, line: str, what: str, way_out: str = CALL_WHOLE) -> Self:
        """An error that happened in a module, "" being the model itself."""
        where = f"module {fqn!r} ({type(module).__name__})" if fqn else "the model itself"
        return cls(f"cannot trace {where}{', ' if line else ''}{line}: {what}; {way_out}", module if fqn else None)


def is_users(frame: FrameType) -> bool:
    """Whether a frame runs code that is neither torch's nor ours."""
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] not in ("torch", "smpc", "contextlib")


def calling_frame() -> FrameType:
    """The frame that has made the torch call which `__torch_function__` is asked to run."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_name != "__torch_function__":
        frame = frame.f_back
    return frame.f_back or frame


def innermost_line(error: BaseException) -> str:
    """file.py:line of the innermost frame of the model's code in a traceback."""
    found, traceback = "", error.__traceback__
    while traceback is not None:
        if is_users(traceback.tb_frame):
            found = f"{Path(traceback.tb_frame.f_code.co_filename).name}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return found


def call_model(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The call that is recorded. The recording's caller is not code of the model, so its line is in no trace: see `current_line`."""
    return model(*args, **kwargs)


def current_line() -> str:
    """The innermost line on the stack that is neither torch's nor ours, inside of `call_model` if that is there; "" if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not call_model.__code__:
        if is_users(frame):
            return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


_OF_MODULE = (
    ("_forward_hooks", "forward hook"),
    ("_forward_pre_hooks", "forward pre-hook"),
    ("_backward_hooks", "backward hook"),
    ("_backward_pre_hooks", "backward pre-hook"),
)
_OF_ALL = (
    ("_global_forward_hooks", "forward hook"),
    ("_global_forward_pre_hooks", "forward pre-hook"),
    ("_global_backward_hooks", "backward hook"),
    ("_global_backward_pre_hooks", "backward pre-hook"),
)
_LIBRARIES = ("smpc", "torch", "transformers")
_WAY_OUT = "what to do: register it on a module inside the model, or do what it does in the step function"


def hook_of(module: nn.Module) -> str:
    """The kind of a hook of the user's that the module has, "" without one."""
    return next((kind for table, kind in _OF_MODULE if has_users_hook(vars(module).get(table, {}).values())), "")


def check_hooks(model: nn.Module) -> None:
    """Raises TraceError for hooks that would be lost wherever the model is cut."""
    kind = hook_of(model)
    if kind:
        raise TraceError(
            f"cannot trace the model itself: it has a {kind}, and a pipeline never calls it as a whole; {_WAY_OUT}"
        )
    everywhere = next((kind for table, kind in _OF_ALL if has_users_hook(_table(table).values())), "")
    if everywhere:
        raise TraceError(
            f"cannot trace the model: a {everywhere} is registered for all modules of the process, which would run for the stages of a "
            f"pipeline, and not for the modules that are cut; {_WAY_OUT}"
        )


def _table(name: str) -> Mapping[int, Any]:
    found: Mapping[int, Any] = vars(modules)[name]
    return found


def has_users_hook(hooks: Iterable[Callable[..., Any]]) -> bool:
    """Whether one of them is the script's, and not a library's."""
    return any(_home(hook) not in _LIBRARIES for hook in hooks)


def _home(hook: Any) -> str:
    """The package that a hook belongs to."""
    while isinstance(hook, partial):
        hook = hook.func
    home = getattr(hook, "__module__", None) or type(hook).__module__
    return str(home).partition(".")[0]
