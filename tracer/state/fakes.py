"""Fake state in a real model: for the time of a trace every parameter and buffer is replaced by a FakeTensor.

Tied parameters (one tensor under several names) share one fake, so the trace sees that they are tied. Lists of parameters that a
module keeps beside its own (`nn.LSTM._flat_weights`) are replaced too, and weak references to them. Tensors that modules hold as plain
attributes stay as they are; their paths are indexed so that the trace can name them. Values that the run itself writes into modules (a
table of cosines kept for the next call, a counter, a rebound buffer) are removed with the rest: no fake is left behind.

`overlaps`, `alike`: parameters, buffers and tensor attributes of a model that share memory.

    self.register_buffer("window", self.table[1:])          # what is written into one is read from the other
    self.register_buffer("shadow", self.weight.data)        # the optimizer writes into both

A recording sees that they are one only if their stand-ins share memory in the same way. Views of one storage that do not overlap, such
as the weights of an LSTM made contiguous, have nothing to do with each other, and count as tensors of their own.
"""

from __future__ import annotations

import copy
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parameter import is_lazy

from smpc.errors import TraceError
from smpc.tracer.ir import StateSpec, TensorSpec
from smpc.tracer.structure import check_module_names, item_path


@dataclass(slots=True)
class FakeState:
    """The fakes of a model. `names[id(tensor)]` is the canonical name of a fake, of its original, or of a tensor attribute."""

    specs: list[StateSpec] = field(default_factory=list)
    fakes: list[torch.Tensor] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)
    by_original: dict[int, torch.Tensor] = field(default_factory=dict)
    real_buffers: dict[str, torch.Tensor] = field(default_factory=dict)  # by path; tensor attributes too
    originals: dict[int, torch.Tensor] = field(default_factory=dict)  # by id of the fake
    hanging: dict[str, None] = field(
        default_factory=dict
    )  # buffers that hang on the graph of an earlier call: `check_histories`
    trained: dict[int, str] = field(
        default_factory=dict
    )  # ids of fakes of attributes: the trained parameter whose memory they share


def make_fakes(model: nn.Module, mode: FakeTensorMode, device: torch.device) -> FakeState:
    """Fakes on `device` for every parameter and buffer of the model, whatever device they are on."""
    check_module_names(model)
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
    overlapping = overlaps(model)
    with mode:
        aliases = {
            id(tensor): fake for group in overlapping for tensor, fake in zip(group, alike(group, device), strict=True)
        }
        for tensor, names, is_parameter in groups.values():
            is_hanging = not is_parameter and tensor.grad_fn is not None
            if is_hanging:
                state.hanging.update(dict.fromkeys(names))
            elif tensor.requires_grad:
                _check_trained(tensor, names[0], is_parameter, overlapping, groups)
            fake = aliases.pop(id(tensor), None)
            if fake is None:
                fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
            fake.requires_grad_(tensor.requires_grad and not is_hanging)
            fake._is_param = is_parameter  # isinstance(fake, nn.Parameter) asks for it
            vars(fake).update({name: value for name, value in vars(tensor).items() if name not in vars(fake)})
            state.fakes.append(fake)
            state.specs.append(StateSpec(tuple(names), TensorSpec.of(fake), is_parameter, names[0] not in transient))
            state.names[id(fake)] = state.names[id(tensor)] = names[0]
            if not is_parameter:
                state.real_buffers[names[0]] = tensor
            state.by_original[id(tensor)] = fake
            state.originals[id(fake)] = tensor
    for group in overlapping:
        _take_attributes(state, group, aliases)
    return state


def _check_trained(
    tensor: torch.Tensor,
    name: str,
    is_parameter: bool,
    overlapping: list[list[torch.Tensor]],
    groups: Mapping[int, tuple[torch.Tensor, list[str], bool]],
) -> None:
    """Raises TraceError for a trained tensor that does not belong to one rank alone."""
    if not (is_parameter and tensor.is_leaf):
        raise untrained(name)
    alike = (group for group in overlapping if any(other is tensor for other in group))
    others = [
        groups[id(other)][1][0] for group in alike for other in group if other is not tensor and id(other) in groups
    ]
    if others:
        raise _not_its_own(name, others[0])


def untrained(name: str) -> TraceError:
    """The error for a used tensor that requires grad but is not a parameter that an optimizer trains."""
    return TraceError(
        f"expected parameters that are leaves of autograd, and buffers that require no grad, found {name!r}, which requires grad and is "
        "neither: its gradient would stay on the rank that uses it; register an nn.Parameter, and compute in forward what is computed from "
        "parameters"
    )


def _take_attributes(state: FakeState, group: list[torch.Tensor], aliases: dict[int, torch.Tensor]) -> None:
    """Has fakes stand for plain attributes that overlap with parameters or buffers, too."""
    trained = [tensor for tensor in group if tensor.requires_grad and id(tensor) not in aliases]
    for tensor in group:
        fake = aliases.get(id(tensor))
        if fake is not None:
            state.by_original[id(tensor)] = fake
            state.originals[id(fake)] = tensor
            state.trained.update({id(fake): state.names[id(other)] for other in trained[:1]})


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
    """A module's attributes, and the contents of its lists, dicts and sets."""

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
    swapped: list[tuple[str, Any]] = []
    for name, value in vars(module).items():
        if name in ("_parameters", "_buffers", "_modules"):
            continue
        path = f"{prefix}.{name}" if prefix else name
        items: Iterator[tuple[Any, Any]]
        if isinstance(value, torch.Tensor):
            path_of_one = path if name and "." not in name else None
            _index_tensor(path_of_one, value, state)
            if id(value) in state.by_original:  # it shares memory with a buffer, or is one
                swapped.append((name, state.by_original[id(value)]))
                _index_fake(path_of_one, swapped[-1][1], state)
            continue
        if isinstance(value, (list, tuple)):
            items = iter(enumerate(value))
        elif isinstance(value, dict):
            items = iter(value.items())
        else:
            continue
        for key, item in list(items):
            if type(item) is weakref.ref and id(item()) in state.by_original and not isinstance(value, tuple):
                value[key] = weakref.ref(state.by_original[id(item())])  # nn.LSTM keeps such, too
            if not isinstance(item, torch.Tensor):
                continue
            if id(item) not in state.names:
                _index_tensor(item_path(path, key), item, state)
            fake = state.by_original.get(id(item))
            if fake is not None:
                _index_fake(item_path(path, key), fake, state)
                if not isinstance(value, tuple):
                    value[key] = fake
        if type(value) is tuple and any(id(item) in state.by_original for item in value):
            swapped.append((name, tuple(state.by_original.get(id(item), item) for item in value)))
    vars(module).update(swapped)


def _index_tensor(path: str | None, tensor: torch.Tensor, state: FakeState) -> None:
    """Notes a tensor that a module holds as a plain attribute, unless it has no path."""
    if path is not None:
        state.names.setdefault(id(tensor), path)
        state.real_buffers.setdefault(path, tensor)


def _index_fake(path: str | None, fake: torch.Tensor, state: FakeState) -> None:
    """Notes the fake of such a tensor."""
    if path is not None:
        state.names.setdefault(id(fake), path)


def _non_persistent_names(model: nn.Module) -> dict[str, None]:
    """Names of buffers that are not part of the state_dict."""
    found: dict[str, None] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name in sorted(module._non_persistent_buffers_set):
            found[f"{prefix}.{name}" if prefix else name] = None
    return found


_MODULE_TABLES = ("_parameters", "_buffers", "_modules")
_ALIGNMENT = 16  # bytes: every dtype may begin there


def overlaps(model: nn.Module) -> list[list[Tensor]]:
    """Groups of tensors of the model that overlap in memory, at least one of them a parameter or buffer."""
    state = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    every = state | {id(tensor): tensor for tensor in _attribute_tensors(model)}
    by_storage: dict[int, list[Tensor]] = {}
    for tensor in every.values():
        if tensor.layout is torch.strided and tensor.numel():
            by_storage.setdefault(tensor.untyped_storage()._cdata, []).append(tensor)
    groups = (group for tensors in by_storage.values() if len(tensors) > 1 for group in _touching(tensors))
    return [group for group in groups if any(id(tensor) in state for tensor in group)]


def alike(group: Sequence[Tensor], device: torch.device | str) -> list[Tensor]:
    """Tensors that overlap like the group's, without their values; they require no grad."""
    with torch.no_grad():
        size = max(_interval(tensor)[1] for tensor in group)
        memory = torch.empty(-(-size // _ALIGNMENT) * _ALIGNMENT, dtype=torch.uint8, device=device)
        return [memory.view(t.dtype).as_strided(t.shape, t.stride(), t.storage_offset()).detach() for t in group]


def on_meta(model: nn.Module) -> dict[int, Tensor]:
    """Stand-ins on the meta device for parameters, buffers and attributes that share memory, by their ids."""
    found: dict[int, Tensor] = {}
    for group in overlaps(model):
        found.update((id(tensor), meta) for tensor, meta in zip(group, alike(group, "meta"), strict=True))
    return found


def check_own_memory(model: nn.Module) -> None:
    """TraceError for a trained parameter whose memory another tensor of the model has, too, before ranks divide the model."""
    names = {id(tensor): name for name, tensor in (*model.named_buffers(), *model.named_parameters())}
    for group in overlaps(model):
        trained = next((each for each in group if id(each) in names and each.requires_grad), None)
        others = [names.get(id(each), "an attribute of a module") for each in group if each is not trained]
        if trained is not None and others:
            raise _not_its_own(names[id(trained)], others[0])


def _not_its_own(name: str, other: str) -> TraceError:
    return TraceError(
        f"expected parameters with memory of their own, found {name!r} and {other!r} in the same: on another rank, one would not "
        "see what the optimizer writes into the other; give one module the other's very parameter (a.weight = b.weight), or compute in "
        "forward what belongs together"
    )


def _touching(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Groups of two and more whose memory, from first byte to last, overlaps."""
    group: list[Tensor] = []
    end = 0
    for tensor in sorted(tensors, key=_interval):
        first, last = _interval(tensor)
        if first >= end:
            if len(group) > 1:
                yield group
            group = []
        group.append(tensor)
        end = max(end, last)
    if len(group) > 1:
        yield group


def _interval(tensor: Tensor) -> tuple[int, int]:
    """First byte of a tensor in its storage, and the one after its last."""
    first = int(tensor.storage_offset())
    last = first + sum((int(size) - 1) * int(step) for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return first * tensor.element_size(), (last + 1) * tensor.element_size()


def _attribute_tensors(model: nn.Module) -> Iterator[Tensor]:
    """Tensors that modules hold as plain attributes, also in lists, tuples and dicts."""
    for module in model.modules():
        for key, value in vars(module).items():
            items = (
                value if isinstance(value, (list, tuple)) else value.values() if isinstance(value, dict) else (value,)
            )
            yield from (item for item in items if isinstance(item, Tensor) and key not in _MODULE_TABLES)
