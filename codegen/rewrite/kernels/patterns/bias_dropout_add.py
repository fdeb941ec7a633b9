"""`residual + dropout(x + bias)` becomes `smpc.kernels.bias_dropout_add.bias_dropout_add`, which keeps no mask.

The op draws its mask in another way than torch, so that a run with it drops other places than one without; the
check compares both without dropping.
"""

from __future__ import annotations

from collections.abc import Iterator

from smpc.codegen.rewrite.kernels.pattern_graph import KernelCall, NodeUsers, Refusal, Replacement, Rewrite
from smpc.tracer.constants import Ref
from smpc.tracer.ir import NodeKind

_OP = "bias_dropout_add"
_TARGET = "smpc.kernels.bias_dropout_add.bias_dropout_add"


def find_bias_dropout_add(graph: NodeUsers) -> Iterator[Replacement | Refusal]:
    """Every sum of a residual and a dropout."""
    for name in graph.find("dropout"):
        x, total = graph.tensor(name, 0, "input"), graph.sole_user(name)
        if (
            x is None
            or total is None
            or graph.op(total) != "add"
            or graph.argument(name, 2, "training", True) is not True
        ):
            continue
        residual = graph.other(total, name)
        if residual is None or residual == name:
            continue
        if (graph.shape(residual), graph.spec(residual).dtype) != (graph.shape(x), graph.spec(x).dtype):
            yield Refusal(_OP, total, f"residual is {graph.spec(residual)}, what is added to it {graph.spec(x)}")
            continue
        values, bias = _added_bias(graph, x)
        inputs = tuple(item for item in (values, bias, residual) if item is not None)
        arguments = (Ref(values), None if bias is None else Ref(bias), Ref(residual), graph.argument(name, 1, "p", 0.5))
        yield Replacement(_OP, graph.between(total, inputs), (KernelCall(_TARGET, arguments),))


REWRITE = Rewrite(_OP, find_bias_dropout_add)


def _added_bias(graph: NodeUsers, x: str) -> tuple[str, str | None]:
    """x as (values, bias), if it is the sum of these and has no other use."""
    summands = graph.tensors(x) if graph.op(x) == "add" and graph.sole_user(x) is not None else None
    if summands is None:
        return x, None
    for values, bias in (summands, summands[::-1]):
        is_bias = graph.node(bias).kind is NodeKind.GET_ATTR and graph.shape(bias) == graph.shape(x)[-1:]
        if is_bias and graph.shape(values) == graph.shape(x):
            return values, bias
    return x, None
