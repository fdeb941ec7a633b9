"""What a torch call does to its arguments.

Writes show in autograd's version counters; batch normalisation, which updates its running statistics without telling autograd, has to
be known by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from smpc.tracer import targets
from smpc.tracer.ir import Autocast

# Positions of the running mean and variance, which these write in place when `training` (position, default) says so.
_RUNNING_STATISTICS = {
    "torch.nn.functional.batch_norm": ((1, "running_mean"), (2, "running_var"), (5, "training"), False),
    "torch.nn.functional.instance_norm": (
        (1, "running_mean"),
        (2, "running_var"),
        (5, "use_input_stats"),
        True,
    ),
    "torch.batch_norm": ((3, "running_mean"), (4, "running_var"), (5, "training"), False),
}


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    """The tensors in the arguments or the result of a torch call."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            yield from tensors_in(item)
    elif isinstance(tree, Mapping):
        for item in tree.values():
            yield from tensors_in(item)
    elif isinstance(tree, slice):
        yield from tensors_in((tree.start, tree.stop, tree.step))


def dense(value: Any) -> torch.Tensor | None:
    """The value if it is one tensor with strides: others, such as sparse ones, stay where they are made."""
    return value if isinstance(value, torch.Tensor) and value.layout is torch.strided else None


def autocast_state(kind: str) -> Autocast:
    """The state of autocast for a type of device."""
    dtype = str(torch.get_autocast_dtype(kind)).removeprefix("torch.")
    return Autocast(kind, dtype, torch.is_autocast_enabled(kind))


def version_of(tensor: torch.Tensor) -> int:
    """Autograd's count of writes into a tensor; inference tensors have none."""
    return -1 if tensor.is_inference() else tensor._version


def same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether one is a view of the other, or both of a third."""
    if a.layout is not torch.strided or b.layout is not torch.strided:
        return False
    return bool(a.untyped_storage()._cdata == b.untyped_storage()._cdata)


def running_statistics(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[torch.Tensor]:
    """Running mean and variance that this call writes."""
    if "norm" not in getattr(func, "__name__", ""):
        return []
    entry = _RUNNING_STATISTICS.get(targets.name_of(func))
    if entry is None:
        return []
    *statistics, training, default = entry

    def argument(position: int, name: str, otherwise: Any) -> Any:
        return args[position] if len(args) > position else kwargs.get(name, otherwise)

    if not argument(*training, default):
        return []
    values = [argument(*statistic, None) for statistic in statistics]
    return [value for value in values if value is not None]
