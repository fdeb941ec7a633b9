"""`model.join()`: replicas that run out of data take part in the collectives of those that have not.

    with model.join():
        for ids in own_batches:                       # not as many on all replicas
            train_step(model, ids)
            optimizer.step()

Terms
    over        a replica that has left its loop
    phase       what a rank is about to do: begin a step, end it, ... ; before anything that replicas do together, the ranks that hold the
                same stage exchange phases
    source      the last one of the replicas that are not over: its buffers count
    alike       ranks that are given the same batches, or compute together: the ranks of a tensor- or context-parallel group. They are over
                at the same step
    shadowing   what a rank does whose replica is over: it does the others' part of each phase, with gradients of zero, until all are over

    phase          ranks that train                     ranks that are over
    --------------------------------------------------------------------------------------------------------------
    PARTITION      record, cut and compile              compile the same program, for inputs that they never saw
    STEP           buffers; with a pipeline, gradients  the same
    TRAINED        gradients, unless a pipeline had     the same, the verdict on losses
                   them reduced; the verdict
    UNTRAINED      nothing: the step did no backward    nothing
    LEFT           raise NonFiniteLossError out of join raise it too
    BATCH          compare batches in a context-        nothing
                   parallel group

In the end all have the parameters, buffers and optimizer state of the last replica that was over. As in DistributedDataParallel.join,
gradients are divided by the number of all replicas, or of those that are not over; gradients that a replica has accumulated but not
averaged when it is over (`backward_passes_per_step`) are lost.

That is `JoinOfWholes` (`join_of_wholes`). Where replicas hold parts of parameters (`join_of_parts`), or divide experts (`join_of_experts`),
ranks that are over do more; `script_actions` has what these two share.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from smpc.errors import NonFiniteLossError, SmpcError, StepError, UsageError
from smpc.mesh import Axis, Mesh
from smpc.v1.steps.arguments import StepBody
from smpc.v1.steps.context import StepContext
from smpc.v1.steps.results import describe_verdict


class JoinPhase(IntEnum):
    """A rank's next phase."""

    OVER = 0
    ENTER = 1  # and the numbers above it, one for every choice of options
    PARTITION = 20
    STEP = 21
    TRAINED = 22
    UNTRAINED = 23
    LEFT = 24
    EVALUATION = 25
    ACT = 26
    MEETING = 27
    BATCH = 28


class SharedOptimizer(Protocol):
    """The state of a DistributedOptimizer that replicas share."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """As in torch."""

    @property
    def state(self) -> defaultdict[Tensor, Any]:
        """As in torch."""

    def replicate(self, group: dist.ProcessGroup, source: int) -> None:
        """Take masters and loss scale from the group's rank `source`."""


@dataclass(frozen=True, slots=True)
class JoinOptions:
    """The arguments of `DistributedModel.join`, which must be the same on all ranks."""

    divide_by_initial_world_size: bool
    throw_on_early_termination: bool


class EarlyTerminationError(StepError):
    """All ranks raise it together, with nothing under way."""


class Join(ABC):
    """One rank's part in one `with model.join()`.

    `partition` takes part in the first program of all; None without a pipeline. Methods are collective over the ranks that hold the same
    stage; methods called by steps raise the error that these ranks have agreed on.
    """

    repeats_acts = False  # of the script: ranks that are over do
    divisor = 1.0  # another one of this rank's gradients, beside `StepContext`'s

    def __init__(
        self,
        context: StepContext,
        partition: Callable[[], None] | None,
        options: JoinOptions,
    ) -> None:
        self._context, self._session = context, context.session
        self._partition, self._has_pipeline = partition, partition is not None
        session = self._session
        self._divides_by_all, self._throws = options.divide_by_initial_world_size, options.throw_on_early_termination
        members = session.mesh.group(Axis.DP, session.rank)
        self._position = members.index(session.rank)
        self._replica_of = [session.mesh.rdp_rank(member) for member in members]
        self._alike = _numbers_of_alike(session.mesh, members)
        self._has_shadowed = False
        self._error: SmpcError | None = None  # the error that all ranks raise, with no transfer in progress
        self._verdict = 0
        self._then: Callable[[], None] | None = None  # what a phase leaves to do, with no transfer in progress

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """Around the steps of the script. When this rank's body is over, take part in the others' steps until all are over."""
        context = self._context
        self._guarded(self._enter)
        context.join = self
        try:
            yield
            while self._guarded(self._shadow):
                if self._then is not None:
                    then, self._then = self._then, None
                    then()
            self._guarded(lambda: self._finish(context.script.optimizer))
        except NonFiniteLossError:
            if not self._has_shadowed:
                self._guarded(self._leave)
            raise
        except EarlyTerminationError:
            raise
        except Exception as error:
            context.supervision.report(error, "join")  # the other replicas would wait for this one
            raise
        finally:
            context.join = None

    @property
    def is_followed(self) -> bool:
        """Whether ranks that are over follow the gathers of this step."""
        return False

    def calling(
        self, body: StepBody, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> contextlib.AbstractContextManager[None]:
        """Around a step function, which ranks that are over may have to run as well."""
        return contextlib.nullcontext()

    def begin_partition(self) -> None:
        """Before the first program of all is made."""
        self._guarded(lambda: self._announce(JoinPhase.PARTITION))

    def begin_batch(self) -> None:
        """Before ranks that are alike compare their batches. StepError if one of them is over, or PeerError that reports another's."""
        self._guarded(lambda: self._announce(JoinPhase.BATCH))

    @abstractmethod
    def begin_step(self, *, trains: bool) -> None:
        """Before a step. `trains`: buffers or gradients may be exchanged in it."""

    @abstractmethod
    def note(self) -> None:
        """After a step."""

    def act(self, name: str, *arguments: Any) -> contextlib.AbstractContextManager[None]:
        """Around an act of the script between steps, which ranks that are over repeat, if they need to."""
        return contextlib.nullcontext()

    def clipping(self, parameters: Sequence[Tensor], *how: Any) -> contextlib.AbstractContextManager[None]:
        """The same around `clip_grad_norm_` of parameters; `how`: its other arguments."""
        return contextlib.nullcontext()

    def meet_all(self, what: str) -> None:
        """Before something that needs all ranks of the job. UsageError on all of them if some are over."""

        def meet() -> None:
            if JoinPhase.OVER in self._announce(JoinPhase.MEETING) and self._error is None:
                self._error = UsageError(
                    f"join: expected all ranks in {what}, found some that ran out of data; call it after join, or while all have some"
                )

        self._guarded(meet)

    def end_step(self, *, did_backward: bool) -> None:
        """Before gradients are averaged, where a pipeline has not done so, and the verdict on losses is agreed on."""
        self._announce(JoinPhase.TRAINED if did_backward else JoinPhase.UNTRAINED)

    def _guarded(self, act: Callable[[], object]) -> object:
        """Do something that waits for the other replicas; raise the `error` that it leaves."""
        supervision = self._context.supervision
        with supervision.wait("join, waiting for the other replicas", supervision.step_timeout), supervision.guard():
            result = act()
        if self._error is not None:
            raise self._error
        return result

    # -- ranks that train ----------------------------------------------------------------------------------------------

    def _enter(self) -> None:
        """First of all. May leave an `error`."""
        phases = self._exchange(JoinPhase.ENTER + int(self._divides_by_all) + 2 * int(self._throws))
        self._error = self._contradiction(phases, ())

    def _leave(self) -> None:
        """Before NonFiniteLossError, which all ranks that train have raised, ends the loop."""
        self._announce(JoinPhase.LEFT)

    # -- ranks that are over -------------------------------------------------------------------------------------------

    def _shadow(self) -> bool:
        """One phase of the others; False once all are over, or leave with an `error`."""
        phases = self._announce(JoinPhase.OVER)
        active = [phase for phase in phases if phase != JoinPhase.OVER]
        if not active:
            return False
        self._has_shadowed = True
        if active[0] == JoinPhase.LEFT:
            self._error = self._not_finite()
        if active[0] == JoinPhase.MEETING and self._error is None:
            self._error = UsageError(
                "join: expected the others to need no other ranks when this one ran out of data, found that they save, or gather state; do "
                "that after join, or while all have data"
            )
        if self._error is None and active[0] != JoinPhase.BATCH:
            self._take_part(active[0], phases)
        return self._error is None

    def _not_finite(self) -> NonFiniteLossError:
        """The error with which the others have left."""
        return NonFiniteLossError(describe_verdict(self._verdict, "of another replica", self._session))

    @abstractmethod
    def _take_part(self, phase: int, phases: list[int]) -> None:
        """A phase of the others."""

    def _partition_too(self) -> None:
        assert self._partition is not None, "there is a pipeline"
        self._partition()

    @abstractmethod
    def _finish(self, optimizer: SharedOptimizer | None) -> None:
        """Once all are over. May leave an `error`."""

    # ------------------------------------------------------------------------------------------------------------------

    def _last_of(self, is_chosen: Sequence[int]) -> int:
        """The highest of the replicas whose ranks have a number other than 0."""
        return max(replica for replica, chosen in zip(self._replica_of, is_chosen, strict=True) if chosen)

    def _announce(self, phase: JoinPhase) -> list[int]:
        phases = self._exchange(phase)
        over = sorted({r for r, other in zip(self._alike, phases, strict=True) if other == JoinPhase.OVER})
        wrong = self._contradiction(phases, over)
        if wrong is not None:
            raise wrong
        if over and self._throws and any(phases):
            self._error = EarlyTerminationError(
                f"join: replica{'s' if len(over) > 1 else ''} {', '.join(map(str, over))} ran out of data, the others have some left, "
                "and throw_on_early_termination is set; give every replica as many batches, or leave it out"
            )
        return phases

    def _contradiction(self, phases: list[int], over: Iterable[int]) -> StepError | None:
        """The error, the same on all ranks, for ranks in different phases."""
        parted = [r for r, phase in zip(self._alike, phases, strict=True) if r in over and phase != JoinPhase.OVER]
        if parted:
            return StepError(
                f"join: of the tensor- and context-parallel ranks of replica {parted[0]} some ran out of data and some have not; they "
                "compute together, so give them as many batches"
            )
        active = {phase for phase in phases if phase != JoinPhase.OVER}
        if len(active) > 1:
            kinds = [f"replica {r}: {_phase_as_text(phase)}" for r, phase in zip(self._alike, phases, strict=True)]
            return StepError(
                f"join: the replicas do different things, {', '.join(kinds)}; give join the same arguments on all ranks, and run the same "
                "step functions in the same order, as far as each replica's data go"
            )
        return None

    def _exchange(self, own: int) -> list[int]:
        """Every rank's number, in the order of the data-parallel group."""
        numbers = torch.zeros(len(self._replica_of), dtype=torch.int64, device=self._session.message_device)
        numbers[self._position] = own
        dist.all_reduce(numbers, group=self._session.groups[Axis.DP])
        return [int(number) for number in numbers.tolist()]


def _numbers_of_alike(mesh: Mesh, members: Sequence[int]) -> list[int]:
    """For each rank, the number of those that it is alike with."""
    if mesh.cp_size == 1:
        return [mesh.rdp_rank(member) for member in members]
    first = {rank: group[0] for group in mesh.groups(Axis.CP) for rank in group}
    numbers = {rank: number for number, rank in enumerate(sorted({mesh.rdp_rank(first[m]) for m in members}))}
    return [numbers[mesh.rdp_rank(first[member])] for member in members]


def _phase_as_text(phase: int) -> str:
    """A phase of a rank, for people."""
    names: dict[int, str] = {
        JoinPhase.OVER: "ran out of data",
        JoinPhase.PARTITION: "begins its first step",
        JoinPhase.STEP: "begins a step",
        JoinPhase.TRAINED: "ends a step with a backward pass",
        JoinPhase.UNTRAINED: "ends a step without a backward pass",
        JoinPhase.LEFT: "left with an error",
        JoinPhase.EVALUATION: "begins a step without gradients",
        JoinPhase.ACT: "updates, clips or clears gradients",
        JoinPhase.MEETING: "saves, or gathers state",
        JoinPhase.BATCH: "has a batch",
    }
    options = phase - JoinPhase.ENTER
    entered = f"join(divide_by_initial_world_size={bool(options & 1)}, throw_on_early_termination={bool(options & 2)})"
    return names.get(phase, entered)
