"""When what is offloaded is copied to the host and back, and what of that computing waits for.

Terms
    copy        what OFFLOAD or RELOAD starts: bytes / rate + latency seconds. Each direction of a rank's link has one at a time, in the
                order of the program, and both work at once
    release     computing goes on behind a RELEASE when that copy out has ended: until then its memory is not free
    stall       what these waits add to the step

A device computes while it copies. So of a rank, task i is followed by these (`smpc.codegen.offload`), at the time t at which it and its
messages are done:

    OFFLOAD     starts at t, or when the copy out before it has ended
    RELEASE     t becomes the end of the copy out, if that is later
    RELOAD      starts at t, or when the copy in before it has ended; its B starts no sooner than it ends

A CPU does one after the other: each copy adds its seconds to t.

Example: forward 1, copies of 3, horizon 1, `F0 OFFLOAD0 F1 RELEASE0 F2`: F1 ends at 2, the copy at 4, so F2 starts at 4.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from smpc.codegen.offload import Key, moves
from smpc.codegen.program import Op, Schedule
from smpc.partitioner.graph.plan import HostLink, Plan


@dataclass(frozen=True, slots=True)
class Copy:
    """One copy in time: an OFFLOAD, to the host, or a RELOAD, back."""

    rank: int
    op: Op
    stage: int
    microbatch: int
    start: float
    end: float
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Offloading:
    """What a plan offloads of each microbatch, by stage, over which link."""

    horizon: int
    num_bytes: Mapping[int, int]
    link: HostLink

    @classmethod
    def of(cls, plan: Plan) -> Offloading | None:
        """None if it offloads nothing."""
        stages = {stage.index: size for stage in plan.stages if (size := stage.offloaded_bytes_per_microbatch)}
        if not stages or not plan.loading_horizon or plan.host_link is None:
            return None
        return cls(plan.loading_horizon, stages, plan.host_link)


class HostCopies:
    """The links of the ranks in one simulated step."""

    def __init__(self, offloading: Offloading, schedule: Schedule) -> None:
        self.copies: list[Copy] = []
        self.loaded: dict[Key, float] = {}  # when a RELOAD has ended
        self._offloading = offloading
        self._before = [moves(actions, offloading.horizon) for actions in schedule]
        self._left: dict[Key, float] = {}  # when an OFFLOAD has ended
        self._free: dict[tuple[int, Op], float] = {}  # when a direction of a rank's link is free

    def ahead_of(self, rank: int, task: int, time: float) -> float:
        """Starts what is due ahead of the rank's task of this number, the one before it done at `time`; when computing goes on."""
        for op, key in self._before[rank].get(task, ()):
            if key[0] not in self._offloading.num_bytes:
                continue
            if op is Op.RELEASE:
                time = max(time, self._left[key])
                continue
            end = self._copy(rank, op, key, time)
            (self._left if op is Op.OFFLOAD else self.loaded)[key] = end
            time = time if self._offloading.link.overlaps else end
        return time

    def _copy(self, rank: int, op: Op, key: Key, time: float) -> float:
        """When a copy ends that could start at this time."""
        num_bytes, link = self._offloading.num_bytes[key[0]], self._offloading.link
        start = max(time, self._free.get((rank, op), 0.0))
        end = self._free[rank, op] = start + link.latency + num_bytes / link.rate
        self.copies.append(Copy(rank, op, *key, start, end, num_bytes))
        return end
