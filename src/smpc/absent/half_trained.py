"""A model that several ranks train in stages, and that is whole on each: what a rank does not train is out of date after a step.

    others = HalfTrained(model, rank=0)
    others.add(0, compilation)                  # once for each program
    others.check_program(0)                     # before each step
    others.note_training(0)                     # after each step that trains

Parameters of the stages that other ranks have in the program that trained, and buffers into which these write, become absent
(`smpc.absent.absent_tensors`): code that computes with them gets an error, and no values of before training. Another program that has them
on this rank is refused. They stay so when the runtime is gone, and until somebody writes all of a tensor anew, as `model.load_state_dict`
does.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from smpc.absent.absent_tensors import Absent, AbsentPlace, AbsentTexts, mark
from smpc.compile.result import Compilation
from smpc.errors import UsageError
from smpc.tracer.state.state_use import StateUse

_GATHER = (
    "for the whole model, gather the state_dict() of every rank's stages (runtime.stages), and call model.load_state_dict(all of it, "
    "strict=False) on every rank, which holds until the next step that trains"
)
_TEXTS = AbsentTexts(
    lack="its values of before training alone",
    advice=(
        "for outputs of the model call runtime.run(program, microbatches, on_output, training=False) on every rank; for what this rank "
        f"has, loop over the parameters of runtime.stages; {_GATHER}"
    ),
    gradients=(
        "For the norm of all, add up the squares of all ranks' torch.nn.utils.get_total_norm; for this rank's gradients, loop over the "
        "parameters of runtime.stages"
    ),
)


@dataclass(frozen=True)
class _Placement:
    """Where a program has the tensors that it trains: the names of this rank's, and of all others with the ranks that have them."""

    own: tuple[str, ...]
    others: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(cls, compilation: Compilation, rank: int) -> _Placement:
        """Parameters of stages, and buffers into which the model writes."""
        written = StateUse.of(compilation.trace).written
        holders: dict[str, set[int]] = {}
        for stage in compilation.plan.stages:
            for name in (*stage.parameters, *(name for name in stage.buffers if name in written)):
                holders.setdefault(name, set()).add(stage.rank)
        own = tuple(name for name, ranks in holders.items() if rank in ranks)
        return cls(own, {name: tuple(sorted(ranks)) for name, ranks in holders.items() if rank not in ranks})


class HalfTrained:
    """See above. `rank`: this process's, of the pipeline."""

    def __init__(self, model: nn.Module, rank: int) -> None:
        self._model, self._rank = model, rank
        self._placements: dict[int, _Placement] = {}  # by program
        self._moved: dict[int, tuple[str, ...]] = {}  # by program, what this rank has in it, but not in every other
        self._parameters: dict[str, nn.Parameter] = {}

    def check(self, compilation: Compilation) -> None:
        """Raise UsageError if a program would use, on this rank, what others have trained so far."""
        self._refuse_stale(_Placement.of(compilation, self._rank).own)

    def check_program(self, program: int) -> None:
        """`check` of one that was added."""
        if self._moved[program]:
            self._refuse_stale(self._moved[program])

    def add(self, program: int, compilation: Compilation) -> None:
        """A program may train the model. It takes the place of one with the same number."""
        self._placements[program] = _Placement.of(compilation, self._rank)
        self._parameters = dict(self._model.named_parameters())
        others = {name for each in self._placements.values() for name in each.others}
        self._moved = {
            number: tuple(name for name in each.own if name in others) for number, each in self._placements.items()
        }

    def note_training(self, program: int) -> None:
        """A step of this program has trained: what other ranks have in it is out of date."""
        for name, ranks in self._placements[program].others.items():
            tensor = self._tensor(name)
            if tensor is not None and not isinstance(tensor, Absent):
                place = AbsentPlace(name, tensor.shape, ranks, self._rank, type(tensor), _TEXTS, weakref.ref(tensor))
                mark(tensor, place)

    def refuse_state(self, asked: nn.Module | None) -> None:
        """Raise UsageError for the state of the model (None: one that is pickled) while a part of it is out of date."""
        stale = self._stale(name for each in self._placements.values() for name in each.others)
        if stale and asked in (None, self._model):
            raise UsageError(
                f"state_dict: expected a model that is whole on this rank, found pipeline rank {self._rank}, whose {len(stale)} tensors "
                f"of other ranks ({stale[0]}, ...) are as they were before training; {_GATHER}"
            )

    def _refuse_stale(self, own: Iterable[str]) -> None:
        stale = self._stale(own)
        if stale:
            raise UsageError(
                f"expected a program whose parameters are where those have them that have trained, found one with {len(stale)} that other "
                f"ranks have trained ({stale[0]}, ...) on pipeline rank {self._rank}, where they are as before training; {_GATHER}"
            )

    def _stale(self, names: Iterable[str]) -> list[str]:
        return [name for name in dict.fromkeys(names) if isinstance(self._tensor(name), Absent)]

    def _tensor(self, name: str) -> Tensor | None:
        """A parameter as it was when a program was added; a buffer as it is."""
        if name in self._parameters:
            return self._parameters[name]
        owner, _, key = name.rpartition(".")
        return self._model.get_submodule(owner)._buffers.get(key)
