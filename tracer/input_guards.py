"""Python that depends on the values of inputs: answered from the sample inputs, and guarded.

Masks, lengths and positions are computed from the model's inputs and from buffers alone. When the model's Python asks for such a value
(`lengths.max().item()`, `if mask.any():`, `mask.nonzero()`), the nodes recorded so far are evaluated on the real sample inputs, and
the answer becomes a `Guard` of the trace. `broken_guard` evaluates the guards on other inputs.

A question that depends on parameters, on random numbers or on a module called whole has no answer before the model runs.

`Questions` holds the questions of the model's Python while it is recorded, and the guards for their answers. An answer comes
from the sample inputs (see `answer`) or, where there are none, from the guards of an earlier trace.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from glob import escape
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from smpc.tracer import targets
from smpc.tracer.constants import Ref, references, register
from smpc.tracer.effects.differentiation import joined
from smpc.tracer.effects.torch_calls import tensors_in
from smpc.tracer.ir import Guard, Node, NodeKind, Trace
from smpc.tracer.recording.untraceable import current_line
from smpc.tracer.replay import evaluate, read_attribute, resolved
from smpc.tracer.state.fakes import FakeState

_PACK = "torch._pack_padded_sequence"
# The values of their first argument do not matter for the shapes of what they return, only the values of the index or the lengths do.
_SHAPED_BY_THE_REST = (
    targets.GETITEM,
    _PACK,
    "torch._pad_packed_sequence",
    "torch.masked_select",
    "torch.Tensor.masked_select",
)

Read = Callable[[str], Tensor]


class NoAnswerError(Exception):
    """A value cannot be known before the model runs."""


def answer(
    nodes: Sequence[Node],
    target: str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    inputs: Mapping[str, Tensor],
    read: Read,
) -> Any:
    """The result of a call on the real inputs, by placeholder name.

    `read` gives real buffers by FQN, and raises NoAnswerError for parameters. Raises NoAnswerError.
    """
    spare = references(args[:1]) if target in _SHAPED_BY_THE_REST else ()
    wanted = references((args[1:] if spare else args, dict(kwargs)))
    device = next((tensor.device for tensor in inputs.values()), torch.device("cpu"))
    values = _values_of_nodes(nodes, wanted, spare, inputs, read, device)
    real_args = [resolved(arg, values, device) for arg in args]
    real_kwargs = {key: resolved(value, values, device) for key, value in kwargs.items()}
    drawn_on = [device] if device.type == "cuda" else []
    # The question may be about the shape of random numbers: when the model runs, it draws them as if they had not been drawn here.
    with torch.no_grad(), torch.random.fork_rng(drawn_on):
        return targets.function(target)(*real_args, **real_kwargs)


def broken_guard(trace: Trace, model: nn.Module, inputs: Mapping[str, Tensor]) -> tuple[Guard, Any] | None:
    """The first guard that does not hold on these inputs, and its present answer; None if all hold."""

    def read(fqn: str) -> Tensor:
        tensor: Tensor = read_attribute(model, fqn)
        return tensor

    for guard in trace.guards:
        found = answer(trace.nodes, guard.target, guard.args, dict(guard.kwargs), inputs, read)
        if guard.dtypes:
            found = shapes(found)
        if found != guard.expected:
            return guard, found
    return None


def origins(nodes: Sequence[Node], target: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[str] | None:
    """Names of the parameters and buffers on which depends what a call gives; None if it depends on more, random numbers say."""
    spare = references(args[:1]) if target in _SHAPED_BY_THE_REST else ()
    try:
        cone, _ = _computed_from(nodes, references((args[1:] if spare else args, dict(kwargs))), spare)
    except NoAnswerError:
        return None
    return [node.target for node in nodes if node.name in cone and node.kind is NodeKind.GET_ATTR]


def written_state(nodes: Sequence[Node]) -> list[str]:
    """The buffers that a run writes, as patterns: those that nodes write or rebind, and all of modules that are called whole."""
    mutated = {name for node in nodes for name in node.mutates}
    storages = {node.storage for node in nodes if node.name in mutated and node.storage >= 0}
    found: dict[str, None] = {}
    for node in nodes:
        if node.kind is NodeKind.SET_ATTR or (node.kind is NodeKind.GET_ATTR and node.storage in storages):
            found[escape(node.target)] = None
        elif node.kind is NodeKind.CALL_MODULE:
            found[f"{escape(node.target)}.*"] = None
    return list(found)


def state_asked_for(trace: Trace) -> list[str]:
    """Names of the buffers on which the guards rest."""
    found = (origins(trace.nodes, guard.target, guard.args, dict(guard.kwargs)) or () for guard in trace.guards)
    return list(dict.fromkeys(name for names in found for name in names))


def is_fixed(nodes: Sequence[Node], names: Sequence[str], inputs: Container[str] = ()) -> bool:
    """Whether these nodes have the same values in every run: all that they are computed from is sizes, and these inputs, if any."""
    try:
        cone, _ = _computed_from(nodes, names, ())
    except NoAnswerError:
        return False
    given = (NodeKind.PLACEHOLDER, NodeKind.GET_ATTR)
    return not any(node.name in cone and node.kind in given and node.name not in inputs for node in nodes)


def values_of(nodes: Sequence[Node], names: Sequence[str]) -> dict[str, Any]:
    """Values of nodes that depend on sizes alone, and of all that they are computed from. Raises NoAnswerError for others."""

    def read(fqn: str) -> Tensor:
        raise NoAnswerError(f"it depends on {fqn}")

    return _values_of_nodes(nodes, names, (), {}, read, torch.device("cpu"))


def shapes(value: Any) -> tuple[tuple[int, ...], ...]:
    """The shapes of the tensors in a result."""
    return tuple(tuple(tensor.shape) for tensor in tensors_in(value))


def _values_of_nodes(
    nodes: Sequence[Node],
    wanted: Sequence[str],
    spare: Sequence[str],
    inputs: Mapping[str, Tensor],
    read: Read,
    device: torch.device,
) -> dict[str, Any]:
    """Real values of the wanted nodes; of the spare ones only the shapes matter, unless the others need them."""
    cone, shapes_only = _computed_from(nodes, wanted, spare)
    values: dict[str, Any] = {}
    for node in nodes:
        if node.name in shapes_only:
            assert node.spec is not None, f"{node.name} has no shape"
            values[node.name] = torch.zeros(node.spec.shape, dtype=node.spec.torch_dtype, device=device)
        if node.name not in cone:
            continue
        if node.kind is NodeKind.PLACEHOLDER:
            if node.name not in inputs:
                raise NoAnswerError(f"model input {node.target} has no values here, only a shape")
            values[node.name] = inputs[node.name].detach().clone()  # the model may write into it
        elif node.kind is NodeKind.GET_ATTR:
            values[node.name] = read(node.target).detach().to(device, copy=True)
        else:
            with torch.no_grad():
                values[node.name] = evaluate(node, values, device)
    return values


def _computed_from(
    nodes: Sequence[Node], wanted: Sequence[str], spare: Sequence[str]
) -> tuple[frozenset[str], frozenset[str]]:
    """The wanted nodes and everything that they are computed from, writes into their memory included; and spare ones."""
    cone, shapes_only = set(wanted), set(spare)
    storages: set[int] = set()
    unshaped = {node.name for node in nodes if node.spec is None and node.name in shapes_only}
    cone |= unshaped  # of sizes that depend on values
    shapes_only -= unshaped
    found = -1
    while found != len(cone):  # a write may bring in nodes whose memory was written in turn
        found = len(cone)
        for node in reversed(nodes):
            if node.name not in cone and not (node.mutates and _storage_of(nodes, node) & storages):
                continue
            cone.add(node.name)
            if node.random or node.kind in (NodeKind.CALL_MODULE, NodeKind.SET_ATTR):
                raise NoAnswerError(f"{node.name} ({node.target}) is known only when the model runs")
            data = _packed_data(nodes, node, cone)
            cone.update(name for name in node.inputs if name not in data)
            shapes_only.update(data)
            if node.storage >= 0:
                storages.add(node.storage)
    return frozenset(cone), frozenset(shapes_only - cone)


def _packed_data(nodes: Sequence[Node], node: Node, cone: Container[str]) -> tuple[str, ...]:
    """The inputs of a packed sequence, if only the lengths of the packed batches are needed."""
    if node.target != _PACK:
        return ()
    items = (other for other in nodes if other.target == targets.GETITEM and other.args == (Ref(node.name), 0))
    return () if any(item.name in cone for item in items) else references(node.args[:1])


def _storage_of(nodes: Sequence[Node], writer: Node) -> set[int]:
    """Storages that a node writes."""
    return {node.storage for node in nodes if node.name in writer.mutates}


@register
@dataclass(frozen=True, slots=True)
class Answers:
    """The answers of one rank on real inputs, with which others record the same without them.

    given    of each guard: what was expected, and dtypes
    leaves   the modules that were called whole
    sizes    keys of the sizes that were asked for (see `smpc.tracer.operations.value_queries`)
    """

    given: tuple[tuple[Any, tuple[str, ...]], ...]
    leaves: tuple[str, ...] = ()
    sizes: tuple[str, ...] = ()

    @classmethod
    def of(cls, trace: Trace) -> Answers:
        """The answers of a trace."""
        leaves = dict.fromkeys(node.target for node in trace.nodes if node.kind is NodeKind.CALL_MODULE)
        return cls(
            tuple((guard.expected, guard.dtypes) for guard in trace.guards),
            tuple(leaves),
            tuple(guard.size for guard in trace.guards if guard.size),
        )


class Questions:
    """The questions of one recording; `samples` are the real inputs, by placeholder. `buffers`: real ones, by name, if not the model's."""

    def __init__(
        self, state: FakeState, device: torch.device, answers: Answers | None, buffers: Mapping[str, torch.Tensor]
    ) -> None:
        self._device, self._answers = device, answers
        self._buffers = {**state.real_buffers, **buffers}
        self.samples: dict[str, torch.Tensor] = {}
        self.guards: list[Guard] = []

    def ask(
        self,
        nodes: Sequence[Node],
        target: str,
        args: tuple[Any, ...],
        kwargs: tuple[tuple[str, Any], ...],
        used: Sequence[torch.Tensor],
        size: str = "",
    ) -> Any:
        """The result of a call: a number or fakes, made of the `used` that require grad. `size`: its key. Raises NoAnswerError."""
        fixed = is_fixed(nodes, references((args, dict(kwargs))))
        if self._answers is not None and not fixed:
            if len(self.guards) == len(self._answers.given):
                raise NoAnswerError("it was not asked when the answers were given")
            expected, dtypes = self._answers.given[len(self.guards)]
        else:
            with unset_fake_temporarily():
                found = answer(nodes, target, args, dict(kwargs), self.samples, self._read_buffer)
            tensors = list(tensors_in(found))
            expected = shapes(found) if tensors else found
            dtypes = tuple(str(tensor.dtype).removeprefix("torch.") for tensor in tensors)
        if not fixed:
            self.guards.append(Guard(target, args, kwargs, expected, dtypes, current_line(), size))
        if not dtypes:
            return expected
        fakes = [
            torch.empty(shape, dtype=getattr(torch, dtype), device=self._device)
            for shape, dtype in zip(expected, dtypes, strict=True)
        ]
        fakes = [joined(fake, used) if used and fake.is_floating_point() else fake for fake in fakes]
        return fakes[0] if len(fakes) == 1 else tuple(fakes)

    def _read_buffer(self, fqn: str) -> torch.Tensor:
        """The real buffer or tensor attribute of that name."""
        tensor = self._buffers.get(fqn)
        if tensor is None:
            raise NoAnswerError(f"it depends on parameter {fqn}")
        if tensor.device.type == "meta":
            raise NoAnswerError(f"buffer {fqn} has no values here, only a shape")
        return tensor
