"""How long operations take here, by name and size: the nodes of the probes, as `smpc.partitioner.costs.timing` measures them.

    samples = measure(ranks, seconds=45)        one for each node
    curves(samples)                             by name, what is reached of the fastest: forward, backward

Passes that are near the shortest one count: what others do on the machine makes some longer and none shorter. A node's time is its mean
over them, so that all nodes together take as long as a pass; what is rarely slow in each of many nodes is always slow in some of them.
Sizes grow as long as one pass takes less than a twelfth of the time, and all probes take turns until the time is up. On ranks, all measure
the same at once, and the mean counts.

To look at the clock takes time as well. On a CPU all probes also run by themselves, with nobody looking. By what the smallest takes less
then, each node's time is shortened; and the times of each probe are stretched to what it takes by itself, by the wall clock, on which a
processor has more to do than its program.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from smpc.calibration.measuring_processes import CalibrationRanks
from smpc.calibration.probes import ProbeModel, probes
from smpc.partitioner.costs.device import Curve
from smpc.partitioner.costs.node_costs import NodeTimes, Work, work_of
from smpc.partitioner.costs.timing import Stopwatch
from smpc.tracer import record
from smpc.tracer.ir import Trace

_GROWTH = 6  # the next size takes so many times as long
_SHARE_OF_TIME = 12  # the longest pass has that part of the time
_FEWEST, _MOST = 3, 24  # passes that count
_STEADY = 1.15  # times that are longer than the least by more were interrupted
_BUCKET = 4.0  # sizes that differ by less count as one


@dataclass(frozen=True)
class Sample:
    """A node's work, and the seconds that its forward and its backward took."""

    work: Work
    forward: float
    backward: float


class _Stopwatch(Stopwatch):
    """Times nodes by the clock of the ranks."""

    ranks: CalibrationRanks
    timer: Callable[[], float]

    def clock(self) -> float:
        """The time, once the device has done what it was given."""
        self.ranks.wait()
        return self.timer()

    def one_pass(self) -> NodeTimes:
        """The times of one pass, as of a step's first microbatch: what adding to gradients takes is counted elsewhere."""
        for parameter in self.model.parameters():
            parameter.grad = None
        return super().one_pass()


@dataclass
class _Running:
    probe: ProbeModel
    trace: Trace
    stopwatch: _Stopwatch
    passes: list[NodeTimes]
    alone: list[tuple[float, float]]  # forward and backward of the model by itself; empty: not measured


def measure(
    ranks: CalibrationRanks, seconds: float, dtype: torch.dtype, show: Callable[[str, int, int], None]
) -> list[Sample]:
    """A sample for each node of each probe that there is time for."""
    started = time.monotonic()
    running, skipped = list[_Running](), set[str]()
    for probe in probes(dtype, ranks.device):
        if probe.family not in skipped:
            found, took = _start_timed_probe(probe, ranks)
            running.append(found)
            if ranks.most(took) * _GROWTH > seconds / _SHARE_OF_TIME:
                skipped.add(probe.family)
    for number in range(_MOST):
        spent = ranks.most(time.monotonic() - started)
        if number >= _FEWEST and spent >= seconds:
            break
        show("Timing operations", min(int(spent), int(seconds)), int(seconds))
        for item in running:
            ranks.together()
            item.passes.append(item.stopwatch.run())
            if ranks.device.type == "cpu":
                ranks.together()
                item.alone.append(_by_itself(item))
    looking = (
        _seconds_of_looking_at_operation(running[0], ranks) if running[0].alone else (_operation_overhead(ranks),) * 2
    )
    return [sample for item in running for sample in _operation_samples(item, ranks, looking)]


def _by_itself(item: _Running) -> tuple[float, float]:
    """Seconds by the clock of a probe's forward and backward while nobody looks at its nodes."""
    model, clock, inputs = item.stopwatch.model, time.perf_counter, item.probe.inputs()
    for parameter in model.parameters():
        parameter.grad = None
    start = clock()
    loss = model(*inputs)
    middle = clock()
    loss.backward()
    return middle - start, clock() - middle


def _seconds_of_looking_at_operation(item: _Running, ranks: CalibrationRanks) -> tuple[float, float]:
    """Seconds by which looking lengthens the forward of a node, and its backward."""
    passes = _steady_operations(item.passes, [float(p.forward.sum() + p.backward.sum()) for p in item.passes])
    alone = _steady_operations(item.alone, [sum(both) for both in item.alone])
    found = []
    for part, own in enumerate(zip(*alone, strict=True)):
        looked = [(p.forward, p.backward)[part] for p in passes]
        count = np.count_nonzero(np.min(looked, axis=0))
        found.append((float(np.mean(looked, axis=0).sum()) - statistics.mean(own)) / count)
    forward, backward = ranks.mean(found)
    return forward, backward


def _start_timed_probe(probe: ProbeModel, ranks: CalibrationRanks) -> tuple[_Running, float]:
    """A probe that is ready to be timed, and the seconds of a pass."""
    torch.manual_seed(0)
    model, inputs = probe.model().train(), probe.inputs()
    trace = record(model, inputs)
    stopwatch = _Stopwatch(trace, model, inputs, {}, ranks.device)
    stopwatch.ranks, stopwatch.timer = ranks, ranks.timer()
    stopwatch.run()
    ranks.together()
    start = time.monotonic()
    stopwatch.run()
    return _Running(probe, trace, stopwatch, [], []), time.monotonic() - start


def _operation_samples(item: _Running, ranks: CalibrationRanks, looking: tuple[float, float]) -> Iterable[Sample]:
    passes = _steady_operations(item.passes, [float(p.forward.sum() + p.backward.sum()) for p in item.passes])
    forward, backward = (
        ranks.mean(list(np.mean(part, axis=0))) for part in ([p.forward for p in passes], [p.backward for p in passes])
    )
    samples = [
        Sample(work, _less(forward[work.position], looking[0]), _less(backward[work.position], looking[1]))
        for work in work_of(item.trace)
    ]
    stretch = _stretch(item, samples, ranks)
    return [Sample(sample.work, stretch * sample.forward, stretch * sample.backward) for sample in samples]


def _stretch(item: _Running, samples: Sequence[Sample], ranks: CalibrationRanks) -> float:
    """How much longer a probe takes by itself than its nodes together; 1 where it was not measured or has been interrupted."""
    if not item.alone:
        return 1.0
    (alone,) = ranks.mean([steady([sum(both) for both in item.alone])])
    found = alone / sum(sample.forward + sample.backward for sample in samples)
    return found if 1 / _STEADY < found < _STEADY else 1.0


_Item = TypeVar("_Item")


def _steady_operations(items: Sequence[_Item], times: Sequence[float]) -> list[_Item]:
    """The items that nothing has interrupted: their times are near the least."""
    least = min(times)
    return [item for item, seconds in zip(items, times, strict=True) if seconds <= _STEADY * least]


def steady(times: Sequence[float]) -> float:
    """The median of those times that nothing has interrupted."""
    return statistics.median(_steady_operations(times, times))


def _less(seconds: float, overhead: float) -> float:
    """Without what measuring took."""
    return max(seconds - overhead, seconds / 10)


def _operation_overhead(ranks: CalibrationRanks) -> float:
    """Seconds that waiting for the device adds to each operation that is timed by itself."""
    tensor = torch.zeros(8, device=ranks.device)
    alone = repeated(lambda: tensor.add(1), ranks, waits=True)
    return max(0.0, alone - repeated(lambda: tensor.add(1), ranks))


def repeated(body: Callable[[], object], ranks: CalibrationRanks, *, waits: bool = False, least: float = 0.01) -> float:
    """Seconds of one call among many, one after another; `waits`: for the device after each."""
    count, best, timer = 1, math.inf, ranks.timer()
    while True:
        ranks.wait()
        start = timer()
        for _ in range(count):
            body()
            if waits:
                ranks.wait()
        ranks.wait()
        took = timer() - start
        if took >= least:
            break
        count *= 2
    for _ in range(5):
        start = timer()
        for _ in range(count):
            body()
            if waits:
                ranks.wait()
        ranks.wait()
        best = min(best, (timer() - start) / count)
    return best


@dataclass(frozen=True)
class Rates:
    """Work per second by name of the operation, as curves over its size: forward, backward. `is_product`: FLOPs, else bytes."""

    is_product: bool
    forward: Curve
    backward: Curve


def views(samples: Sequence[Sample]) -> dict[str, tuple[float, float]]:
    """Seconds of a forward and of a backward, by name, of all operations that move nothing: the means over all sizes."""
    found = {}
    for name in sorted({sample.work.name for sample in samples if not sample.work.size}):
        own = [sample for sample in samples if sample.work.name == name and not sample.work.size]
        backward = [sample.backward for sample in own if sample.work.backward]
        forward = statistics.mean(sample.forward for sample in own)
        found[name] = forward, statistics.mean(backward) if backward else forward
    return found


def rates(samples: Sequence[Sample]) -> dict[str, Rates]:
    """Of all operations that were timed and have something to do."""
    found = {}
    samples = [sample for sample in samples if sample.work.size]
    for name in sorted({sample.work.name for sample in samples}):
        own = [sample for sample in samples if sample.work.name == name]
        is_product = own[0].work.is_product
        own = [sample for sample in own if sample.work.is_product == is_product]
        forward = _measured_curve([(s.work.size, s.work.forward, s.forward) for s in own])
        backward = _measured_curve([(s.work.size, s.work.backward, s.backward) for s in own if s.work.backward])
        if forward:
            found[name] = Rates(is_product, forward, backward or forward)
    return found


def _measured_curve(points: Iterable[tuple[float, float, float]]) -> Curve:
    """(size, work, seconds) of calls, as work per second over sizes."""
    buckets: dict[int, list[tuple[float, float, float]]] = {}
    for point in points:
        if point[1] and point[2] > 0:
            buckets.setdefault(int(math.log(point[0], _BUCKET)), []).append(point)
    curve = []
    for bucket in sorted(buckets):
        sizes, works, seconds = zip(*buckets[bucket], strict=True)
        curve.append((math.exp(sum(map(math.log, sizes)) / len(sizes)), sum(works) / sum(seconds)))
    if curve and curve[0][0] > 1.0:  # what is smaller takes as long as the smallest
        curve.insert(0, (1.0, curve[0][1] / curve[0][0]))
    return tuple(curve)
