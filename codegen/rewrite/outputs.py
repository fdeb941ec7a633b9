"""Fewer outputs, and inputs among them.

Unwanted outputs of a model become None, and operations that only they needed are dropped:

    before    CausalLMOutput(loss=loss, logits=logits)
    after     CausalLMOutput(loss=loss, logits=None)              keep_outputs(trace, ("loss",))

A tensor-parallel rank returns whole tensors, so logits that are returned must be gathered, even if the loss is computed of slices.
An output is named as Python reaches it: `loss`, `[0]`, `encoder[1]`; a name includes everything below it.

Inputs that forward writes into are returned after all outputs, as forward leaves them: a pipeline runs on copies of a script's tensors, and
the script's loss may use them, too. A rank that has such an input may not have what another one has written, so it is copied where it is
written, and that copy is returned in its place wherever forward itself returns it.

    def forward(self, x): x[0].mul_(2); return self.a(x), x
    after                 x[0].mul_(2); y = x.clone(); return self.a(x), y, y               return_written_inputs(trace)
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, TypeVar

import torch

from smpc.errors import ConfigError, TraceError
from smpc.tracer.constants import Ref, map_references, references
from smpc.tracer.ir import ModuleCall, Node, NodeKind, Region, Trace

Span = TypeVar("Span", ModuleCall, Region)


def keep_outputs(trace: Trace, names: Sequence[str]) -> Trace:
    """The trace with no other tensors than these among its outputs. ConfigError for names that it does not have."""
    paths = [_plain_output_name(path) for path in trace.output.paths()]
    unknown = [name for name in names if not any(_is_below(path, name) for path in paths)]
    own = trace.output_leaves[: len(paths)]
    tensors = [path for path, leaf in zip(paths, own, strict=True) if references(leaf)]
    if unknown or not names:
        raise ConfigError(
            f"tensor_parallel_outputs: expected names among {', '.join(tensors) or 'none'}, found {', '.join(unknown) or 'no name'}"
        )
    leaves = tuple(
        leaf if not references(leaf) or any(_is_below(path, name) for name in names) else None
        for path, leaf in zip(paths, own, strict=True)
    )
    return dataclasses.replace(trace, output_leaves=(*leaves, *trace.output_leaves[len(own) :]))


def written_inputs(trace: Trace) -> tuple[str, ...]:
    """Inputs that the model changes in place, by placeholder name."""
    written = {trace.node(name).storage for node in trace.nodes for name in node.mutates}
    return tuple(node.name for node in trace.nodes if node.kind is NodeKind.PLACEHOLDER and node.storage in written)


def return_left_inputs(trace: Trace) -> Trace:
    """The trace with what it leaves in the containers of its inputs after its other outputs."""
    return dataclasses.replace(trace, output_leaves=(*trace.output_leaves, *trace.left_leaves), left_leaves=())


def return_written_inputs(trace: Trace) -> Trace:
    """The trace with the inputs that it writes into after its other outputs.

    Raises TraceError where forward sets an input's `.data`: that is another tensor's memory from then on, and none of the script's batch.
    """
    names = written_inputs(trace)
    storages = {trace.node(name).storage for name in names}
    for node in trace.nodes:
        if node.target == "builtins.setattr" and any(trace.node(name).storage in storages for name in node.mutates):
            raise TraceError(
                f"forward sets .{node.args[1]} of an input ({node.source or 'unknown line'}): expected a new tensor (x = ...), or a write "
                "into it (x.copy_(...)), after which it is clear what the script's own tensor holds"
            )
    leaves = (*trace.output_leaves, *map(Ref, names))
    copies: dict[str, str] = {}
    for name in names:
        trace, copies[name] = _with_copy(trace, trace.node(name))
    returned = (map_references(leaf, lambda name: Ref(copies.get(name, name))) for leaf in leaves)
    return dataclasses.replace(trace, output_leaves=tuple(returned), written=names)


def _with_copy(trace: Trace, written: Node) -> tuple[Trace, str]:
    """The trace with a copy of an input after the last operation that writes into it, and the copy's name."""
    storages = {node.name: node.storage for node in trace.nodes}
    last = max(
        i for i, node in enumerate(trace.nodes) if any(storages[each] == written.storage for each in node.mutates)
    )
    writer, value = trace.nodes[last], _last_name(trace, written)
    spec = value.spec
    assert spec is not None, "inputs are tensors"
    number = next(i for i in itertools.count() if f"{written.name}_written{i or ''}" not in storages)
    copied = Node(
        f"{written.name}_written{number or ''}",
        NodeKind.CALL_FUNCTION,
        "torch.Tensor.clone",
        (Ref(value.name),),
        spec=dataclasses.replace(
            spec, stride=torch.empty_strided(spec.shape, spec.stride, device="meta").clone().stride()
        ),
        storage=len(trace.storages),
        call=writer.call,
        bytes_moved=2 * spec.num_bytes,
        grad_enabled=trace.calls[0].grad_enabled,
        source=writer.source,
    )
    changed = dataclasses.replace(
        trace,
        nodes=(*trace.nodes[: last + 1], copied, *trace.nodes[last + 1 :]),
        calls=tuple(
            _around(call, last, whole=call.whole and not call.first <= last < call.last) for call in trace.calls
        ),
        regions=tuple(_around(region, last) for region in trace.regions),
        storages=(*trace.storages, spec.num_bytes),
    )
    return changed, copied.name


def _last_name(trace: Trace, written: Node) -> Node:
    """The last node that is the input itself: `x.add_(y)` returns x, with the history of y."""
    found = written
    for node in trace.nodes:
        if node.storage == written.storage and node.spec is not None and found.name in node.mutates:
            found = node
    return found


def _around(span: Span, last: int, **changes: Any) -> Span:
    """A span of nodes, with room for one more after the node at the position `last`, if that is in it."""
    return dataclasses.replace(
        span, first=span.first + (span.first > last), last=span.last + (span.last > last), **changes
    )


def loss_outputs(trace: Trace) -> tuple[str, ...] | None:
    """The outputs needed for training: the model's `loss`, a number, and other numbers. None: all, since the loss is unknown."""
    specs = {node.name: node.spec for node in trace.nodes}
    names = []
    paths = trace.output.paths()
    for path, leaf in zip(paths, trace.output_leaves[: len(paths)], strict=True):
        found = [specs[name] for name in references(leaf)]
        if found and all(spec is not None and spec.shape == () for spec in found):
            names.append(_plain_output_name(path))
    return tuple(names) if "loss" in names else None


def _plain_output_name(path: str) -> str:
    """ "loss" of ".loss" and of "['loss']"; "[0]" stays."""
    return path.replace("['", ".").replace("']", "").lstrip(".")


def _is_below(path: str, name: str) -> bool:
    return path == name or path.startswith((f"{name}.", f"{name}["))
