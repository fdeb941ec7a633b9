"""The content of a checkpoint, before it is written.

    kind        a group of tensors: "model", "optimizer", "masters", ...; each has its own files, so that one can be read alone
    name        of a tensor in its kind: the fully qualified name in the user's module, never a rank or a position
    shard       the part of a named tensor that a rank has: a box at `offsets` of the global tensor
    Content     a rank's shards, its own state (random generators, data position), and what rank 0 says for all

    Content(
        shards=[Shard.whole("model", "head.bias", bias), Shard.of("model", "head.weight", rows, (50257, 768), (12564, 0))],
        metadata={"step": 300}, rank_state={"rng": ...}, user={"epoch": 2}, plan=plan.to_json(),
    )

A shard that several ranks hold, with the same offsets and shape, is a replica: one of them writes it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from smpc.checkpoint.format.dtypes import num_bytes
from smpc.checkpoint.format.regular_file import printable
from smpc.errors import CheckpointError

Advance = Callable[[int], None]  # told the number of bytes done

VALUES = "values"  # the kind of the tensors in the trees `metadata`, `user` and `rank_state`
KIND = re.compile(r"[a-z][a-z0-9_]{0,39}")


@dataclass(frozen=True, slots=True)
class Shard:
    """A box of a named global tensor, and its values: a tensor, or a function that brings it when it is written.

    `varies`: ranks that hold it may hold other values (buffers of replicas, each updated by its own samples), and the first one's count.
    """

    kind: str
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    values: Tensor | Callable[[], Tensor]
    varies: bool = False

    def __post_init__(self) -> None:
        if not KIND.fullmatch(self.kind):
            raise CheckpointError(f"kind: expected lower-case letters, digits and _, found {self.kind!r}")
        if not isinstance(self.name, str) or not self.name:
            raise CheckpointError(f"a tensor of the kind {self.kind} has no name")
        if not len(self.shape) == len(self.global_shape) == len(self.offsets) or any(
            start < 0 or size < 0 or start + size > whole
            for start, size, whole in zip(self.offsets, self.shape, self.global_shape, strict=True)
        ):
            raise CheckpointError(
                f"{self.kind} {printable(self.name)}: a shard of shape {list(self.shape)} at {list(self.offsets)} is not in a tensor "
                f"of shape {list(self.global_shape)}"
            )

    @staticmethod
    def of(kind: str, name: str, tensor: Tensor, global_shape: Sequence[int], offsets: Sequence[int]) -> Shard:
        """A shard that a tensor holds: to be saved, or to be filled by loading."""
        return Shard(kind, name, tensor.dtype, tuple(tensor.shape), tuple(global_shape), tuple(offsets), tensor)

    @staticmethod
    def whole(kind: str, name: str, tensor: Tensor) -> Shard:
        """All of a tensor."""
        return Shard.of(kind, name, tensor, tensor.shape, [0] * tensor.dim())

    @property
    def num_bytes(self) -> int:
        """Size in a file."""
        return num_bytes(self.shape, self.dtype)

    @property
    def tensor(self) -> Tensor:
        """The tensor itself, on whatever device."""
        assert isinstance(self.values, Tensor), "the values of this shard are not in memory"
        return self.values

    def fetch(self) -> Tensor:
        """The values, contiguous and on the CPU; copied only if they are not."""
        found = self.values if isinstance(self.values, Tensor) else self.values()
        return found.detach().to("cpu").contiguous()


@dataclass(frozen=True, slots=True)
class Content:
    """One rank's content. `metadata`, `user`, `pickled` and `plan` count on rank 0 alone.

    metadata    a tree (see `smpc.checkpoint.format.plain_json`): step, scaler, scheduler, param groups, ...
    rank_state  a tree of this rank: random state, data position
    user        a tree: the user's own content
    pickled     objects by name, written with pickle. Only for what the caller asked to pickle; it is read by name alone, never by loading
    plan        JSON text of the plan that the model was cut by
    """

    shards: Sequence[Shard] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    rank_state: Any = None
    user: Any = None
    pickled: Mapping[str, Any] = field(default_factory=dict)
    plan: str | None = None
