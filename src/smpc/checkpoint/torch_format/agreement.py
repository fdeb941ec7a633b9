"""The cooperation of the ranks of a save or a load: each does its part, one does the common part, and one rank's failure is raised on all.

    ranks = Ranks(group, coordinator=0)                        group None: this process alone
    ranks.gather_scatter("planning", local, whole)             whole([...of every rank]) on the coordinator; each gets its own back

Errors are CheckpointError on every rank, naming each rank that failed and why; MissingKeyError if that is all that is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from smpc.checkpoint.channel import describe
from smpc.errors import CheckpointError, MissingKeyError

_Failure = tuple[str, bool]  # text, whether it is a missing key


class CoordinatedRanks:
    """The ranks of a process group, of which one coordinates. Objects travel pickled, among the processes of one job."""

    def __init__(self, group: dist.ProcessGroup | None, coordinator: int = 0) -> None:
        self.group, self.coordinator = group, coordinator
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)
        if not 0 <= coordinator < self.size:
            raise CheckpointError(
                f"coordinator_rank: expected a rank from 0 to {self.size - 1} of the group, found {coordinator}"
            )

    def gather_scatter(self, local: Callable[[], Any], whole: Callable[[list[Any]], Sequence[Any]]) -> Any:
        """Applies `whole` to the results of every rank's `local`; returns this rank's part of the result."""
        value, failure, cause = _result_or_failure(local)
        gathered = self._gather((value, failure))
        answers: list[Any] = []
        if gathered is not None:
            failures = [found[1] for found in gathered]
            if not any(failures):
                results, failure, cause = _result_or_failure(lambda: whole([found[0] for found in gathered]))
                failures[self.rank] = failure
                answers = [(result, failures) for result in results] if failure is None else []
            answers = answers or [(None, failures)] * self.size
        result, failures = self._scatter(answers)
        self._raise(failures, cause)
        return result

    def gather(self, local: Callable[[], Any], whole: Callable[[list[Any]], object]) -> None:
        """As `gather_scatter`, but without an answer: ranks learn of their own failures, the coordinator of all."""
        value, failure, cause = _result_or_failure(local)
        gathered = self._gather((value, failure))
        failures = [None] * self.size if gathered is None else [found[1] for found in gathered]
        if gathered is not None and not any(failures):
            _, failure, cause = _result_or_failure(lambda: whole([found[0] for found in gathered]))
        failures[self.rank] = failures[self.rank] or failure
        self._raise(failures, cause)

    def everybody(self, value: Any) -> list[Any]:
        """Every rank's value, in order of rank."""
        if self.group is None:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self.group)
        return found

    def _gather(self, value: Any) -> list[Any] | None:
        if self.group is None:
            return [value]
        is_coordinator = self.rank == self.coordinator
        found: list[Any] | None = [None] * self.size if is_coordinator else None
        dist.gather_object(value, found, group=self.group, group_dst=self.coordinator)
        return found

    def _scatter(self, values: list[Any]) -> Any:
        if self.group is None:
            return values[0]
        own: list[Any] = [None]
        dist.scatter_object_list(own, values or None, group=self.group, group_src=self.coordinator)
        return own[0]

    def _raise(self, failures: Sequence[_Failure | None], cause: Exception | None) -> None:
        found = [(rank, failure) for rank, failure in enumerate(failures) if failure is not None]
        if not found:
            return
        lines = {text: [rank for rank, (other, _) in found if other == text] for _, (text, _) in found}
        text = "\n".join(
            f"{_named_agreeing_ranks(ranks)}{text}" if self.size > 1 else text for text, ranks in lines.items()
        )
        raise (MissingKeyError if all(missing for _, (_, missing) in found) else CheckpointError)(text) from cause


def _result_or_failure(work: Callable[[], Any]) -> tuple[Any, _Failure | None, Exception | None]:
    """The result of the work, or its error and what other ranks are told of it."""
    try:
        return work(), None, None
    except Exception as error:
        return None, (describe(error), isinstance(error, MissingKeyError)), error


def _named_agreeing_ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: "
