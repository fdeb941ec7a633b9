"""Real runs of modules that are called whole, made once for modules that are alike.

A mixture of experts has such a module in every layer. Two modules are alike here if all that their real runs depend on is equal: their
classes, parts, parameters' shapes and dtypes, attributes, and the arguments but for values. Attributes that are no plain values must be
the very same objects. Modules with buffers, whose values the runs use, or with hooks are alike to none.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import nn

from smpc.tracer.ir import TensorSpec
from smpc.tracer.operations.measure import Meter
from smpc.tracer.operations.opaque import Probe, probe
from smpc.tracer.state.fakes import FakeState
from smpc.tracer.structure import flatten

_PLAIN = (type(None), bool, int, float, complex, str, torch.dtype)
_PARTS = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")  # what is looked at by itself


class Probes:
    """The probes of one recording."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Probe] = {}

    def of(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], state: FakeState, meter: Meter
    ) -> Probe:
        """What a real run of the module told, or of one that is alike. Raises whatever the module raises."""
        form = _form(module, args, kwargs)
        found = None if form is None else self._known.get(form)
        if found is None:
            found = probe(module, args, kwargs, state, meter)
            if form is not None:
                self._known[form] = found
        return found


def _form(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
    """All that real runs depend on; None: it is not known."""
    if next(module.buffers(), None) is not None:
        return None
    leaves, structure = flatten((args, kwargs))
    first = {id(leaf): place for place, leaf in reversed(list(enumerate(leaves)))}
    given = tuple((first[id(leaf)], _value(leaf)) for leaf in leaves)
    parts = []
    for name, part in module.named_modules(remove_duplicate=False):
        attributes = tuple(_attributes(part))
        if any(value is None for _, value in attributes):
            return None
        parameters = tuple((key, _value(value)) for key, value in part._parameters.items())
        parts.append((name, type(part), attributes, parameters))
    return structure, given, tuple(parts), tuple(_numbers(module))


def _numbers(module: nn.Module) -> Iterator[int]:
    """Which names are of one parameter: by name, the number of the parameter."""
    seen: dict[int, int] = {}
    for _, parameter in module.named_parameters(remove_duplicate=False):
        yield seen.setdefault(id(parameter), len(seen))


def _attributes(module: nn.Module) -> Iterator[tuple[str, Hashable]]:
    """What a module has beside its parts; None in place of the value if it has hooks."""
    for name, value in vars(module).items():
        is_hooks = "_hooks" in name
        if name not in _PARTS and (value or not is_hooks):
            yield name, None if is_hooks else _value(value)


def _value(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        return TensorSpec.of(value), str(value.device)
    return (type(value), value) if isinstance(value, _PLAIN) else (type(value), id(value))
