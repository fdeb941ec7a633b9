"""Measures a rank's step for reports and traces: when its instructions run, and how much memory its tensors take.

Nothing of it runs unless someone asks. `SpanRecorder` notes when instructions run:

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

`LiveBytes` counts the bytes of the tensors that are alive while something runs on a CPU, where no allocator keeps count:

    with LiveBytes(held) as counter:        # `held`: tensors that are there already and count too
        step()
    counter.peak

A storage counts once, however many tensors share it, from the operation that makes it until it is freed. A storage that is written
before any operation made it existed already, such as the buckets in which DistributedDataParallel sums gradients: it counts from the
start. FSDP fills and empties the storages of whole parameters by `UntypedStorage.resize_`, which is no operation: while `LiveBytes` is
entered that method tells it, and they count with their present size. gloo's threads hold what a collective took for a moment after it has
ended, longer on a busy host: before a new peak counts, they get time to let go of it.

Memory that operations use inside (workspaces of libraries) is not seen, and memory that torch did not allocate counts only where it is in
`held`: what the ranks of one host share for small messages is the same few MiB for any model, and no rank's own
(`smpc.executor.host_memory.shared_slots`). Every operation becomes several times slower: measure memory in one step and times in others.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeGuard

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from smpc.codegen.program import Instruction
from smpc.sharding.dtensors import local

_EVENT_NS = 1e6  # torch's events count milliseconds
_LET_GO_S = 0.02  # the most that a thread of gloo gets; it needs microseconds where a core is free


@dataclass(frozen=True, slots=True)
class Span:
    """When an instruction ran, in nanoseconds of the clock."""

    instruction: Instruction
    start: int
    end: int


class SpanRecorder:
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


class LiveBytes(TorchDispatchMode):
    """`live` bytes now, and the most that there were."""

    def __init__(self, held: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self._known: dict[int, int] = {}
        self._changing: list[weakref.ref[torch.UntypedStorage]] = []  # get other sizes, perhaps while it is not entered
        self._resizes: list[Callable[..., Any]] = []  # the methods that it has replaced
        self._communicated: set[int] = set()  # keys of what collectives took since threads last got time
        self._note_held(held)

    def go_on(self, held: Iterable[Tensor]) -> None:
        """Before it is entered once more: what it has seen is known, what is gone since is not there, and `held` counts too."""
        self._note_held(held)
        for storage in [storage for ref in self._changing if (storage := ref()) is not None]:
            self._note(storage)
        self.peak = self.live

    def __enter__(self) -> Self:
        super().__enter__()  # type: ignore[no-untyped-call]
        resize, note = torch.UntypedStorage.resize_, self._note

        def resized(storage: torch.UntypedStorage, num_bytes: int) -> Any:
            is_counted = storage.device.type == "cpu"
            if is_counted:
                note(storage, was_there=True)
            found = resize(storage, num_bytes)
            if is_counted:
                note(storage)
            return found

        torch.UntypedStorage.resize_ = resized  # type: ignore[assignment,method-assign]
        self._resizes.append(resize)
        return self

    def __exit__(self, *failure: Any) -> None:
        torch.UntypedStorage.resize_ = self._resizes.pop()  # type: ignore[method-assign]
        super().__exit__(*failure)  # type: ignore[no-untyped-call]

    def _note_held(self, held: Iterable[Tensor]) -> None:
        for tensor in map(local, held):
            if tensor.layout is torch.strided:
                self._note(tensor.untyped_storage())

    def _note(self, storage: torch.UntypedStorage, *, was_there: bool = False) -> None:
        key, num_bytes = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known[key] = 0
            weakref.finalize(storage, self._drop, key)
            if was_there:
                self.peak += num_bytes
                self._changing.append(weakref.ref(storage))
        self.live += num_bytes - self._known[key]
        self._known[key] = num_bytes
        if self.live > self.peak and self._communicated:
            self._let_threads_go()
        self.peak = max(self.peak, self.live)

    def _let_threads_go(self) -> None:
        until = time.monotonic() + _LET_GO_S
        while not self._communicated.isdisjoint(self._known) and time.monotonic() < until:
            time.sleep(_LET_GO_S / 100)
        self._communicated.clear()

    def _drop(self, key: int) -> None:
        num_bytes = self._known.pop(key)
        self.live -= num_bytes  # without a call between reading and writing: other threads drop storages too

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it becomes operations on its part, which come here
        if func._schema.is_mutable:  # type: ignore[attr-defined]
            for leaf in tree_leaves((args, kwargs)):
                if _is_counted(leaf):
                    self._note(leaf.untyped_storage(), was_there=True)
        out = func(*args, **(kwargs or {}))
        if str(func).startswith("c10d."):
            taken = (leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if _is_counted(leaf))
            self._communicated.update(key for key in taken if key in self._known)
        for leaf in tree_leaves(out):
            if _is_counted(leaf):
                self._note(leaf.untyped_storage())
        return out


def _is_counted(leaf: object) -> TypeGuard[Tensor]:
    """Whether it is a tensor on the CPU whose memory torch allocated. The parts of sparse ones have been made by themselves."""
    if not (isinstance(leaf, Tensor) and leaf.device.type == "cpu" and leaf.layout is torch.strided):
        return False
    return leaf.untyped_storage().resizable()
