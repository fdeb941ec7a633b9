"""Which samples of a data set a rank reads."""

from __future__ import annotations

from collections.abc import Sized
from typing import cast

from torch.utils.data import Dataset
from torch.utils.data.distributed import DistributedSampler

from smpc.dist.place import get_global_rank, get_world_size


def get_sampler(
    dataset: Sized,
    *,
    drop_last: bool = False,
    shuffle: bool = False,
    num_replicas: int | None = None,
    rank: int | None = None,
    seed: int = 0,
) -> DistributedSampler[int]:
    """A DistributedSampler: rank r of R reads every R-th sample. Alone there is one replica.

    `num_replicas` and `rank`: those of the world by default; with pipelines or tensor parallelism, where ranks of one replica read the
    same samples, give the number and the rank of the replica (`smp.rdp_size()`, `smp.rdp_rank()`).
    """
    return DistributedSampler(
        cast("Dataset[int]", dataset),
        num_replicas=get_world_size() if num_replicas is None else num_replicas,
        rank=get_global_rank() if rank is None else rank,
        shuffle=shuffle,
        drop_last=drop_last,
        seed=seed,
    )
