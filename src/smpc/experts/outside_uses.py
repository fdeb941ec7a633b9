"""Parameters of divided experts where other code than the experts uses them: a penalty on weights in the model's forward, a shape.

A rank has some of the experts, so such code would see a part of what it sees in one process. That is a UsageError:

    penalty = self.experts.up.square().mean()          of this rank's experts
    loss = len(self.experts.up) * (load * p).sum()     their number

    uses = OutsideUses(); uses.add("layers.0.experts", module)
    with uses.looking(model): model(batch)             every torch call is looked at
    with uses.inside(): ...                            what the experts do themselves

Looking costs time in every call, so it ends after the first call of a model in each mode.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from smpc.errors import UsageError

# What is the same of a part as of the whole.
_ALIKE = frozenset(
    {
        "dtype", "device", "layout", "requires_grad", "is_cuda", "is_cpu", "is_meta", "is_xpu", "is_mps", "is_leaf", "is_sparse", "ndim",
        "itemsize", "names", "grad_fn", "_backward_hooks", "dim", "ndimension", "is_floating_point", "is_complex", "element_size",
        "get_device", "__hash__", "is_quantized", "is_nested", "is_inference", "_version",
    }
)  # fmt: skip


class OutsideUses:
    """See above. One for all experts of a model."""

    def __init__(self) -> None:
        self._modules: dict[str, nn.Module] = {}
        self._known: set[tuple[int, bool, bool]] = set()
        self._depth = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> OutsideUses:
        return self

    def add(self, name: str, module: nn.Module) -> None:
        """Some experts, or one."""
        self._modules[name] = module

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Around what the experts do themselves."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    @contextmanager
    def looking(self, module: nn.Module) -> Iterator[None]:
        """Around a call of a module. UsageError for a use, before it."""
        kind = id(module), module.training, torch.is_grad_enabled()
        if kind in self._known:
            yield
            return
        depth, self._depth = self._depth, 0
        try:
            with _Looking(self):
                yield
        finally:
            self._depth = depth
        self._known.add(kind)

    def named(self) -> dict[int, str]:
        """By identity, the names of the experts' tensors that are there now; of experts on other ranks those in their places."""
        found: dict[int, str] = {}
        for prefix, module in self._modules.items():
            for name, part in module.named_modules():
                own = {key: value for key, value in vars(part).items() if isinstance(value, Tensor) and value.is_meta}
                for key, tensor in (own | part._parameters).items():
                    if tensor is not None:
                        found[id(tensor)] = ".".join(filter(None, (prefix, name, key)))
        return found

    @property
    def is_inside(self) -> bool:
        """Whether the experts are at work."""
        return self._depth > 0


class _Looking(TorchFunctionMode):
    def __init__(self, uses: OutsideUses) -> None:
        super().__init__()
        self._uses, self._names = uses, uses.named()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called by torch for every function."""
        kwargs = kwargs or {}
        if not self._uses.is_inside:
            for tensor in _tensors((*args, *kwargs.values())):
                name = self._names.get(id(tensor))
                if name is not None and _name_of(func) not in _ALIKE:
                    raise UsageError(
                        f"{name}: expected the experts alone to use their parameters, of which this rank has those of some experts, found "
                        f"{_name_of(func)} of it elsewhere in the model's forward (a penalty on weights, or a number of experts read from "
                        "a shape); compute it in the experts, take weight_decay of the optimizer and numbers that the model keeps, or have "
                        "all experts on every rank (`experts=`, or no expert_parallel_degree)"
                    )
        return func(*args, **kwargs)


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
        elif isinstance(value, dict):
            yield from _tensors(value.values())


def _name_of(func: Any) -> str:
    """Of a function, or of the attribute that it gets."""
    name = str(getattr(func, "__name__", func))
    return str(getattr(func.__self__, "__name__", name)) if name in ("__get__", "__set__") else name
