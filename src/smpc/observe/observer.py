"""Watches the steps of one rank: tells callbacks about each, and keeps what reports and traces are made of.

    observer = Observer(device, rank=0)
    observer.register(lambda info: print(info.step, info.seconds))
    with observer.step() as watch:              # what a runtime does for every step, where somebody watches
        interpreter.record(watch.recorder)
        interpreter.run(...)

Terms
    window      the steps whose spans are kept, counted from 0 over all steps of this process: training and evaluation
    span        when an instruction ran: see `smpc.executor.measure.spans`
    busy        the time in F, B and W; the rest of a step is waiting, messages and bookkeeping

Without a callback or a window nothing is measured. Memory: on a GPU the allocator's peak; on a CPU the bytes of live tensors,
counted in the step before the window, which is slower for it and not timed. Nothing here communicates, so ranks may have
different callbacks.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from smpc.codegen.program import Instruction, Op
from smpc.errors import ConfigError
from smpc.executor.measure.spans import LiveBytes, Span, SpanRecorder
from smpc.observe.window import Window

BUSY = (Op.FORWARD, Op.BACKWARD, Op.WEIGHT)


@dataclass(frozen=True, slots=True)
class StepInfo:
    """The information of a callback after a step. None: not known on this rank.

    `step` counts from 0; `training`: whether it trained; `rank`: the global one. `seconds` is the step alone, `seconds_between` from
    the end of the step before: with the optimizer and the data loading, if that was measured. `samples`, `tokens` and throughputs count
    all replicas, the latter over `seconds_between`; `flops` is the average of the ranks. `bubble` is this rank's share of the step
    without a forward or a backward, `loss` the mean over this replica's microbatches, `peak_bytes` the most bytes allocated on this
    rank's GPU so far.
    """

    step: int  # from 0, over all steps of this process
    training: bool
    seconds: float
    seconds_between: float
    samples: int | None = None  # of the whole step, all replicas
    tokens: int | None = None  # elements of the model's first integer input of two dimensions or more
    bubble: float | None = None  # share of the step in which this rank neither runs a forward nor a backward
    loss: float | None = None  # mean over the microbatches, of this replica
    peak_bytes: int | None = None  # most that was allocated on this rank's GPU so far
    rank: int = 0
    flops: float | None = (
        None  # of forwards, in training backwards, of the whole step, nothing twice, on the average of the ranks
    )

    @property
    def flops_per_second(self) -> float | None:
        """Floating point operations per second of each device; divided by its peak, the MFU."""
        return None if self.flops is None else self.flops / self.seconds_between

    @property
    def samples_per_second(self) -> float | None:
        """Throughput in samples."""
        return None if self.samples is None else self.samples / self.seconds_between

    @property
    def tokens_per_second(self) -> float | None:
        """Throughput in tokens."""
        return None if self.tokens is None else self.tokens / self.seconds_between


StepCallback = Callable[[StepInfo], object]


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step of one rank. Nanoseconds of `time.monotonic_ns` there."""

    step: int
    training: bool
    program: int  # of the runtime; reports are about the first one, 0
    start: int
    end: int
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class RankRecord:
    """The records of one rank. Add `offset` to its times to get times of rank 0's clock."""

    rank: int  # of all processes
    pipeline_rank: int
    replica: int
    num_steps: int  # that it has run, recorded or not
    steps: tuple[StepRecord, ...]
    peak_bytes: int | None = None
    offset: int = 0

    def to_json(self) -> str:
        """One line of JSON; an instruction is its text."""
        steps = [
            [s.step, s.training, s.program, s.start, s.end, [[str(i.instruction), i.start, i.end] for i in s.spans]]
            for s in self.steps
        ]
        numbers = [self.rank, self.pipeline_rank, self.replica, self.num_steps, self.peak_bytes, self.offset]
        return json.dumps({"numbers": numbers, "steps": steps}, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> RankRecord:
        """The inverse of `to_json`."""
        data: dict[str, Any] = json.loads(text)
        rank, pipeline_rank, replica, num_steps, peak_bytes, offset = data["numbers"]
        steps = tuple(
            StepRecord(
                step,
                training,
                program,
                start,
                end,
                tuple(Span(Instruction.parse(i), first, last) for i, first, last in spans),
            )
            for step, training, program, start, end, spans in data["steps"]
        )
        return cls(rank, pipeline_rank, replica, num_steps, steps, peak_bytes, offset)


@dataclass(slots=True)
class StepWatch:
    """A running step: its runner notes measurements here."""

    recorder: SpanRecorder | None = None
    is_wanted: bool = False  # whether anyone asks for what follows
    training: bool = False
    program: int = 0
    samples: int | None = None
    tokens: int | None = None
    flops: float | None = None
    loss: float | None = None  # or, while it is being computed,
    losses: list[Tensor] = field(default_factory=list)  # its parts
    spans: tuple[Span, ...] = ()


def batch_of(specs: Iterable[tuple[Sequence[int], bool]], num_microbatches: int) -> tuple[int | None, int | None]:
    """Samples and tokens of a step, from the (shape, is it of integers) of the inputs of one microbatch: the first axis of the first one
    that has one, and the elements of the first one of integers with two dimensions or more.
    """
    found = [(shape, is_integer) for shape, is_integer in specs if shape]
    samples = next((shape[0] * num_microbatches for shape, _ in found), None)
    tokens = next((math.prod(s) * num_microbatches for s, is_integer in found if is_integer and len(s) > 1), None)
    return samples, tokens


class Observer:
    """Watches one rank. `held` gives tensors that count as this rank's memory when that is counted on a CPU: optimizer state, say.

    `replicas` multiplies the samples and tokens of a step. `on_window_end` is called after the last step of the window.
    """

    def __init__(
        self,
        device: torch.device,
        rank: int = 0,
        *,
        pipeline_rank: int = 0,
        replica: int = 0,
        replicas: int = 1,
        offset: int = 0,
        window: Window | None = None,
        held: Callable[[], Iterable[Tensor]] = tuple,
    ) -> None:
        self._device, self._rank, self._replicas = device, rank, replicas
        self._record = RankRecord(rank, pipeline_rank, replica, 0, (), offset=offset)
        self._window = window
        self.on_window_end: Callable[[], object] = lambda: None
        self.holders = [held]  # a runtime adds its own
        self._callbacks: OrderedDict[int, StepCallback] = OrderedDict()
        self._recorder = SpanRecorder(device)
        self._watch: StepWatch | None = None
        self._num_steps = 0
        self._last_end: int | None = None
        self._steps: list[StepRecord] = []
        self._peak_bytes: int | None = None
        self._counts = False  # memory, in this step
        self._counter: LiveBytes | None = None  # of that step, for the optimizer's, which knows of no buckets by itself

    @property
    def record(self) -> RankRecord:
        """The records so far."""
        return replace(self._record, num_steps=self._num_steps, steps=tuple(self._steps), peak_bytes=self._peak_bytes)

    def register(self, callback: StepCallback) -> RemovableHandle:
        """Call `callback(info)` after every step."""
        handle = RemovableHandle(self._callbacks)
        self._callbacks[handle.id] = callback
        return handle

    def observe(self, num_steps: int) -> None:
        """Keep the spans of the next `num_steps` steps after the one that comes now, in which memory is measured.

        The first step of all is passed over: the optimizer has no state in it yet.
        """
        if num_steps < 1:
            raise ConfigError(f"observe: expected at least 1 step, found {num_steps}")
        self._steps.clear()
        self._peak_bytes = None
        first = max(self._num_steps + 1, 2)
        self._window = Window(first, first + num_steps)

    @contextlib.contextmanager
    def step(self, inputs: Callable[[], Iterable[Tensor]] = tuple) -> Iterator[StepWatch]:
        """Watch a step. Inside another one it is the same step: who is outermost says when it begins and ends.

        `inputs` gives tensors that the caller holds, and that count as memory of the step. A step that nobody observes is counted alone.
        """
        if self._watch is not None:
            yield self._watch
            return
        window = self._window
        keeps = window is not None and self._num_steps in window
        counts = window is not None and self._num_steps == window.memory_step
        if not (self._callbacks or keeps or counts):
            self._watch = StepWatch()
            self._counts, self._last_end = False, None
            try:
                yield self._watch
            finally:
                self._watch = None
                self._num_steps += 1
            return
        self._counts, keeps = counts, keeps and not counts
        watch = self._watch = StepWatch(self._recorder if keeps or self._callbacks else None, is_wanted=True)
        start = time.monotonic_ns()
        try:
            with self._memory(counts, inputs):
                yield watch
        finally:
            self._watch = None
            self._num_steps += 1
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        end = time.monotonic_ns()
        self._finish(watch, start, end, keeps=keeps)

    def _finish(self, watch: StepWatch, start: int, end: int, *, keeps: bool) -> None:
        step = self._num_steps - 1
        if keeps:
            self._steps.append(StepRecord(step, watch.training, watch.program, start, end, watch.spans))
            if self._device.type == "cuda":
                self._peak_bytes = torch.cuda.max_memory_allocated(self._device)
        info = self._info(watch, step, start, end) if self._callbacks else None
        self._last_end = end
        if info is not None:
            for callback in list(self._callbacks.values()):
                callback(info)
        if self._window is not None and self._num_steps == self._window.last:
            self.on_window_end()

    def _info(self, watch: StepWatch, step: int, start: int, end: int) -> StepInfo:
        seconds = (end - start) / 1e9
        busy = sum(span.end - span.start for span in watch.spans if span.instruction.op in BUSY) / 1e9
        is_cuda = self._device.type == "cuda"
        return StepInfo(
            step,
            watch.training,
            seconds,
            seconds if self._last_end is None else (end - self._last_end) / 1e9,
            None if watch.samples is None else watch.samples * self._replicas,
            None if watch.tokens is None else watch.tokens * self._replicas,
            max(0.0, 1 - busy / seconds) if watch.spans else None,
            sum(float(part) for part in watch.losses) if watch.losses else watch.loss,
            torch.cuda.max_memory_allocated(self._device) if is_cuda else None,
            self._rank,
            watch.flops,
        )

    def optimizer_step(self) -> contextlib.AbstractContextManager[None]:
        """Around the optimizer's step, whose memory counts for the step before it."""
        if not self._counts or self._watch is not None or self._device.type != "cpu":
            return contextlib.nullcontext()
        return self._memory(True, tuple, self._counter)

    @contextlib.contextmanager
    def _memory(
        self, counts: bool, inputs: Callable[[], Iterable[Tensor]], counter: LiveBytes | None = None
    ) -> Iterator[None]:
        if counts and self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        if not counts or self._device.type != "cpu":
            yield
            return
        held = [*(tensor for holder in self.holders for tensor in holder()), *inputs()]
        if counter is None:
            self._counter = counter = LiveBytes(held)
        else:
            counter.go_on(held)
        del held
        with counter:
            yield
        self._peak_bytes = max(self._peak_bytes or 0, counter.peak)
