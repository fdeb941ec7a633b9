"""Parameters and buffers that a trace uses, and buffers that it writes: their values are where the first program used them.

`other_forms`: buffers that it leaves in another shape or type, for which the next call would need another program.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from smpc.tracer.ir import NodeKind, Trace


@dataclass(frozen=True, slots=True)
class StateUse:
    """Names of the parameters and buffers that a trace uses, and of the buffers that it writes into or rebinds.

    For modules called whole, this is all their state. A plan gives a stage to every parameter and buffer, used or not.
    """

    used: frozenset[str]
    written: frozenset[str]

    @classmethod
    def of(cls, trace: Trace) -> Self:
        """The state use of the trace's nodes."""
        storages = {trace.node(name).storage for node in trace.nodes for name in node.mutates}
        targets, changed, modules = set[str](), set[str](), list[str]()
        for node in trace.nodes:
            if node.kind in (NodeKind.GET_ATTR, NodeKind.SET_ATTR):
                targets.add(node.target)
                if node.kind is NodeKind.SET_ATTR or node.storage in storages:
                    changed.add(node.target)
            elif node.kind is NodeKind.CALL_MODULE:
                modules.append(f"{node.target}.")
        used, written = set[str](), set[str]()
        for state in trace.state:
            inside = {name for name in state.names if name.startswith(tuple(modules))}
            if inside or not targets.isdisjoint(state.names):
                used.update(state.names)
            if not state.is_parameter:
                written |= inside | changed.intersection(state.names)
        return cls(frozenset(used), frozenset(written))

    def counting(
        self, known: Mapping[str, tuple[int, ...]], now: Mapping[str, tuple[int, ...]]
    ) -> dict[str, tuple[int, ...]]:
        """The state use of a plan, `now`, merged with the `known` one: unused state stays where it is."""
        return {name: ranks for name, ranks in now.items() if name in self.used or name not in known}


def other_forms(trace: Trace) -> tuple[str, ...]:
    """For people, each buffer that forward binds to a tensor of another shape or type than it found, and where that is computed."""
    known = {name: state for state in trace.state if not state.is_parameter for name in state.names}
    last = {node.target: trace.node(node.args[0].name) for node in trace.nodes if node.kind is NodeKind.SET_ATTR}
    found = []
    for name, value in last.items():
        before, after = known[name].spec if name in known else None, value.spec
        if before is None or after is None or (before.shape, before.dtype) == (after.shape, after.dtype):
            continue
        module = trace.calls[value.call].fqn
        found.append(
            f"{name}: {before} before the call, {after} after it ({value.source or 'unknown line'} in "
            f"{f'module {module}' if module else 'the model'})"
        )
    return tuple(found)


def moved_buffer(
    written: frozenset[str], before: Mapping[str, tuple[int, ...]], now: Mapping[str, tuple[int, ...]]
) -> str:
    """The error for a buffer whose present values are on other ranks; "" if there is none."""
    for name in sorted(written):
        if name in before and name in now and before[name] != now[name]:
            return (
                f"expected buffer {name!r}, which forward writes, on the ranks of the first program that uses it, {list(before[name])}, "
                f"found that another program uses it on {list(now[name])}, where its values are old; keep the module that it belongs to "
                "on one rank (smp.partition, smp.set_partition), or make the first step use the model as later ones do"
            )
    return ""
