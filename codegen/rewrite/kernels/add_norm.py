"""A residual sum and its norm become one op: `add_rms_norm` and `add_layer_norm` of `smpc.kernels`.

    h = residual + x;  y = norm(h)        ->        y, h = add_rms_norm(x, residual, weight, eps)

Norms are those that `rms_norm` and `layer_norm` find. The sum may be read on: it takes the name of the op's second result.

    sum and norm in one module, or the norm in a module that the sum's module calls     replaced: Llama's post_attention_layernorm,
                                                                                        GPT-2's ln_2
    the norm in the next layer                                                          left alone: between layers pipelines are cut,
                                                                                        and there h alone goes over, not x and residual
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from smpc.codegen.rewrite.kernels import layer_norm, rms_norm
from smpc.codegen.rewrite.kernels.graph import Graph
from smpc.codegen.rewrite.kernels.replacement import Call, Find, Refusal, Replacement, Rewrite
from smpc.tracer.ir import Trace
from smpc.tracer.literals import Ref


def find(op: str, norms: Find, graph: Graph) -> Iterator[Replacement | Refusal]:
    """Every norm among `norms` of a sum of two tensors of its shape and type."""
    for norm in norms(graph):
        if isinstance(norm, Refusal):
            continue
        [call] = norm.calls
        total = call.args[0].name
        pair = graph.tensors(total) if graph.op(total) == "add" else None
        spec = graph.spec(total)
        if pair is None or call.args[1] != spec.shape[-1:]:
            continue
        if any((graph.shape(name), graph.spec(name).dtype) != (spec.shape, spec.dtype) for name in pair):
            continue
        if _encloses(graph.trace, total, norm.result):
            yield _replacement(op, graph, norm, call, total, pair)
        else:
            yield Refusal(op, norm.result, "its sum is made in another layer, and pipelines are cut between layers")


REWRITES = (
    Rewrite("add_rms_norm", partial(find, "add_rms_norm", rms_norm.find)),
    Rewrite("add_layer_norm", partial(find, "add_layer_norm", layer_norm.find)),
)


def _replacement(
    op: str, graph: Graph, norm: Replacement, call: Call, total: str, pair: tuple[str, str]
) -> Replacement:
    module, _, _ = call.target.rpartition(".")
    fused = Call(f"{module}.{op}", (*map(Ref, pair), *call.args[2:]), call.kwargs)
    normed, summed = (Call("_operator.getitem", (Ref("#0"), index)) for index in (0, 1))
    replaced = tuple(sorted((total, *norm.replaced), key=graph.trace.position))
    if all(user in replaced for user in graph.users(total)):
        return Replacement(op, replaced, (fused, normed))
    return Replacement(op, replaced, (fused, summed, normed), also=((total, "#1"),))


def _encloses(trace: Trace, outer: str, inner: str) -> bool:
    """Whether the module call that `inner` is in is that of `outer`, or was made by it."""
    call, wanted = trace.node(inner).call, trace.node(outer).call
    while call not in (wanted, -1):
        call = trace.calls[call].parent
    return call == wanted
