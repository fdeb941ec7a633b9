"""Which samples of a data set a rank reads.

Without a session of `smpc.v1` or `smpc.v2` every rank reads a part of its own. In a session ranks of one pipeline, and of a group that shares
its batches, read the same part: the session says which, through `divide_data`.
"""

from __future__ import annotations

from collections.abc import Callable, Sized
from typing import cast

from torch.utils.data import Dataset
from torch.utils.data.distributed import DistributedSampler

from smpc.dist.rank_and_size import get_global_rank, get_world_size

_PLACES: list[tuple[int, int]] = []  # of this rank, in the sessions that there are: which of how many parts of the data


def divide_data(index: int, count: int) -> Callable[[], None]:
    """A session begins, in which this rank reads part `index` of `count`. Returns what ends that."""
    place = (index, count)
    _PLACES.append(place)
    return lambda: _PLACES.remove(place)


def get_sampler(
    dataset: Sized,
    *,
    drop_last: bool = False,
    shuffle: bool = False,
    num_replicas: int | None = None,
    rank: int | None = None,
    seed: int = 0,
) -> DistributedSampler[int]:
    """A DistributedSampler: of R replicas, replica r reads every R-th sample, from the r-th on. A rank alone is one replica.

    `dataset`, `drop_last`, `shuffle`, `seed`: as for torch's DistributedSampler. `num_replicas` and `rank`: by default all ranks of the
    world; after `smp.init` or `tsm.init` the session's parts of the data: ranks that need the same batches get the same samples.
    """
    index, count = _PLACES[-1] if _PLACES else (get_global_rank(), get_world_size())
    return DistributedSampler(
        cast("Dataset[int]", dataset),
        num_replicas=count if num_replicas is None else num_replicas,
        rank=index if rank is None else rank,
        shuffle=shuffle,
        drop_last=drop_last,
        seed=seed,
    )
