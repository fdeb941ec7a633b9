"""`silu(gate) * up`, the gate of Llama's and most later feed-forward layers, becomes `smpc.kernels.activations.swiglu`.

silu may be called by name or written as `gate * sigmoid(gate)`.
"""

from __future__ import annotations

from collections.abc import Iterator

from smpc.codegen.rewrite.kernels.graph import Graph
from smpc.codegen.rewrite.kernels.replacement import Call, Refusal, Replacement, Rewrite
from smpc.tracer.literals import Ref

_OP = "swiglu"
_TARGET = "smpc.kernels.activations.swiglu"


def find(graph: Graph) -> Iterator[Replacement | Refusal]:
    """Every SwiGLU of a trace."""
    for name in graph.find("silu", "sigmoid"):
        gate = graph.tensor(name, 0, "input")
        activated = name if graph.op(name) == "silu" else _times(graph, name, gate)
        product = None if activated is None else graph.sole_user(activated)
        if gate is None or activated is None or product is None or graph.op(product) != "mul":
            continue
        up = graph.other(product, activated)
        if up is None or graph.shape(up) != graph.shape(gate):
            continue
        if graph.spec(up).dtype != graph.spec(gate).dtype:
            yield Refusal(_OP, product, f"gate is {graph.spec(gate).dtype}, what it gates {graph.spec(up).dtype}")
            continue
        call = Call(_TARGET, (Ref(gate), Ref(up)))
        yield Replacement(_OP, graph.between(product, (gate, up)), (call,))


REWRITE = Rewrite(_OP, find)


def _times(graph: Graph, sigmoid: str, gate: str | None) -> str | None:
    """The node `gate * sigmoid(gate)`."""
    product = graph.sole_user(sigmoid)
    if product is None or gate is None or graph.op(product) != "mul" or graph.other(product, sigmoid) != gate:
        return None
    return product
