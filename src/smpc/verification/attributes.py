"""Plain attributes of modules: what two copies of one model hold after a run, and where they differ.

Left out is what cannot matter to another call: caches of which the recording has proven that it holds for both values, and tensors of the
call's own graph, which every forward computes anew (the weight of torch's `spectral_norm`).
"""

from __future__ import annotations

import enum
import random
from collections import deque
from collections.abc import Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from smpc.rank_models import plain_attributes
from smpc.tracer.environment.environment_guards import Environment, shown
from smpc.verification.bounds import difference
from smpc.verification.random_state import state_text

Place = tuple[str, str]  # FQN of a module, name of an attribute
_MISSING = object()
_CODE = (FunctionType, BuiltinFunctionType, MethodType, ModuleType, type)


def attribute_differences(
    expected: nn.Module, found: nn.Module, settled: frozenset[Place]
) -> Iterator[tuple[str, str, str]]:
    """(FQN, attribute, how it differs) for every attribute that is not the same in two copies of a model, but for `settled` ones."""
    seen: dict[tuple[int, int], tuple[Any, Any]] = {}
    others = dict(found.named_modules())
    for fqn, module in expected.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue  # its attributes are C++
        ours, theirs = plain_attributes(module), plain_attributes(others[fqn])
        for name in dict.fromkeys((*ours, *theirs)):
            a, b = ours.get(name, _MISSING), theirs.get(name, _MISSING)
            if (fqn, name) not in settled and not _is_of_graph(a) and not _is_same(a, b, seen):
                yield fqn, name, f"expected {_attribute_text(a)}, found {_attribute_text(b)}"


def settled_places(model: nn.Module, environment: Environment | None) -> frozenset[Place]:
    """Attributes of which the recording has proven that it holds for their values before and after a call: caches of masks, say."""
    guards = () if environment is None else environment.guards
    places = [guard.place for guard in guards if len(guard.expected) > 1]
    keys = {(id(place.holder), place.key) for place in places}
    holders = {id(place.holder) for place in places}  # of them, lists and dicts that an attribute holds
    return frozenset(
        (fqn, name)
        for fqn, module in model.named_modules()
        if places and not isinstance(module, torch.jit.ScriptModule)
        for name, value in vars(module).items()
        if (id(vars(module)), name) in keys or {id(value), id(getattr(value, "__dict__", None))} & holders
    )


def _is_of_graph(value: Any) -> bool:
    """Whether a value is a tensor that autograd has computed."""
    return isinstance(value, Tensor) and value.grad_fn is not None


def _is_same(a: Any, b: Any, seen: dict[tuple[int, int], tuple[Any, Any]]) -> bool:
    """Whether two values are alike, as deep as they go. Code, and modules, which are compared by themselves, are."""
    if a is b or (id(a), id(b)) in seen:
        return True
    if type(a) is not type(b):
        return False
    seen[id(a), id(b)] = a, b
    if isinstance(a, Tensor):
        return not difference(a, b)
    if isinstance(a, (nn.Module, *_CODE)):
        return True
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and bool(a.tobytes() == b.tobytes())
    if isinstance(a, (torch.Generator, random.Random, np.random.Generator)):
        return _generator_state(a) == _generator_state(b)
    if isinstance(a, Mapping):
        return list(a) == list(b) and all(_is_same(a[key], b[key], seen) for key in a)
    if isinstance(a, (list, tuple, deque)):
        return len(a) == len(b) and all(_is_same(x, y, seen) for x, y in zip(a, b, strict=True))
    if isinstance(a, enum.Enum):
        return False
    if "__eq__" not in {name for cls in type(a).__mro__[:-1] for name in vars(cls)}:
        return _is_same(getattr(a, "__dict__", None), getattr(b, "__dict__", None), seen)
    return _is_equal(a, b)


def _is_equal(a: Any, b: Any) -> bool:
    """Whether the values are equal by their own comparison; NaN equals NaN."""
    try:
        return bool(a == b) or bool(a != a and b != b)
    except Exception:  # whatever a class's own comparison raises
        return True


def _generator_state(generator: Any) -> str:
    """The state of a random generator, as text."""
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes().hex()
    if isinstance(generator, random.Random):
        return repr(generator.getstate())
    return state_text(generator.bit_generator.state)


def _attribute_text(value: Any) -> str:
    """An attribute as messages show it, shortened."""
    if value is _MISSING:
        return "nothing"
    text = f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else shown(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
