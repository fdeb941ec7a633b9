"""LayerNorm, written out or by torch's name, becomes `smpc.kernels.layer_norm.layer_norm`.

    (x - mean(x)) * rsqrt(mean((x - mean(x)) ** 2) + eps) * weight + bias

`torch.nn.functional.layer_norm` is what models call; Cohere and others write it out, mostly without a bias.
"""

from __future__ import annotations

from collections.abc import Iterator

from smpc.codegen.rewrite.kernels.graph import Graph
from smpc.codegen.rewrite.kernels.replacement import Call, Refusal, Replacement, Rewrite
from smpc.tracer.ir import NodeKind
from smpc.tracer.literals import Ref

_OP = "layer_norm"
_TARGET = "smpc.kernels.layer_norm.layer_norm"
_EPS = 1e-5  # torch's default


def find(graph: Graph) -> Iterator[Replacement | Refusal]:
    """Every LayerNorm of a trace."""
    for name in graph.find("layer_norm"):
        found = _by_name(graph, name)
        if found is not None:
            yield found
    for name in graph.find("rsqrt"):
        found = _written_out(graph, name)
        if found is not None:
            yield found


REWRITE = Rewrite(_OP, find)


def _by_name(graph: Graph, name: str) -> Replacement | Refusal | None:
    """A call of torch.nn.functional.layer_norm; torch.layer_norm has the same arguments in front."""
    x, weight, bias = (graph.tensor(name, i, word) for i, word in ((0, "input"), (2, "weight"), (3, "bias")))
    if x is None:
        return None
    if bias is not None and weight is None:
        return Refusal(_OP, name, "it has a bias and no weight")
    shape, eps = tuple(graph.argument(name, 1, "normalized_shape")), graph.argument(name, 4, "eps", _EPS)
    return _replacement(graph, name, x, shape, weight, bias, eps)


def _replacement(
    graph: Graph, result: str, x: str, shape: tuple[int, ...], weight: str | None, bias: str | None, eps: float
) -> Replacement:
    optional = tuple(None if name is None else Ref(name) for name in (weight, bias))
    call = Call(_TARGET, (Ref(x), shape, *optional), (("eps", eps),))
    inputs = tuple(name for name in (x, weight, bias) if name is not None)
    return Replacement(_OP, graph.between(result, inputs), (call,))


def _written_out(graph: Graph, root: str) -> Replacement | None:
    """Reads backwards from the root to the input, then forwards to the result."""
    inner = graph.tensor(root, 0, "input")
    summands = graph.scalar_and_tensor(inner) if inner is not None and graph.op(inner) == "add" else None
    if summands is None or graph.op(summands[1]) != "mean":
        return None
    squares = graph.tensor(summands[1], 0, "input")
    centered = None if squares is None else graph.power(squares, 2)
    source = None if centered is None else _centered(graph, centered)
    result = graph.sole_user(root)
    factor = None if result is None or graph.op(result) != "mul" else graph.other(result, root)
    if source is None or result is None or factor is None or _centered(graph, factor) != source:
        return None
    x = graph.uncast(source)
    columns = graph.shape(x)[-1:]
    weight = bias = None
    for operation in ("mul", "add"):
        following = graph.reader(result)
        factor = (
            None if following is None or graph.op(following) != operation else _parameter(graph, following, columns)
        )
        if following is None or factor is None:
            break
        result = following
        weight, bias = (factor, None) if operation == "mul" else (weight, factor)
    result = graph.cast_back(result, graph.spec(x).dtype)
    return _replacement(graph, result, x, columns, weight, bias, summands[0])


def _centered(graph: Graph, name: str) -> str | None:
    """x, if the node is x - mean(x)."""
    pair = graph.tensors(name) if graph.op(name) == "sub" else None
    if pair is None or graph.op(pair[1]) != "mean" or graph.tensor(pair[1], 0, "input") != pair[0]:
        return None
    return pair[0]


def _parameter(graph: Graph, name: str, columns: tuple[int, ...]) -> str | None:
    """The operand that is a parameter of one number for each column."""
    for operand in graph.tensors(name) or ():
        found = graph.uncast(operand)
        if graph.node(found).kind is NodeKind.GET_ATTR and graph.shape(found) == columns:
            return found
    return None
