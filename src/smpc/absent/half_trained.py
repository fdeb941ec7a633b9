"""A model that several ranks train in stages, and that is whole on each: what a rank does not train is out of date after a step.

    others = HalfTrained(model, rank=0)
    others.add(compilation)                     # once for each program
    others.note_training()                      # after each step that trains

Parameters of other ranks' stages, and buffers into which these write, become absent (`smpc.absent.tensors`): code that computes with them
gets an error, and no values of before training. They stay so when the runtime is gone, and until somebody writes all of a tensor anew, as
`model.load_state_dict` does.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator

from torch import Tensor, nn

from smpc.absent.tensors import Absent, AbsentPlace, AbsentTexts, mark
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


class HalfTrained:
    """See above. `rank`: this process's, of the pipeline."""

    def __init__(self, model: nn.Module, rank: int) -> None:
        self._model, self._rank = model, rank
        self._holders: dict[str, set[int]] = {}
        self._parameters: list[tuple[str, nn.Parameter]] = []  # of others
        self._buffers: list[str] = []

    def check(self, compilation: Compilation) -> None:
        """Raise UsageError if a program would train, on this rank, what others have trained so far."""
        named = dict(self._model.named_parameters())
        own = [name for stage in compilation.plan.stages if stage.rank == self._rank for name in stage.parameters]
        stale = [name for name in own if isinstance(named.get(name), Absent)]
        if stale:
            raise UsageError(
                f"expected a program whose parameters stay where the first one has them, found one that has {len(stale)} trained by other "
                f"ranks ({stale[0]}, ...) on pipeline rank {self._rank}, where they are as before training; {_GATHER}"
            )

    def add(self, compilation: Compilation) -> None:
        """A program trains the model."""
        written = StateUse.of(compilation.trace).written
        named = dict(self._model.named_parameters())
        for stage in compilation.plan.stages:
            for name in (*stage.parameters, *(name for name in stage.buffers if name in written)):
                self._holders.setdefault(name, set()).add(stage.rank)
        others = [name for name, ranks in self._holders.items() if self._rank not in ranks]
        self._parameters = [(name, named[name]) for name in others if name in named]
        self._buffers = [name for name in others if name not in named]

    def note_training(self) -> None:
        """A step has trained: what other ranks hold is out of date."""
        for name, tensor in self._of_others():
            if not isinstance(tensor, Absent):
                place = AbsentPlace(
                    name,
                    tensor.shape,
                    tuple(sorted(self._holders[name])),
                    self._rank,
                    type(tensor),
                    _TEXTS,
                    weakref.ref(tensor),
                )
                mark(tensor, place)

    def refuse_state(self, asked: nn.Module | None) -> None:
        """Raise UsageError for the state of the model (None: one that is pickled) while a part of it is out of date."""
        stale = [name for name, tensor in self._of_others() if isinstance(tensor, Absent)]
        if stale and asked in (None, self._model):
            raise UsageError(
                f"state_dict: expected a model that is whole on this rank, found pipeline rank {self._rank}, whose {len(stale)} tensors "
                f"of other ranks ({stale[0]}, ...) are as they were before training; {_GATHER}"
            )

    def _of_others(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._parameters
        for name in self._buffers:
            owner, _, key = name.rpartition(".")
            tensor = self._model.get_submodule(owner)._buffers.get(key)
            if tensor is not None:
                yield name, tensor
