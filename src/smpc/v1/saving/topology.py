"""The state of a checkpoint that belongs to the ranks that saved it: random state, which only the same arrangement of ranks can restore.

On the same topology (degrees, number of ranks, placement) every rank continues the random numbers of the rank of its number: N steps equal
N/2 + N/2 steps, bit by bit. On another topology no rank's state fits, so all ranks are seeded alike, from a number derived from the
checkpoint: resuming twice gives the same results twice. All ranks do the same.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from smpc.checkpoint import Channel, Checkpoint, capture_rng, restore_rng, together
from smpc.v1.session.process_state import Session

RNG, STREAMS = "rng", "tensor_parallel_rng"


def describe(session: Session) -> dict[str, Any]:
    """The values that must be equal for random state to be restored."""
    mesh = session.mesh
    some = {name: size for name, size in (("context", mesh.cp_size), ("expert", mesh.ep_size)) if size > 1}
    return {
        "pipeline": mesh.pp_size,
        "tensor": mesh.tp_size,
        "replicas": mesh.rdp_size,
        "placement": mesh.placement,
        **some,
    }


def capture(session: Session) -> dict[str, Any]:
    """This rank's random state: the generators, and the streams of tensor-parallel modules."""
    return {RNG: capture_rng(), STREAMS: session.parallel.streams.state_dict()}


def restore(checkpoint: Checkpoint, session: Session, channel: Channel) -> None:
    """Restore the random state of this rank, or seed all ranks anew with a warning. Collective."""
    saved = checkpoint.metadata.get("topology") if isinstance(checkpoint.metadata, Mapping) else None
    if saved == describe(session):
        states: list[Any] = []

        def read() -> bool:
            states.append(checkpoint.rank_state(session.rank))
            return isinstance(states[0], Mapping) and RNG in states[0] and len(states[0][RNG]["cuda"]) in _devices()

        if all(together(channel, read)):
            restore_rng(states[0][RNG])
            session.parallel.streams.load_state_dict(states[0].get(STREAMS, {}))
            return
    seed = 0x5EED + checkpoint.manifest.sequence
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    session.parallel.streams.reseed(seed)
    if session.rank == 0:
        warnings.warn(
            f"{checkpoint.folder} was saved on {_text(saved)}, and this job has {_text(describe(session))}: its random state does "
            f"not fit, and all ranks are seeded with {seed}",
            stacklevel=4,
        )


def _devices() -> tuple[int, int]:
    """Numbers of CUDA devices whose state can be restored."""
    return 0, torch.cuda.device_count()


def _text(topology: Any) -> str:
    if not isinstance(topology, Mapping):
        return "an unknown arrangement of ranks"
    return ", ".join(f"{key} {value}" for key, value in topology.items())
