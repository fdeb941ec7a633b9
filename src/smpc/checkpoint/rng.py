"""The state of this process's random generators, as a tree that a checkpoint can hold.

    Content(..., rank_state={"rng": capture_rng()})
    restore_rng(checkpoint.rank_state(rank)["rng"])

Covers torch on the CPU and on every CUDA device that is in use, Python's `random` and NumPy's legacy generator.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from smpc.errors import CheckpointError


def capture_rng() -> dict[str, Any]:
    """The states now."""
    in_use: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    version, numbers, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if in_use else [],
        "python": (version, torch.tensor(numbers, dtype=torch.int64), gauss),
        "numpy": (
            str(name),
            torch.from_numpy(np.asarray(keys).astype(np.int64)),
            int(position),
            int(has_gauss),
            float(cached),
        ),
    }


def restore_rng(state: Mapping[str, Any]) -> None:
    """Put the generators where they were. Raises CheckpointError if the state is not one, or for other devices than there are."""
    cuda = state["cuda"] if isinstance(state, Mapping) and "cuda" in state else None
    if cuda is None or len(cuda) not in (0, torch.cuda.device_count()):
        raise CheckpointError(
            f"random state: expected that of {torch.cuda.device_count()} CUDA devices, found "
            f"{'none' if cuda is None else len(cuda)}"
        )
    version, numbers, gauss = state["python"]
    name, keys, position, has_gauss, cached = state["numpy"]
    torch.set_rng_state(state["torch"])
    if cuda:
        torch.cuda.set_rng_state_all(cuda)
    random.setstate((version, tuple(numbers.tolist()), gauss))
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
