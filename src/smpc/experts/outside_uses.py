"""Parameters of divided experts where other code than the experts uses them: a penalty on weights in the model's forward, a shape.

A rank has some of the experts, so such code would see a part of what it sees in one process. That is a UsageError:

    penalty = self.experts.up.square().mean()          of this rank's experts
    loss = len(self.experts.up) * (load * p).sum()     their number

    uses = OutsideUses(); uses.add("layers.0.experts", module)
    with uses.looking(model): model(batch)             every torch call is looked at
    with uses.inside(module): ...                      what the experts do themselves

Looking costs time in every call, so it ends after the first call of a model in each mode.

FSDP puts other tensors in the parameters' places while the experts run, and leaves some there: these are known as theirs when they are
done. What FSDP itself does with parameters, in its hooks around the experts, is no use.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from types import FrameType
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from smpc.codegen.rewrite.expert_parallel import PARTS
from smpc.errors import UsageError

# What is the same of a part as of the whole.
_ALIKE = frozenset(
    {
        "dtype", "device", "layout", "requires_grad", "is_cuda", "is_cpu", "is_meta", "is_xpu", "is_mps", "is_leaf", "is_sparse", "ndim",
        "itemsize", "names", "grad_fn", "_backward_hooks", "dim", "ndimension", "is_floating_point", "is_complex", "element_size",
        "get_device", "__hash__", "is_quantized", "is_nested", "is_inference", "_version",
    }
)  # fmt: skip
_Place: TypeAlias = tuple[nn.Module, str, str]  # a module, the name of a tensor there, and its name in the model
# Code that has parameters in parts, and what may be between it, or a model, and a call.
_WRAPPERS, _BETWEEN = ("torch.distributed", "smpc"), ("torch", "smpc.tracer", "smpc.nn.script_writes")


class OutsideUses:
    """See above. One for all experts of a model."""

    def __init__(self) -> None:
        self._modules: dict[str, nn.Module] = {}
        self._places: dict[str, tuple[_Place, ...]] = {}
        self._look: _Looking | None = None
        self._known: WeakKeyDictionary[nn.Module, set[tuple[bool, bool]]] = WeakKeyDictionary()
        self._depth = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> OutsideUses:
        return self

    def add(self, name: str, module: nn.Module) -> None:
        """Some experts, or one."""
        self._modules[name] = module
        self._places[name] = tuple(_places_of(name, module))

    @contextmanager
    def inside(self, module: nn.Module | None = None) -> Iterator[None]:
        """Around what the experts do themselves. `module`: some of them, in whose places wrappers may leave other tensors."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if module is not None and self._look is not None:
                self._look.learn({name for name, own in self._modules.items() if own is module})

    @contextmanager
    def looking(self, module: nn.Module) -> Iterator[None]:
        """Around a call of a module. UsageError for a use, before it."""
        kind = module.training, torch.is_grad_enabled()
        if kind in self._known.get(module, ()):
            yield
            return
        outer = self._depth, self._look
        self._depth, self._look = 0, _Looking(self, module)
        try:
            with self._look:
                yield
        finally:
            self._depth, self._look = outer
        self._known.setdefault(module, set()).add(kind)

    def named(self, only: Collection[str] = ()) -> Iterator[tuple[Tensor, str]]:
        """The experts' tensors that are there now, with their names; of experts on other ranks those in their places.

        `only`: of the experts of these names.
        """
        for name in only or self._modules:
            yield from _tensors_at(self._places[name])
            yield from _tensors_at(_places_of(name, self._modules[name]))

    @property
    def is_inside(self) -> bool:
        """Whether the experts are at work."""
        return self._depth > 0


class _Looking(TorchFunctionMode):
    def __init__(self, uses: OutsideUses, model: nn.Module) -> None:
        super().__init__()
        self._uses = uses
        self._names: dict[
            int, tuple[str, Tensor]
        ] = {}  # the tensors, too, so that no other has the identity of one that is gone
        for name, module in model.named_modules():  # a copy of the model, which is recorded, has others
            if PARTS in vars(module):
                self._learn_all(_tensors_at(_places_of(name, module)))
        self.learn(())

    def learn(self, only: Collection[str]) -> None:
        """Know what is there now in the places of the parameters; `only`: of the experts of these names."""
        self._learn_all(self._uses.named(only))

    def _learn_all(self, named: Iterable[tuple[Tensor, str]]) -> None:
        self._names |= {id(tensor): (name, tensor) for tensor, name in named}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called by torch for every function."""
        kwargs = kwargs or {}
        if not self._uses.is_inside:
            for tensor in _tensors((*args, *kwargs.values())):
                name, _ = self._names.get(id(tensor), ("", None))
                if name and _name_of(func) not in _ALIKE and not _is_of_wrapper():
                    raise UsageError(
                        f"{name}: expected the experts alone to use their parameters, of which this rank has those of some experts, found "
                        f"{_name_of(func)} of it elsewhere in the model's forward (a penalty on weights, or a number of experts read from "
                        "a shape); compute it in the experts, take weight_decay of the optimizer and numbers that the model keeps, or have "
                        "all experts on every rank (`experts=`, or no expert_parallel_degree)"
                    )
        return func(*args, **kwargs)


def _places_of(prefix: str, module: nn.Module) -> Iterator[_Place]:
    """Where the tensors of experts are: parameters, and what stands for other ranks' parameters."""
    for name, part in module.named_modules():
        absent = [key for key, value in vars(part).items() if isinstance(value, Tensor) and value.is_meta]
        for key in (*part._parameters, *absent):
            yield part, key, ".".join(filter(None, (prefix, name, key)))


def _tensors_at(places: Iterable[_Place]) -> Iterator[tuple[Tensor, str]]:
    """What is in the places now, with its names."""
    for part, key, name in places:
        tensor = part._parameters.get(key, vars(part).get(key))
        if isinstance(tensor, Tensor):
            yield tensor, name


def _is_of_wrapper() -> bool:
    """Whether the call that is looked at is made by code that keeps parameters in parts."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        packages = [*accumulate(str(frame.f_globals.get("__name__", "")).split("."), "{}.{}".format)]
        if set(packages).isdisjoint(_BETWEEN) or "torch.distributed" in packages:
            return not set(packages).isdisjoint(_WRAPPERS)
        frame = frame.f_back
    return False


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
        elif isinstance(value, dict):
            yield from _tensors(value.values())


def _name_of(func: Any) -> str:
    """The name of a function, or of the attribute that it gets."""
    name = str(getattr(func, "__name__", func))
    return str(getattr(func.__self__, "__name__", name)) if name in ("__get__", "__set__") else name
