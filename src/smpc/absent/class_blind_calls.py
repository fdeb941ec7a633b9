"""What computes with tensors without asking their class: some collectives of torch.distributed, and functions of TorchScript.

    dist.all_gather_into_tensor(out, parameter)     an error if the parameter is absent, as for `parameter + 1`
    scripted(parameter)                             an error

Classes decide about every other function of torch's (`smpc.absent.absent_tensors`), in torch 2.13 about most collectives. torch is changed
with the first absent tensor, and stays so.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.utils._pytree import tree_leaves

from smpc.nn.changed_functions import change_function

Refuse = Callable[[str, Tensor], Exception]


@functools.cache
def refuse_unasked(kind: type[Tensor], refuse: Refuse) -> None:
    """Have these functions raise `refuse(name, tensor)` for tensors of a class."""
    for name in distributed_c10d.__all__:
        found = vars(distributed_c10d)[name]
        function: Any = inspect.unwrap(found) if type(found) is FunctionType else None
        if function is not None and _takes_tensors(function) and _ASKS not in function.__code__.co_names:
            change_function(function, functools.partial(_refusing, name, kind, refuse))
    called = torch._C.ScriptFunction.__call__
    torch._C.ScriptFunction.__call__ = _refusing("a function of TorchScript", kind, refuse, called)  # type: ignore[method-assign]


def _takes_tensors(function: Callable[..., Any]) -> bool:
    return any("tensor" in name or name in ("input", "output") for name in inspect.signature(function).parameters)


def _refusing(name: str, kind: type[Tensor], refuse: Refuse, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        absent = next((each for each in tree_leaves((args, kwargs)) if isinstance(each, kind)), None)
        if absent is not None:
            raise refuse(name, absent)
        return original(*args, **kwargs)

    return call


_ASKS = "handle_torch_function"
