"""A trace with nodes replaced: the same Python, the same inputs and outputs, other calls.

The new nodes stand where the last replaced one stood, under the module call that it was in: other replaced nodes that are read on
(`Replacement.also`) move there. A module call that lost nodes cannot be
made any more, since the module would compute what was replaced: its arguments become `Opaque`, which has the splitter write it out
node by node.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from smpc.codegen.rewrite.kernels.replacement import Replacement
from smpc.tracer.ir import ModuleCall, Node, Trace
from smpc.tracer.literals import Opaque, Ref
from smpc.tracer.structure import Structure

_REWRITTEN = Opaque("rewritten")


def splice(
    trace: Trace, replacements: Sequence[tuple[Replacement, tuple[Node, ...]]], storages: Sequence[int]
) -> Trace:
    """The trace with every replacement made; `storages` is its list of storages, with those of the new nodes."""
    new = {replacement.result: nodes for replacement, nodes in replacements}
    gone = {name: None for replacement, _ in replacements for name in replacement.replaced if name not in new}
    moved = {name: None for replacement, _ in replacements for name, _ in replacement.also}
    lacking = {name: None for name in gone if name not in moved}
    nodes: list[Node] = []
    positions: list[int] = []
    lost: list[int] = []  # replaced nodes before each position
    count = 0
    for node in trace.nodes:
        positions.append(len(nodes))
        lost.append(count)
        count += node.name in new or node.name in gone
        nodes.extend(new.get(node.name, () if node.name in gone else (node,)))
    positions.append(len(nodes))
    lost.append(count)
    regions = tuple(
        dataclasses.replace(region, first=positions[region.first], last=positions[region.last])
        for region in trace.regions
    )
    calls = tuple(_call(call, index, positions, lost, lacking) for index, call in enumerate(trace.calls))
    return dataclasses.replace(trace, nodes=tuple(nodes), calls=calls, regions=regions, storages=tuple(storages))


def _call(
    call: ModuleCall, index: int, positions: Sequence[int], lost: Sequence[int], lacking: Mapping[str, None]
) -> ModuleCall:
    """The call over the new nodes."""

    def kept(leaf: object) -> object:
        return Opaque("tensor") if isinstance(leaf, Ref) and leaf.name in lacking else leaf

    rewritten = index > 0 and lost[call.first] < lost[call.last]
    return dataclasses.replace(
        call,
        first=positions[call.first],
        last=positions[call.last],
        arguments=Structure() if rewritten else call.arguments,
        argument_leaves=(_REWRITTEN,) if rewritten else tuple(map(kept, call.argument_leaves)),
        output_leaves=tuple(map(kept, call.output_leaves)),
    )
