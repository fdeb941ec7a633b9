"""Hooks of modules: what they do happens only where their module is called.

A stage computes modules that it does not have whole node by node, without calling them. So a module with hooks is never cut: it is called
whole, hooks and all. The model itself is always cut, and so hooks on it are refused; so are hooks on all modules of the process
(`torch.nn.modules.module.register_module_forward_hook`), which would see stages, not the model.

Hooks of torch's, Hugging Face's and our own compute or collect tensors and nothing else (weight_norm, the capture of hidden states): what
they do is recorded like all else, and their modules may be cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from torch import nn
from torch.nn.modules import module as modules

from smpc.errors import TraceError

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
    return next((kind for table, kind in _OF_MODULE if _is_users(vars(module).get(table, {}).values())), "")


def check_hooks(model: nn.Module) -> None:
    """Raises TraceError for hooks that would be lost wherever the model is cut."""
    kind = hook_of(model)
    if kind:
        raise TraceError(
            f"cannot trace the model itself: it has a {kind}, and a pipeline never calls it as a whole; {_WAY_OUT}"
        )
    everywhere = next((kind for table, kind in _OF_ALL if _is_users(_table(table).values())), "")
    if everywhere:
        raise TraceError(
            f"cannot trace the model: a {everywhere} is registered for all modules of the process, which would run for the stages of a "
            f"pipeline, and not for the modules that are cut; {_WAY_OUT}"
        )


def _table(name: str) -> Mapping[int, Any]:
    found: Mapping[int, Any] = vars(modules)[name]
    return found


def _is_users(hooks: Iterable[Callable[..., Any]]) -> bool:
    return any(_home(hook) not in _LIBRARIES for hook in hooks)


def _home(hook: Any) -> str:
    """The package that a hook belongs to."""
    while isinstance(hook, partial):
        hook = hook.func
    home = getattr(hook, "__module__", None) or type(hook).__module__
    return str(home).partition(".")[0]
