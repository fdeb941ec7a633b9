"""Fake state in a real model: for the time of a trace every parameter and buffer is replaced by a FakeTensor.

Tied parameters (one tensor under several names) share one fake, so the trace sees that they are tied. Lists of parameters that a
module keeps beside its own (`nn.LSTM._flat_weights`) are replaced too. Tensors that modules hold as plain attributes stay as they
are; their paths are indexed so that the trace can name them. What the run itself writes into modules (a table of cosines kept for
the next call, a counter, a rebound buffer) is undone with the rest: no fake is left behind.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parameter import is_lazy

from smpc.errors import TraceError
from smpc.tracer.ir import StateSpec, TensorSpec


@dataclass(slots=True)
class FakeState:
    """The fakes of a model. `names[id(tensor)]` is the canonical name of a fake, of its original, or of a tensor attribute."""

    specs: list[StateSpec] = field(default_factory=list)
    fakes: list[torch.Tensor] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)
    by_original: dict[int, torch.Tensor] = field(default_factory=dict)
    real_buffers: dict[str, torch.Tensor] = field(default_factory=dict)  # by path; tensor attributes too
    originals: dict[int, torch.Tensor] = field(default_factory=dict)  # by id of the fake


def make_fakes(model: nn.Module, mode: FakeTensorMode, device: torch.device) -> FakeState:
    """Fakes on `device` for every parameter and buffer of the model, whatever device they are on."""
    state = FakeState()
    groups: dict[int, tuple[torch.Tensor, list[str], bool]] = {}
    for is_parameter, pairs in (
        (True, model.named_parameters(remove_duplicate=False)),
        (False, model.named_buffers(remove_duplicate=False)),
    ):
        for name, tensor in pairs:
            if is_lazy(tensor):
                raise TraceError(
                    f"expected parameters with shapes, found {name} without one (a lazy module): run the model once before tracing it"
                )
            groups.setdefault(id(tensor), (tensor, [], is_parameter))[1].append(name)
    transient = _non_persistent_names(model)
    with mode:
        for tensor, names, is_parameter in groups.values():
            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
            fake.requires_grad_(tensor.requires_grad)
            fake._is_param = is_parameter  # isinstance(fake, nn.Parameter) asks for it
            state.fakes.append(fake)
            state.specs.append(StateSpec(tuple(names), TensorSpec.of(fake), is_parameter, names[0] not in transient))
            state.names[id(fake)] = state.names[id(tensor)] = names[0]
            if not is_parameter:
                state.real_buffers[names[0]] = tensor
            state.by_original[id(tensor)] = fake
            state.originals[id(fake)] = tensor
    return state


@contextmanager
def installed(model: nn.Module, state: FakeState) -> Iterator[None]:
    """Puts the fakes in the model's place and takes them out again, whatever happens in between."""
    before = [_Snapshot(module) for module in model.modules()]
    for prefix, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue  # its tables are C++, its calls are never recorded: it runs over its own tensors
        for table in (module._parameters, module._buffers):
            for key, tensor in table.items():
                if tensor is not None:
                    table[key] = state.by_original[id(tensor)]
        _swap_attributes(prefix, module, state)
    try:
        yield
    finally:
        for snapshot in before:
            snapshot.restore()


class _Snapshot:
    """A module's attributes, and what its lists, dicts and sets hold."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.attributes = dict(vars(module))
        self.contents = [
            (value, copy.copy(value))
            for value in self.attributes.values()
            if type(value) in (list, dict, set, OrderedDict)
        ]

    def restore(self) -> None:
        """Puts everything back as it was."""
        for value, content in self.contents:
            value.clear()
            if isinstance(value, list):
                value.extend(content)
            else:
                value.update(content)
        attributes = vars(self.module)
        attributes.clear()
        attributes.update(self.attributes)


def _swap_attributes(prefix: str, module: nn.Module, state: FakeState) -> None:
    """Swaps parameters in a module's own lists; indexes tensors that it holds as plain attributes."""
    for name, value in vars(module).items():
        if name in ("_parameters", "_buffers", "_modules"):
            continue
        path = f"{prefix}.{name}" if prefix else name
        items: Iterator[tuple[Any, Any]]
        if isinstance(value, torch.Tensor):
            state.names.setdefault(id(value), path)
            state.real_buffers.setdefault(path, value)
            continue
        if isinstance(value, (list, tuple)):
            items = iter(enumerate(value))
        elif isinstance(value, dict):
            items = iter(value.items())
        else:
            continue
        for key, item in list(items):
            if not isinstance(item, torch.Tensor):
                continue
            if id(item) in state.by_original and not isinstance(value, tuple):
                value[key] = state.by_original[id(item)]
            else:
                state.names.setdefault(id(item), f"{path}[{key!r}]")
                state.real_buffers.setdefault(f"{path}[{key!r}]", item)


def _non_persistent_names(model: nn.Module) -> dict[str, None]:
    """Names of buffers that are not part of the state_dict."""
    found: dict[str, None] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name in sorted(module._non_persistent_buffers_set):
            found[f"{prefix}.{name}" if prefix else name] = None
    return found
