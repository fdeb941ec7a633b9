"""The compiled programs of one replica, by number: no more than `program_cache_size` of them.

A model that meets ever new shapes would compile ever new programs. Beyond the bound a new one takes the number of the one that has not run
for the longest time; that is compiled again if its inputs come back. The first one, number 0, stays: its stages are those that replicas
average the gradients of.

All ranks of a replica run the same programs in the same order, so they replace the same ones without a word.

    bound 3, steps with signatures a b c b d     numbers 0 1 2 1 2: d replaces c

On pipeline rank 0 a signature is not whole until it is known what the model's Python asks of the inputs' values: `lookup` finds a program
whose recording has asked the same, and got the same answers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from smpc.sample_inputs import Inputs
from smpc.tracer.guards import broken_guard
from smpc.tracer.ir import Guard, Trace
from smpc.tracer.record import Recording
from smpc.tracer.replay import input_values
from smpc.v1.steps.programs.signature import Signature


class ProgramTable:
    """Signatures and recordings by program number. `bound`: how many, 2 at least."""

    def __init__(self, bound: int) -> None:
        assert bound >= 2, "the first program and the one that runs"
        self._bound = bound
        self._entries: list[tuple[Signature, Recording]] = []
        self._last_use: list[int] = []
        self._num_uses = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[tuple[Signature, Recording]]:
        return iter(self._entries)

    def lookup(self, signature: Signature, inputs: Sequence[Inputs], model: nn.Module) -> int | None:
        """The number of a program for these inputs: its guards hold on all microbatches, in the environment of now."""
        for number, (known, recording) in enumerate(self._entries):
            if dataclasses.replace(known, answers=signature.answers, environment=signature.environment) != signature:
                continue
            if recording.environment.difference() is not None:
                continue
            trace = recording.trace
            if not trace.guards or all(broken(trace, model, microbatch) is None for microbatch in inputs):
                return number
        return None

    def recording(self, number: int) -> Recording:
        """What a program was compiled from."""
        return self._entries[number][1]

    def signature(self, number: int) -> Signature:
        """What a program was compiled for."""
        return self._entries[number][0]

    def use(self, number: int) -> None:
        """Note that a program runs now."""
        self._num_uses += 1
        self._last_use[number] = self._num_uses

    def next_number(self) -> int:
        """The number that the next new program gets: a free one, or that of the program which gives way."""
        if len(self._entries) < self._bound:
            return len(self._entries)
        return min(range(1, self._bound), key=self._last_use.__getitem__)

    def put(self, number: int, signature: Signature, recording: Recording) -> None:
        """Enter a program under its `next_number`."""
        if number == len(self._entries):
            self._entries.append((signature, recording))
            self._last_use.append(0)
        else:
            self._entries[number] = signature, recording
        self.use(number)


def broken(trace: Trace, model: nn.Module, inputs: Inputs) -> tuple[Guard, Any] | None:
    """A guard that does not hold on the inputs of one microbatch."""
    return broken_guard(trace, model, input_values(trace, *inputs)) if trace.guards else None
