"""Python that depends on the values of inputs: answered from the sample inputs, and guarded.

Masks, lengths and positions are computed from the model's inputs and from buffers alone. When the model's Python asks for such a value
(`lengths.max().item()`, `if mask.any():`, `mask.nonzero()`), the nodes recorded so far are evaluated on the real sample inputs, and
the answer becomes a `Guard` of the trace. `broken_guard` evaluates the guards on other inputs.

What depends on parameters, on random numbers or on a module called whole has no answer before the model runs.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from smpc.tracer import targets
from smpc.tracer.effects import tensors_in
from smpc.tracer.ir import Guard, Node, NodeKind, Trace
from smpc.tracer.literals import Ref, references
from smpc.tracer.replay import evaluate, read_attribute, resolved

_PACK = "torch._pack_padded_sequence"
# The values of their first argument do not matter for the shapes of what they return, only those of the index or the lengths.
_SHAPED_BY_THE_REST = (targets.GETITEM, _PACK, "torch._pad_packed_sequence")

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
    """What a call gives on the real inputs, by placeholder name.

    `read` gives real buffers by FQN, and raises NoAnswerError for parameters. Raises NoAnswerError.
    """
    spare = references(args[:1]) if target in _SHAPED_BY_THE_REST else ()
    wanted = references((args[1:] if spare else args, dict(kwargs)))
    device = next((tensor.device for tensor in inputs.values()), torch.device("cpu"))
    values = _values(nodes, wanted, spare, inputs, read, device)
    real_args = [resolved(arg, values, device) for arg in args]
    real_kwargs = {key: resolved(value, values, device) for key, value in kwargs.items()}
    drawn_on = [device] if device.type == "cuda" else []
    # What is asked may be the shape of random numbers: when the model runs, it draws them as if nobody had.
    with torch.no_grad(), torch.random.fork_rng(drawn_on):
        return targets.function(target)(*real_args, **real_kwargs)


def broken_guard(trace: Trace, model: nn.Module, inputs: Mapping[str, Tensor]) -> tuple[Guard, Any] | None:
    """The first guard that does not hold on these inputs, and what it gives instead; None if all hold."""

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


def is_fixed(nodes: Sequence[Node], names: Sequence[str], inputs: Container[str] = ()) -> bool:
    """Whether these nodes have the same values in every run: all that they are computed from is sizes, and these inputs, if any."""
    try:
        cone, _ = _cone(nodes, names, ())
    except NoAnswerError:
        return False
    given = (NodeKind.PLACEHOLDER, NodeKind.GET_ATTR)
    return not any(node.name in cone and node.kind in given and node.name not in inputs for node in nodes)


def shapes(value: Any) -> tuple[tuple[int, ...], ...]:
    """The shapes of the tensors in a result."""
    return tuple(tuple(tensor.shape) for tensor in tensors_in(value))


def _values(
    nodes: Sequence[Node],
    wanted: Sequence[str],
    spare: Sequence[str],
    inputs: Mapping[str, Tensor],
    read: Read,
    device: torch.device,
) -> dict[str, Any]:
    """Real values of the wanted nodes; of the spare ones only the shapes matter, unless the others need them."""
    cone, shapes_only = _cone(nodes, wanted, spare)
    values: dict[str, Any] = {}
    for node in nodes:
        if node.name in shapes_only:
            assert node.spec is not None, f"{node.name} is indexed, but is no tensor"
            values[node.name] = torch.zeros(node.spec.shape, dtype=node.spec.torch_dtype, device=device)
        if node.name not in cone:
            continue
        if node.kind is NodeKind.PLACEHOLDER:
            if node.name not in inputs:
                raise NoAnswerError(f"model input {node.target} has no values here, only a shape")
            values[node.name] = inputs[node.name].detach().clone()  # the model may write into it
        elif node.kind is NodeKind.GET_ATTR:
            values[node.name] = read(node.target).detach().clone()
        else:
            with torch.no_grad():
                values[node.name] = evaluate(node, values, device)
    return values


def _cone(nodes: Sequence[Node], wanted: Sequence[str], spare: Sequence[str]) -> tuple[frozenset[str], frozenset[str]]:
    """The wanted nodes and all that they are computed from, writes into their memory included; and what is spare beside them."""
    cone, shapes_only = set(wanted), set(spare)
    storages: set[int] = set()
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
    """What a sequence is packed from, where only the lengths of the packed batches are wanted."""
    if node.target != _PACK:
        return ()
    items = (other for other in nodes if other.target == targets.GETITEM and other.args == (Ref(node.name), 0))
    return () if any(item.name in cone for item in items) else references(node.args[:1])


def _storage_of(nodes: Sequence[Node], writer: Node) -> set[int]:
    """Storages that a node writes."""
    return {node.storage for node in nodes if node.name in writer.mutates}
