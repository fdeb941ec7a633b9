"""What the model's Python asks about values while it is recorded, and the guards that say on what the answers rest.

An answer comes from the sample inputs (see `smpc.tracer.guards`) or, where there are none, from the guards of an earlier trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from smpc.tracer.effects import tensors_in
from smpc.tracer.fakes import FakeState
from smpc.tracer.guards import NoAnswerError, answer, is_fixed, shapes
from smpc.tracer.ir import Guard, Node
from smpc.tracer.literals import references
from smpc.tracer.places import current_line

Answers = Sequence[tuple[Any, tuple[str, ...]]]  # of each guard: what was expected, dtypes


class Questions:
    """The questions of one recording; `samples` are the real inputs, by placeholder."""

    def __init__(self, state: FakeState, device: torch.device, answers: Answers | None) -> None:
        self._state, self._device, self._answers = state, device, answers
        self.samples: dict[str, torch.Tensor] = {}
        self.guards: list[Guard] = []

    def ask(
        self,
        nodes: Sequence[Node],
        target: str,
        args: tuple[Any, ...],
        kwargs: tuple[tuple[str, Any], ...],
        requires_grad: bool,
    ) -> Any:
        """What a call gives: a number or fakes, which require grad if asked to. Raises NoAnswerError."""
        fixed = is_fixed(nodes, references((args, dict(kwargs))))
        if self._answers is not None and not fixed:
            if len(self.guards) == len(self._answers):
                raise NoAnswerError("it was not asked when the answers were given")
            expected, dtypes = self._answers[len(self.guards)]
        else:
            with unset_fake_temporarily():
                found = answer(nodes, target, args, dict(kwargs), self.samples, self._read_buffer)
            tensors = list(tensors_in(found))
            expected = shapes(found) if tensors else found
            dtypes = tuple(str(tensor.dtype).removeprefix("torch.") for tensor in tensors)
        if not fixed:
            self.guards.append(Guard(target, args, kwargs, expected, dtypes, current_line()))
        if not dtypes:
            return expected
        fakes = [
            torch.empty(shape, dtype=getattr(torch, dtype), device=self._device)
            for shape, dtype in zip(expected, dtypes, strict=True)
        ]
        fakes = [
            fake.requires_grad_().clone() if requires_grad and fake.is_floating_point() else fake for fake in fakes
        ]
        return fakes[0] if len(fakes) == 1 else tuple(fakes)

    def _read_buffer(self, fqn: str) -> torch.Tensor:
        """The real buffer or tensor attribute of that name."""
        tensor = self._state.real_buffers.get(fqn)
        if tensor is None:
            raise NoAnswerError(f"it depends on parameter {fqn}")
        if tensor.device.type == "meta":
            raise NoAnswerError(f"buffer {fqn} has no values here, only a shape")
        return tensor
