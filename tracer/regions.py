"""Activation checkpointing: the parts of a model whose values are computed again for the backward pass.

A region is a run of nodes. Its inputs are kept from the forward to the backward pass; intermediate results are dropped and
computed again. Regions come from

    torch.utils.checkpoint.checkpoint    called by the model's Python, or a library's, with `use_reentrant` either way
    smp.checkpoint, checkpoint_sequential    the same, module by module
    a mark on a module                   `mark_checkpoint`, which `smp.set_activation_checkpointing` sets
    patterns of names                    `matching_regions`; the option `recompute`

The regions of a sequential container's layers share a number and a strategy, which says how many consecutive layers of one stage
become one region: "each" layer for itself, all that are "contiguous", or "group_3" at most.

Example: `matching_regions(trace, ("model.layers.*",))` has a region for every layer that is called.

`RegionLog` notes the checkpointed regions of one recording while the model runs.

    log = RegionLog()
    with log.region(call=3, position=lambda: len(nodes)):
        ...                                 # what is recorded here is computed again for the backward pass
    log.finished(calls)                     # (Region("h.0", 12, 40, 3), ...): with names, empty ones left out
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from smpc.errors import ConfigError
from smpc.tracer.ir import ModuleCall, NodeKind, Region, Trace

_MARK = "_smpc_checkpoint"
EACH = "each"


@dataclass(frozen=True, slots=True)
class CheckpointMark:
    """A module's mark. `strategy` is for the layers of a sequential container, else "".

    `is_member`: the module is one of an nn.ModuleList, and the strategy is for the list.
    """

    preserve_rng_state: bool = True
    strategy: str = ""
    pack_args_as_tuple: bool = False
    is_member: bool = False


def mark_checkpoint(module: nn.Module, mark: CheckpointMark) -> None:
    """Have every trace make a region of each call of the module, or of the layers of a sequential one."""
    vars(module)[_MARK] = mark


def checkpoint_mark(module: nn.Module) -> CheckpointMark | None:
    """The module's mark."""
    found: CheckpointMark | None = vars(module).get(_MARK)
    return found


def group_size(strategy: str) -> int:
    """How many consecutive layers of one stage go into one region; 0: all. ConfigError for an unknown strategy."""
    if strategy == EACH:
        return 1
    if strategy == "contiguous":
        return 0
    match = re.fullmatch(r"group_([1-9]\d*)", strategy) if isinstance(strategy, str) else None
    if match is None:
        raise ConfigError(
            f"strategy: expected 'each', 'contiguous' or 'group_N' with N from 1 up, such as 'group_2', found {strategy!r}"
        )
    return int(match[1])


def matching_regions(trace: Trace, patterns: Sequence[str]) -> tuple[Region, ...]:
    """A region for each call of a module whose name matches one of the patterns (as in a shell, "*" takes dots too).

    The outermost of nested calls counts; calls inside a region of the model's own are left out. The model itself has no name, so
    nothing matches it. ConfigError for a pattern that matches no module.
    """
    found: list[Region] = []
    unused = dict.fromkeys(patterns)
    exact = {pattern for pattern in unused if not any(sign in pattern for sign in "*?[")}  # names as they are: most are
    wild = [pattern for pattern in unused if pattern not in exact]
    for name, first, last, call in _named_spans(trace):
        matched = [name] if name in exact else []
        matched += [pattern for pattern in wild if fnmatchcase(name, pattern)]
        for pattern in matched:
            unused.pop(pattern, None)
        if matched and not any(region.first <= first and last <= region.last for region in (*trace.regions, *found)):
            found.append(Region(name, first, last, call))
    if unused:
        names = list(dict.fromkeys(name for name, *_ in _named_spans(trace)))
        shown = ", ".join(map(repr, names[:5])) + (", ..." if len(names) > 5 else "")
        raise ConfigError(
            f"recompute: no module that the model calls matches {', '.join(map(repr, unused))}; its modules are {shown}"
        )
    return tuple(found)


def _named_spans(trace: Trace) -> Iterator[tuple[str, int, int, int]]:
    """Name, first and last + 1 node and parent of every module call, a module called whole included, outer ones first."""
    for call in trace.calls[1:]:
        if call.last > call.first:
            yield call.fqn, call.first, call.last, call.parent
    for position, node in enumerate(trace.nodes):
        if node.kind is NodeKind.CALL_MODULE:
            yield node.target, position, position + 1, node.call


class RegionLog:
    """Regions in order of their begin, outer ones first."""

    def __init__(self) -> None:
        self._regions: list[Region | None] = []
        self._open: list[int] = []  # the innermost call around each region that has not ended
        self._num_sequences = 0
        self._lists: dict[tuple[int, str], int] = {}  # sequences by the call and the list

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

    def of_list(self, call: int, member: str) -> int:
        """A number for the members of one list of modules that are called right inside this call."""
        place = call, member.rpartition(".")[0]
        if place not in self._lists:
            self._lists[place] = self.new_sequence()
        return self._lists[place]

    def finished(self, calls: tuple[ModuleCall, ...]) -> tuple[Region, ...]:
        """The regions, each with the name of the module that it is a call of, or of the one whose code it is."""
        regions = (region for region in self._regions if region is not None and region.first < region.last)
        return tuple(_named_region(region, calls) for region in regions)


def _named_region(region: Region, calls: tuple[ModuleCall, ...]) -> Region:
    """A checkpointed region with the name of the module that it is the whole call of."""
    inside = [
        call for call in calls if call.parent == region.call and region.first <= call.first and call.last <= region.last
    ]
    inside = [call for call in inside if call.last > call.first]
    name = inside[0].fqn if len(inside) == 1 else calls[region.call].fqn
    return dataclasses.replace(region, name=name)
