"""Notes when the instructions of a rank run, for reports and traces. Nothing of it runs unless someone asks.

    recorder = Recorder(device)
    interpreter.record(recorder)        # between two steps; record(None) ends it
    recorder.begin()
    interpreter.run(inputs, on_output)
    for span in recorder.take(): print(span.instruction, span.end - span.start)

Terms
    clock   `time.monotonic_ns`, which the processes of one host share; nanoseconds
    span    an instruction with its start and end on that clock, in the order in which they ended

On a CPU a span is the time of the call. On a GPU it is the time between two events on the current stream, so a receive's span
includes the stream's wait for the message; `take` waits for the device. An instruction that is bound to several handlers (REDUCE)
has several spans. An instruction that fails has none.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from smpc.codegen.program import Instruction

_EVENT_NS = 1e6  # torch's events count milliseconds


@dataclass(frozen=True, slots=True)
class Span:
    """When an instruction ran, in nanoseconds of the clock."""

    instruction: Instruction
    start: int
    end: int


class Recorder:
    """The spans of one rank since `begin`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._noted: list[tuple[Instruction, int, int]] = []
        self._events: list[tuple[Instruction, torch.cuda.Event, torch.cuda.Event]] = []
        self._origin: tuple[torch.cuda.Event, int] | None = None

    def timed(self, instruction: Instruction, run: Callable[[], None]) -> Callable[[], None]:
        """`run`, noting when it runs."""
        return self._on_stream(instruction, run) if self._device.type == "cuda" else self._on_host(instruction, run)

    def begin(self) -> None:
        """Forget what was noted."""
        self._noted.clear()
        self._events.clear()
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            torch.cuda.synchronize(self._device)
            event.record()
            event.synchronize()
            self._origin = event, time.monotonic_ns()

    def take(self) -> tuple[Span, ...]:
        """The spans since `begin`."""
        if self._origin is not None:
            origin, clock = self._origin
            torch.cuda.synchronize(self._device)
            for instruction, first, last in self._events:
                start, end = (clock + int(origin.elapsed_time(event) * _EVENT_NS) for event in (first, last))
                self._noted.append((instruction, start, end))
        spans = tuple(Span(*noted) for noted in self._noted)
        self._noted.clear()
        self._events.clear()
        return spans

    def _on_host(self, instruction: Instruction, run: Callable[[], None]) -> Callable[[], None]:
        clock, note = time.monotonic_ns, self._noted.append

        def timed() -> None:
            start = clock()
            run()
            note((instruction, start, clock()))

        return timed

    def _on_stream(self, instruction: Instruction, run: Callable[[], None]) -> Callable[[], None]:
        note = self._events.append

        def timed() -> None:
            first = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            last = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            first.record()
            run()
            last.record()
            note((instruction, first, last))

        return timed
