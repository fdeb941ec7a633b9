"""What computes with tensors without asking their class: collectives of torch.distributed, and functions of TorchScript.

    dist.all_reduce(parameter.data)          an error if the parameter is absent, as for `parameter + 1`
    dist.broadcast(parameter.data, src=1)    rank 1 reads, the others are given new values: an error on rank 1 alone
    scripted(parameter)                      an error

Classes decide about every other function of torch's (`smpc.absent.tensors`). torch is changed with the first absent tensor, and stays so.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroup
from torch.utils._pytree import tree_leaves

Refuse = Callable[[str, Tensor], Exception]
_RECEIVING = ("recv", "recv_anysource")


@functools.cache
def refuse_unasked(kind: type[Tensor], refuse: Refuse) -> None:
    """Have these functions raise `refuse(name, tensor)` for tensors of a class."""
    for name, method in list(vars(ProcessGroup).items()):
        if (
            name.startswith("_")
            or not callable(method)
            or name in _RECEIVING
            or isinstance(method, (type, staticmethod, property))
        ):
            continue
        is_read = _sends if name == "broadcast" else _always
        setattr(ProcessGroup, name, _refusing(name, method, kind, refuse, is_read))
    called = torch._C.ScriptFunction.__call__
    torch._C.ScriptFunction.__call__ = _refusing("a function of TorchScript", called, kind, refuse, _always)  # type: ignore[method-assign]


def _refusing(
    name: str,
    original: Callable[..., Any],
    kind: type[Tensor],
    refuse: Refuse,
    is_read: Callable[[tuple[Any, ...]], bool],
) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        absent = [each for each in tree_leaves((args[1:], kwargs)) if isinstance(each, kind)]
        if absent and is_read(args):
            raise refuse(name, absent[0])
        return original(*args, **kwargs)

    return call


def _always(args: tuple[Any, ...]) -> bool:
    return True


def _sends(args: tuple[Any, ...]) -> bool:
    """Whether this rank is the one whose values a broadcast sends."""
    group, options = args[0], args[2] if len(args) > 2 else 0
    root: int = getattr(options, "rootRank", options)
    return bool(root == group.rank())
