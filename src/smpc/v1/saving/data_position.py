"""Each rank's position in its data: saved for every rank, and restored if the data is divided as before.

    smp.save_checkpoint(path, tag, ..., data=loader)
    smp.resume_from_checkpoint(path, data=loader)

`data` has `state_dict()` and `load_state_dict(state)`, as stateful data loaders and samplers do; the state is plain values and tensors.

A rank's samples follow from its dp_rank, or, if ranks share sequences, from the dp_rank of the first of these. So with as many parts of
the data as before, whatever the other degrees, a rank restores the position of pipeline rank 0 of its part: the other pipeline ranks may
read other data, or none. With another number, a position is restored only if all had the same one; otherwise none is, on any rank, with a
warning.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from smpc.checkpoint import Channel, Checkpoint, together
from smpc.errors import CheckpointError, ConfigTypeError
from smpc.mesh import Axis, Mesh
from smpc.v1.session.process_state import Session

DATA = "data"


@runtime_checkable
class StatefulData(Protocol):
    """An object with a position."""

    def state_dict(self) -> Any:
        """The position, as plain values and tensors."""

    def load_state_dict(self, state_dict: Any) -> object:
        """Go to a position."""


def check_data(data: Any) -> None:
    """Raises ConfigTypeError unless `data` is None or has a position."""
    if data is not None and not isinstance(data, StatefulData):
        raise ConfigTypeError(
            f"data: expected an object with state_dict() and load_state_dict(), found {type(data).__name__}; keep the position in "
            "user_content instead"
        )


def capture(data: StatefulData | None) -> dict[str, Any]:
    """This rank's saved position in its data."""
    return {} if data is None else {DATA: data.state_dict()}


def restore(checkpoint: Checkpoint, data: StatefulData | None, session: Session, channel: Channel) -> None:
    """Restore the saved positions, or warn and skip them. Collective."""
    if data is None:
        return
    ranks, reason = _sources(checkpoint, session.mesh)
    found: list[Any] = []

    def read() -> None:
        if ranks is not None:
            found.append(checkpoint.rank_state(ranks[_part_of(session.mesh, session.rank)])[DATA])

    together(channel, read)
    if not found:
        if session.rank == 0:
            warnings.warn(f"{checkpoint.folder}: {reason}; the data begins at its present position", stacklevel=4)
        return

    def load() -> None:
        try:
            data.load_state_dict(found[0])
        except Exception as error:  # the user's class may raise anything
            raise CheckpointError(f"data: load_state_dict failed: {type(error).__name__}: {error}") from error

    together(channel, load)


def _sources(checkpoint: Checkpoint, mesh: Mesh) -> tuple[list[int] | None, str]:
    """By part of the data, the saved rank whose position its readers take; None, and why, if they can take none."""
    states = [state if isinstance(state, Mapping) else {} for state in checkpoint.manifest.ranks]
    saved = checkpoint.metadata.get("topology")
    if not isinstance(saved, Mapping) or not any(DATA in state for state in states):
        return None, "no data position was saved"
    old = Mesh(len(states), saved["pipeline"], saved["tensor"], saved["placement"], saved.get("context", 1))
    first, now = _readers(old), len(_readers(mesh))
    if any(DATA not in states[rank] for rank in first):
        return None, "the data position of some ranks was not saved"
    if len(first) == now:
        return first, ""
    values = [states[rank][DATA] for rank in first]
    if len(first) == 1 or (len(set(map(json.dumps, values))) == 1 and not _has_tensors(values)):
        return [first[0]] * now, ""
    return (
        None,
        f"saved with {len(first)} data-parallel ranks, of which each had its own data position, and there are {now}",
    )


def _readers(mesh: Mesh) -> list[int]:
    """The rank of pipeline rank 0 that reads each part of the data; the first one of those that share sequences."""
    first = next(group for group in mesh.groups(Axis.DP) if mesh.pp_rank(group[0]) == 0)
    return [rank for rank in first if mesh.axis_rank(Axis.CP, rank) == 0]


def _part_of(mesh: Mesh, rank: int) -> int:
    """Which of these parts a rank reads."""
    first = mesh.group(Axis.CP, rank)[0]
    return [other for other in mesh.group(Axis.DP, first) if mesh.axis_rank(Axis.CP, other) == 0].index(first)


def _has_tensors(values: Any) -> bool:
    """Whether the JSON of a state refers to tensors, whose equal names do not mean equal values."""
    if isinstance(values, list):
        return any(map(_has_tensors, values))
    return isinstance(values, dict) and (values.get("$") == "tensor" or any(map(_has_tensors, values.values())))
