"""The checkpointed regions of one recording, noted while the model runs: see `smpc.tracer.regions` for what they are.

log = RegionLog()
with log.region(call=3, position=lambda: len(nodes)):
    ...                                 # what is recorded here is computed again for the backward pass
log.finished(calls)                     # (Region("h.0", 12, 40, 3), ...): with names, empty ones left out
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from smpc.tracer.ir import ModuleCall, Region


class RegionLog:
    """Regions in order of their begin, outer ones first."""

    def __init__(self) -> None:
        self._regions: list[Region | None] = []
        self._open: list[int] = []  # the innermost call around each region that has not ended
        self._num_sequences = 0

    @contextmanager
    def region(
        self,
        call: int,
        position: Callable[[], int],
        preserve_rng_state: bool = True,
        sequence: int = -1,
        strategy: str = "",
        *,
        own: bool = False,
    ) -> Iterator[None]:
        """A region from the present `position` to that at the end; `call` is the innermost module call around it."""
        index, first = len(self._regions), position()
        self._regions.append(None)
        self._open.append(call)
        try:
            yield
        finally:
            self._open.pop()
        self._regions[index] = Region("", first, position(), call, preserve_rng_state, sequence, strategy, own)

    def is_innermost(self, call: int) -> bool:
        """Whether the innermost open region was begun right inside this call."""
        return self._open[-1:] == [call]

    def new_sequence(self) -> int:
        """A number for the layers of one call of a sequential container."""
        self._num_sequences += 1
        return self._num_sequences - 1

    def finished(self, calls: tuple[ModuleCall, ...]) -> tuple[Region, ...]:
        """The regions, each with the name of the module that it is a call of, or of the one whose code it is."""
        regions = (region for region in self._regions if region is not None and region.first < region.last)
        return tuple(_named(region, calls) for region in regions)


def _named(region: Region, calls: tuple[ModuleCall, ...]) -> Region:
    inside = [
        call for call in calls if call.parent == region.call and region.first <= call.first and call.last <= region.last
    ]
    inside = [call for call in inside if call.last > call.first]
    name = inside[0].fqn if len(inside) == 1 else calls[region.call].fqn
    return dataclasses.replace(region, name=name)
