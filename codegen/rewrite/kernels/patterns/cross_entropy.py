"""`torch.nn.functional.cross_entropy` of a matrix becomes `smpc.kernels.cross_entropy.cross_entropy`.

Where the logits are cast to fp32 for the loss alone, as Hugging Face does, they are read as they are: no fp32 copy is made.
Where every label is ignored the op's mean is 0, where torch's is NaN.

The output layer and its loss become `smpc.kernels.linear_cross_entropy.linear_cross_entropy`, which never holds the logits.

    cross_entropy(linear(hidden, weight, bias).view(-1, classes), labels)

Only where nothing else reads the logits: a model that returns them, as Hugging Face's do, keeps them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from smpc.codegen.rewrite.kernels.pattern_graph import OUTPUT, KernelCall, NodeUsers, Refusal, Replacement, Rewrite
from smpc.tracer.constants import Ref, map_references

_CROSS_ENTROPY = "cross_entropy"
_CROSS_ENTROPY_TARGET = "smpc.kernels.cross_entropy.cross_entropy"
_LOGIT_RESHAPES = ("view", "reshape", "contiguous", "flatten")


@dataclass(frozen=True, slots=True)
class Loss:
    """A call of cross_entropy that ops of this package can compute. `options` are keyword arguments of the op."""

    logits: str
    target: str
    options: tuple[tuple[str, Any], ...]


def find_cross_entropy(graph: NodeUsers) -> Iterator[Replacement | Refusal]:
    """Every cross-entropy of a trace."""
    for name in graph.find("cross_entropy"):
        loss = read_loss(graph, name, _CROSS_ENTROPY)
        if isinstance(loss, Refusal):
            yield loss
            continue
        calls, logits = _without_cast(graph, loss.logits)
        call = KernelCall(
            _CROSS_ENTROPY_TARGET, (Ref(f"#{len(calls) - 1}" if calls else logits), Ref(loss.target)), loss.options
        )
        replaced = graph.between(name, (logits, loss.target))
        dtype = graph.spec(name).torch_dtype
        rounded = (KernelCall("torch.Tensor.to", (Ref(f"#{len(calls)}"), dtype)),) if dtype.itemsize < 4 else ()
        classes = graph.shape(loss.logits)[-1]
        yield Replacement(_CROSS_ENTROPY, replaced, (*calls, call, *rounded), labels=((loss.target, classes),))


CROSS_ENTROPY = Rewrite(_CROSS_ENTROPY, find_cross_entropy)


def read_loss(graph: NodeUsers, name: str, op: str) -> Loss | Refusal:
    """The arguments of a call of cross_entropy, or why the op cannot take them."""
    logits, target = graph.tensor(name, 0, "input"), graph.tensor(name, 1, "target")
    if logits is None or target is None:
        return Refusal(op, name, "its logits or its target are not tensors")
    if graph.tensor(name, 2, "weight") is not None:
        return Refusal(op, name, "it weighs the classes")
    if len(graph.shape(logits)) > 2:
        return Refusal(op, name, "its classes are not in the last dimension")
    if graph.spec(target).dtype not in ("int64", "int32"):
        return Refusal(op, name, f"its target is {graph.spec(target).dtype}: probabilities, not labels")
    if graph.argument(name, 3, "size_average") is not None or graph.argument(name, 5, "reduce") is not None:
        return Refusal(op, name, "it uses size_average or reduce, which torch has given up")
    given = {
        "ignore_index": graph.argument(name, 4, "ignore_index", -100),
        "label_smoothing": graph.argument(name, 7, "label_smoothing", 0.0),
        "reduction": graph.argument(name, 6, "reduction", "mean"),
    }
    defaults = {"ignore_index": -100, "label_smoothing": 0.0, "reduction": "mean"}
    return Loss(logits, target, tuple((key, value) for key, value in given.items() if value != defaults[key]))


def _without_cast(graph: NodeUsers, logits: str) -> tuple[tuple[KernelCall, ...], str]:
    """Calls that give the logits their shape without the cast to fp32 that only the loss reads, and what they start from."""
    chain = graph.chain(logits, lambda name: graph.op(name) in _LOGIT_RESHAPES and graph.sole_user(name) is not None)
    *reshapes, cast = chain
    source = graph.uncast(cast)
    wider = source != cast and graph.spec(source).torch_dtype.itemsize < graph.spec(cast).torch_dtype.itemsize
    if not wider or graph.sole_user(cast) is None:
        return (), logits
    calls: list[KernelCall] = []
    current = source
    for name in reversed(reshapes):
        node = graph.node(name)
        read = {node.inputs[0]: f"#{len(calls) - 1}" if calls else current}
        calls.append(
            KernelCall(node.target, map_references(node.args, functools.partial(_read_loss_input, read)), node.kwargs)
        )
    return tuple(calls), source


def _read_loss_input(instead: dict[str, str], name: str) -> Ref:
    return Ref(instead.get(name, name))


_LINEAR_CROSS_ENTROPY = "linear_cross_entropy"
_LINEAR_CROSS_ENTROPY_TARGET = "smpc.kernels.linear_cross_entropy.linear_cross_entropy"
_LINEAR_RESHAPES = ("view", "reshape", "contiguous", "flatten", "cast")


def find_linear_cross_entropy(graph: NodeUsers) -> Iterator[Replacement | Refusal]:
    """Every cross-entropy of the output of a linear layer."""
    for name in graph.find("cross_entropy"):
        loss = read_loss(graph, name, _LINEAR_CROSS_ENTROPY)
        if isinstance(loss, Refusal):
            yield loss
            continue
        chain = graph.chain(loss.logits, lambda step: graph.op(step) in _LINEAR_RESHAPES)
        linear = chain[-1]
        if graph.op(linear) != "linear" or any(graph.shape(step)[-1] != graph.shape(linear)[-1] for step in chain):
            continue
        shared = [step for step in chain if graph.sole_user(step) is None]
        if shared:
            returned = any(OUTPUT in graph.users(step) for step in shared)
            yield Refusal(
                _LINEAR_CROSS_ENTROPY,
                name,
                "the model returns the logits" if returned else "the logits are used elsewhere too",
            )
            continue
        if dict(loss.options).get("reduction") == "none":
            yield Refusal(_LINEAR_CROSS_ENTROPY, name, "it gives the loss of every token")
            continue
        yield _linear_cross_entropy(graph, name, linear, loss.target, loss.options)


LINEAR_CROSS_ENTROPY = Rewrite(_LINEAR_CROSS_ENTROPY, find_linear_cross_entropy)


def _linear_cross_entropy(
    graph: NodeUsers, name: str, linear: str, target: str, options: tuple[tuple[str, object], ...]
) -> Replacement | Refusal:
    hidden, weight, bias = (graph.tensor(linear, i, word) for i, word in ((0, "input"), (1, "weight"), (2, "bias")))
    if hidden is None or weight is None:
        return Refusal(_LINEAR_CROSS_ENTROPY, name, "the linear layer has a weight that is not a tensor")
    inputs = tuple(item for item in (hidden, weight, target, bias) if item is not None)
    flat = KernelCall("torch.Tensor.reshape", (Ref(hidden), (-1, graph.shape(hidden)[-1])))
    arguments = (Ref("#0"), Ref(weight), Ref(target), None if bias is None else Ref(bias))
    calls: tuple[KernelCall, ...] = (flat, KernelCall(_LINEAR_CROSS_ENTROPY_TARGET, arguments, options))
    dtype = graph.spec(name).torch_dtype
    if dtype.itemsize < 4:
        calls = (*calls, KernelCall("torch.Tensor.to", (Ref("#1"), dtype)))
    classes = graph.shape(linear)[-1]
    return Replacement(_LINEAR_CROSS_ENTROPY, graph.between(name, inputs), calls, labels=((target, classes),))
