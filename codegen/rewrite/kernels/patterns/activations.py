"""Activations of feed-forward layers: gelu and SwiGLU.

gelu, with the addition of a bias if there is one before it, becomes `smpc.kernels.activations.bias_gelu`.

    torch.nn.functional.gelu(x, approximate=...)
    0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x ** 3)))        as GPT-2 writes it

The bias of a linear layer stays where it is: matrix products add it for nothing.

`silu(gate) * up`, the gate of Llama's and most later feed-forward layers, becomes `smpc.kernels.activations.swiglu`.

silu may be called by name or written as `gate * sigmoid(gate)`.
"""

from __future__ import annotations

from collections.abc import Iterator

from smpc.codegen.rewrite.kernels.pattern_graph import KernelCall, NodeUsers, Refusal, Replacement, Rewrite
from smpc.tracer.constants import Ref
from smpc.tracer.ir import NodeKind

_BIAS_GELU = "bias_gelu"
_BIAS_GELU_TARGET = "smpc.kernels.activations.bias_gelu"
_POINTWISE = ("add", "mul", "pow")


def find_bias_gelu(graph: NodeUsers) -> Iterator[Replacement | Refusal]:
    """Every gelu of a trace."""
    for name in graph.find("gelu"):
        x = graph.tensor(name, 0, "input")
        if x is not None:
            yield _bias_gelu(graph, name, x, graph.argument(name, 1, "approximate", "none"))
    for name in graph.find("tanh"):
        x = _cubed_in_tanh(graph, name)
        result = None if x is None else _gelu_result(graph, name, x)
        if x is not None and result is not None:
            yield _bias_gelu(graph, result, x, "tanh")


BIAS_GELU = Rewrite(_BIAS_GELU, find_bias_gelu)


def _bias_gelu(graph: NodeUsers, result: str, x: str, approximate: str) -> Replacement:
    bias = None
    summands = graph.tensors(x) if graph.op(x) == "add" else None
    if summands is not None:
        for values, other in (summands, summands[::-1]):
            is_bias = graph.node(other).kind is NodeKind.GET_ATTR and graph.shape(other) == graph.shape(x)[-1:]
            inside = graph.between(result, (values, other))
            if is_bias and graph.shape(values) == graph.shape(x) and all(user in inside for user in graph.users(x)):
                x, bias = values, other
                break
    arguments = (Ref(x),) if bias is None else (Ref(x), Ref(bias))
    inputs = (x,) if bias is None else (x, bias)
    call = KernelCall(_BIAS_GELU_TARGET, arguments, (("approximate", approximate),))
    return Replacement(_BIAS_GELU, graph.between(result, inputs), (call,))


def _cubed_in_tanh(graph: NodeUsers, tanh: str) -> str | None:
    """The x whose third power goes into a tanh by sums and products with numbers."""
    waiting = list(graph.node(tanh).inputs)
    while waiting:
        name = waiting.pop()
        x = graph.power(name, 3)
        if x is not None:
            return x
        if graph.op(name) in _POINTWISE:
            waiting.extend(graph.node(name).inputs)
    return None


def _gelu_result(graph: NodeUsers, tanh: str, x: str) -> str | None:
    """The product of 1 + tanh with x or half of it, and with one half if that comes last."""
    added = graph.sole_user(tanh)
    summands = graph.scalar_and_tensor(added) if added is not None and graph.op(added) == "add" else None
    if added is None or summands is None or summands[0] != 1.0:
        return None
    halved = False
    result, following = added, graph.sole_user(added)
    multiplied = False
    while following is not None and graph.op(following) == "mul" and not (multiplied and halved):
        scalar, other = graph.scalar_and_tensor(following), graph.other(following, result)
        if scalar is not None and scalar[0] == 0.5 and not halved:
            halved = True
        elif other == x and not multiplied:
            multiplied = True
        elif other is not None and not multiplied and not halved and _is_half(graph, other, x):
            multiplied = halved = True
        else:
            break
        result, following = following, graph.sole_user(following)
    return result if multiplied and halved else None


def _is_half(graph: NodeUsers, name: str, x: str) -> bool:
    return graph.op(name) == "mul" and graph.scalar_and_tensor(name) == (0.5, x)


_SWIGLU = "swiglu"
_SWIGLU_TARGET = "smpc.kernels.activations.swiglu"


def find_swiglu(graph: NodeUsers) -> Iterator[Replacement | Refusal]:
    """Every SwiGLU of a trace."""
    for name in graph.find("silu", "sigmoid"):
        gate = graph.tensor(name, 0, "input")
        activated = name if graph.op(name) == "silu" else _silu_of(graph, name, gate)
        product = None if activated is None else graph.sole_user(activated)
        if gate is None or activated is None or product is None or graph.op(product) != "mul":
            continue
        up = graph.other(product, activated)
        if up is None or graph.shape(up) != graph.shape(gate):
            continue
        if graph.spec(up).dtype != graph.spec(gate).dtype:
            yield Refusal(_SWIGLU, product, f"gate is {graph.spec(gate).dtype}, what it gates {graph.spec(up).dtype}")
            continue
        call = KernelCall(_SWIGLU_TARGET, (Ref(gate), Ref(up)))
        yield Replacement(_SWIGLU, graph.between(product, (gate, up)), (call,))


SWIGLU = Rewrite(_SWIGLU, find_swiglu)


def _silu_of(graph: NodeUsers, sigmoid: str, gate: str | None) -> str | None:
    """The node `gate * sigmoid(gate)`."""
    product = graph.sole_user(sigmoid)
    if product is None or gate is None or graph.op(product) != "mul" or graph.other(product, sigmoid) != gate:
        return None
    return product
