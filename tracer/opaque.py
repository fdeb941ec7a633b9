"""Modules that are called whole: what they return and what they cost, when their forward cannot be recorded.

A module whose Python depends on the values of tensors (expert routing), that has no shape rule for a fake run, or that uses custom
autograd functions becomes an opaque leaf: one node, nothing recorded inside. The shapes of its outputs come from, in this order,

    1. a rule that the user registered for its class (`register_shape_rule`);
    2. a run over fake tensors, where only its backward could not be recorded;
    3. a real run on the CPU, on a copy whose parameters are zero: memory that is never written costs nothing.

A real run on large inputs is replaced by three on small ones: the size that most inputs share as their first is set to 6, 10 and 14, and
the sizes of the outputs, which must be linear in it, are extended to the true one. What autograd saves is extended alike.

Example: experts that map [tokens, hidden] to [tokens, hidden], with tokens = 65536, are run on 6, 10 and 14 tokens.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.autograd.graph import saved_tensors_hooks

from smpc.errors import TraceError
from smpc.tracer.fakes import FakeState
from smpc.tracer.ir import TensorSpec
from smpc.tracer.measure import Meter
from smpc.tracer.structure import flatten

M = TypeVar("M", bound=type[nn.Module])

_RULE = "_smpc_shape_rule"
_SMALL_SIZES = (6, 10, 14)
_LARGE = 1 << 20  # elements of all inputs together above which a real run is made on small ones


def register_shape_rule(module_class: M, rule: Callable[..., Any]) -> M:
    """Registers how to get the outputs of a module class from its inputs, without running its forward; returns the class.

    `rule(module, *args, **kwargs)` gets fake tensors and returns what forward would return, made by ordinary torch functions:
    `register_shape_rule(Experts, lambda module, tokens, index: torch.empty_like(tokens))`. Modules of the class (and of subclasses) are
    called whole.
    """
    setattr(module_class, _RULE, staticmethod(rule))
    return module_class


def shape_rule(module: nn.Module) -> Callable[..., Any] | None:
    """The rule registered for a module's class or the nearest base class."""
    for cls in type(module).__mro__:
        if _RULE in vars(cls):
            return getattr(cls, _RULE)  # type: ignore[no-any-return]
    return None


@dataclass(slots=True)
class Probe:
    """What a real run told: the output with TensorSpecs (or the position of an input) in place of tensors, and costs."""

    output: Any
    saved: list[tuple[int, int]]  # (position of the input whose memory it is, or -1; bytes)
    written: list[int]  # positions, among inputs and then state, of the tensors written in place
    flops: int
    random: bool


@dataclass(frozen=True, slots=True)
class Same:
    """An output that is the very tensor of an input."""

    position: int


def probe(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], state: FakeState, meter: Meter) -> Probe:
    """Runs the module for real and says what it did. Raises whatever the module raises."""
    leaves, _ = flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    firsts = Counter(tensor.shape[0] for tensor in tensors if tensor.dim())
    if sum(tensor.numel() for tensor in tensors) <= _LARGE or not firsts:
        return _run(module, args, kwargs, state, meter, {})
    size = firsts.most_common(1)[0][0]
    runs = [_run(module, args, kwargs, state, meter, {size: small}) for small in _SMALL_SIZES]
    return _extend(runs, size, type(module).__name__)


def _run(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    state: FakeState,
    meter: Meter,
    first_sizes: dict[int, int],
) -> Probe:
    """One real run, with the first sizes of the inputs replaced as `first_sizes` says."""
    leaves, structure = flatten((args, kwargs))
    saved: list[tuple[int, int]] = []
    seen: set[int] = set()
    with torch._C.DisableTorchFunction(), unset_fake_temporarily(), torch.random.fork_rng():
        inputs = [_real(leaf, first_sizes) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        memo = {id(fake): _zeros(state.originals[id(fake)]) for fake in (*module.parameters(), *module.buffers())}
        real_state = list(memo.values())
        copied = copy.deepcopy(module, dict(memo))
        owned = {t.untyped_storage()._cdata for t in real_state}
        positions = {t.untyped_storage()._cdata: i for i, t in enumerate(inputs) if isinstance(t, torch.Tensor)}
        watched = [(t, t._version) for t in (*(t for t in inputs if isinstance(t, torch.Tensor)), *real_state)]

        def note(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in owned and storage._cdata not in seen:
                seen.add(storage._cdata)
                saved.append((positions.get(storage._cdata, -1), storage.nbytes()))
            return tensor

        real_args, real_kwargs = structure.unflatten(inputs)
        meter.reset()
        with saved_tensors_hooks(note, lambda tensor: tensor):
            output = copied(*real_args, **real_kwargs)
        written = [i for i, (tensor, version) in enumerate(watched) if tensor._version != version]
        found, shape = flatten(output)
        same = {id(t): i for i, t in enumerate(inputs) if isinstance(t, torch.Tensor)}
        described = [
            leaf
            if not isinstance(leaf, torch.Tensor)
            else Same(same[id(leaf)])
            if id(leaf) in same
            else TensorSpec.of(leaf)
            for leaf in found
        ]
    return Probe(shape.unflatten(described), saved, written, meter.flops, meter.random)


def _real(fake: torch.Tensor, first_sizes: dict[int, int]) -> torch.Tensor:
    """A real tensor in place of a fake one: integers are zero (a valid index), the rest small and not constant."""
    shape = list(fake.shape)
    if shape:
        shape[0] = first_sizes.get(shape[0], shape[0])
    if not fake.dtype.is_floating_point:
        return torch.zeros(shape, dtype=fake.dtype)
    values = torch.linspace(-0.1, 0.1, max(1, math.prod(shape)))[: math.prod(shape)].reshape(shape).to(fake.dtype)
    return values.requires_grad_(fake.requires_grad).clone() if fake.requires_grad else values


def _zeros(tensor: torch.Tensor) -> torch.Tensor:
    """Zeros like a parameter, or a buffer's own values where it has any."""
    if not tensor.requires_grad and tensor.device.type == "cpu":
        return tensor.detach().clone()
    zeros = torch.zeros(tensor.shape, dtype=tensor.dtype)
    return nn.Parameter(zeros, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else zeros


def _extend(runs: list[Probe], size: int, class_name: str) -> Probe:
    """The probe at the true size, from probes at the small sizes."""
    outputs = [flatten(run.output) for run in runs]
    leaves = []
    for triple in zip(*(found for found, _ in outputs), strict=True):
        if not isinstance(triple[0], TensorSpec):
            leaves.append(triple[0])
            continue
        shape = tuple(
            _line([spec.shape[dim] for spec in triple], size, class_name) for dim in range(len(triple[0].shape))
        )
        stride = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
        leaves.append(TensorSpec(shape, triple[0].dtype, tuple(stride), triple[0].requires_grad))
    first = runs[0]
    saved = [
        (position, _line([run.saved[i][1] for run in runs], size, class_name))
        for i, (position, _) in enumerate(first.saved)
    ]
    flops = _line([run.flops for run in runs], size, class_name)
    return Probe(outputs[0][1].unflatten(leaves), saved, first.written, flops, first.random)


def _line(values: list[int], size: int, class_name: str) -> int:
    """The value at `size` of the line through the values at the small sizes."""
    (x0, x1, x2), (y0, y1, y2) = _SMALL_SIZES, values
    if (y1 - y0) * (x2 - x1) != (y2 - y1) * (x1 - x0):
        raise TraceError(
            f"the outputs of {class_name} do not grow in proportion to its inputs (sizes {values} for {_SMALL_SIZES}): "
            "give their shapes with smpc.register_shape_rule"
        )
    slope, rest = divmod(y1 - y0, x1 - x0)
    return y0 + slope * (size - x0) + rest * (size - x0) // (x1 - x0)
