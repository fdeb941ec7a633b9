"""The output layer and its loss become `smpc.kernels.linear_cross_entropy.linear_cross_entropy`, which never holds the logits.

    cross_entropy(linear(hidden, weight, bias).view(-1, classes), labels)

Only where nothing else reads the logits: a model that returns them, as Hugging Face's do, keeps them.
"""

from __future__ import annotations

from collections.abc import Iterator

from smpc.codegen.rewrite.kernels.cross_entropy import read_loss
from smpc.codegen.rewrite.kernels.graph import OUTPUT, Graph
from smpc.codegen.rewrite.kernels.replacement import Call, Refusal, Replacement, Rewrite
from smpc.tracer.literals import Ref

_OP = "linear_cross_entropy"
_TARGET = "smpc.kernels.linear_cross_entropy.linear_cross_entropy"
_RESHAPES = ("view", "reshape", "contiguous", "flatten", "cast")


def find(graph: Graph) -> Iterator[Replacement | Refusal]:
    """Every cross-entropy of the output of a linear layer."""
    for name in graph.find("cross_entropy"):
        loss = read_loss(graph, name, _OP)
        if isinstance(loss, Refusal):
            yield loss
            continue
        chain = graph.chain(loss.logits, lambda step: graph.op(step) in _RESHAPES)
        linear = chain[-1]
        if graph.op(linear) != "linear" or any(graph.shape(step)[-1] != graph.shape(linear)[-1] for step in chain):
            continue
        shared = [step for step in chain if graph.sole_user(step) is None]
        if shared:
            returned = any(OUTPUT in graph.users(step) for step in shared)
            yield Refusal(
                _OP, name, "the model returns the logits" if returned else "the logits are used elsewhere too"
            )
            continue
        if dict(loss.options).get("reduction") == "none":
            yield Refusal(_OP, name, "it gives the loss of every token")
            continue
        yield _replacement(graph, name, linear, loss.target, loss.options)


REWRITE = Rewrite(_OP, find)


def _replacement(
    graph: Graph, name: str, linear: str, target: str, options: tuple[tuple[str, object], ...]
) -> Replacement | Refusal:
    hidden, weight, bias = (graph.tensor(linear, i, word) for i, word in ((0, "input"), (1, "weight"), (2, "bias")))
    if hidden is None or weight is None:
        return Refusal(_OP, name, "the linear layer has a weight that is no tensor")
    inputs = tuple(item for item in (hidden, weight, target, bias) if item is not None)
    flat = Call("torch.Tensor.reshape", (Ref(hidden), (-1, graph.shape(hidden)[-1])))
    arguments = (Ref("#0"), Ref(weight), Ref(target), None if bias is None else Ref(bias))
    calls: tuple[Call, ...] = (flat, Call(_TARGET, arguments, options))
    dtype = graph.spec(name).torch_dtype
    if dtype.itemsize < 4:
        calls = (*calls, Call("torch.Tensor.to", (Ref("#1"), dtype)))
    classes = graph.shape(linear)[-1]
    return Replacement(_OP, graph.between(name, inputs), calls, labels=((target, classes),))
