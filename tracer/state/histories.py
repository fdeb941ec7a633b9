"""Parameters and buffers that forward leaves with the autograd graph of what it has written into them.

    self.mean = 0.9 * self.mean + hidden.mean(0)            the next call meets a tensor that hangs on the graph of this one
    self.mean = 0.9 * self.mean.detach() + hidden.mean(0)   the next call lets go of it

A recording meets these tensors without a graph, as the first call does. Its trace holds for later calls if no output hangs on what they
were: plain PyTorch would differentiate through the earlier call a second time, and fail. One that has a graph before the first call, as it
was computed from parameters, is refused if anything uses it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import nn

from smpc.tracer.ir import Node, NodeKind, Trace
from smpc.tracer.recording.untraceable import UntraceableError
from smpc.tracer.state.fakes import untrained

_WAY_OUT = "what to do: write a detached value into it (value.detach()), or write under torch.no_grad()"
_DETACHING = ("detach", "detach_")


def check_histories(model: nn.Module, trace: Trace, before: Collection[str]) -> None:
    """Raises UntraceableError where a later call would differentiate through an earlier one. `model` is as forward has left it.

    `before`: the buffers that had a graph when the recording began. Raises TraceError if one of these is used.
    """
    whole = tuple(f"{node.target}." for node in trace.nodes if node.kind is NodeKind.CALL_MODULE)
    for spec in trace.state:
        name = next((name for name in spec.names if name in before), "")
        if name and (_use(trace, spec.names) is not None or any(each.startswith(whole) for each in spec.names)):
            raise untrained(name)
    hanging = {name for name, tensor in _tensors(model) if tensor.grad_fn is not None}
    for spec in trace.state:
        fqn = next((name for name in spec.names if name in hanging), "")
        used = _use(trace, spec.names) if fqn else None
        if used is not None:
            place = fqn.rpartition(".")[0]
            raise UntraceableError.inside(
                model.get_submodule(place),
                place,
                used.source,
                f"forward leaves {fqn!r} with the autograd graph of what it has computed, and the output depends on what it was before, so "
                "that the next call would differentiate through this one",
                _WAY_OUT,
            )


def _tensors(model: nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _use(trace: Trace, names: tuple[str, ...]) -> Node | None:
    """The first node by which an output hangs on the graph of a parameter or buffer as the call has found it; None if none does."""
    hanging = {node.name for node in trace.nodes if node.kind is NodeKind.GET_ATTR and node.target in names}
    first: Node | None = None
    for node in trace.nodes:
        if _passes_graph(node) and not hanging.isdisjoint(node.inputs):
            hanging.update((node.name, *node.mutates))
            first = first or node
    return None if hanging.isdisjoint(trace.output_names) else first


def _passes_graph(node: Node) -> bool:
    """Whether what a node gives hangs on the graphs that its inputs hang on."""
    if not node.grad_enabled or node.kind is NodeKind.SET_ATTR or node.target.rpartition(".")[2] in _DETACHING:
        return False
    if node.target == "builtins.getattr" and node.args[1:] == ("data",):
        return False
    return node.spec is None or node.spec.torch_dtype.is_floating_point or node.spec.torch_dtype.is_complex
