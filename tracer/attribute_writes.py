"""Plain attributes of modules that other modules write while the model runs.

    class Block(nn.Module):
        def forward(self, x):
            self.unit.state = None          # a write from outside of `unit`
            return self.unit(x)             # reads the state, and leaves another one behind

Called on its own by a stage, `unit` would start from the state that its last call has left. So such a module, and every module around
it that does not contain the writer, is not called intact: its nodes are.
"""

from __future__ import annotations

import dataclasses

from smpc.tracer.ir import ModuleCall


class AttributeWrites:
    """The writes of one recording, as (owner, writer) FQNs."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], None] = {}

    def note(self, owner: str, writer: str) -> None:
        """Takes down a write into an attribute of `owner` by the code of `writer`."""
        if owner != writer:
            self._found[owner, writer] = None

    def marked(self, calls: tuple[ModuleCall, ...]) -> tuple[ModuleCall, ...]:
        """The calls, those that depend on such a write marked as not to be made again."""
        if not self._found:
            return calls
        return tuple(dataclasses.replace(call, whole=False) if self._needs_writer(call.fqn) else call for call in calls)

    def _needs_writer(self, fqn: str) -> bool:
        return any(_contains(fqn, owner) and not _contains(fqn, writer) for owner, writer in self._found)


def _contains(outer: str, inner: str) -> bool:
    return not outer or outer == inner or inner.startswith(f"{outer}.")
