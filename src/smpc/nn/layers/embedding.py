"""Embeddings whose table is split over tensor-parallel ranks: by channels, or by the vocabulary.

    DistributedEmbedding     outside: what nn.Embedding is; each rank holds [V, D / tp], or [V / tp, D] with `split_vocabulary`
    VocabularyEmbedding      inside: whole ids [tp * B, S] to hidden states; each rank holds the rows [V / tp, D]
    ChannelEmbedding         inside, likewise; each rank holds what its hidden states need: [V, D / tp], or [V, D]

A rank that holds rows looks up zeros for the ids of others, and the ranks' results are summed. A vocabulary that the ranks do not divide
gives the first of them one row more.

Source: "DistributedEmbedding" in the public tensor-parallelism reference of SMP v1; Shoeybi et al. 2019, arXiv 1909.08053.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from smpc.executor.collectives import all_gather, all_reduce, all_to_all, reduce_scatter
from smpc.nn.parallel import DistributedModule, TensorParallel, current_parallel
from smpc.sharding.forward_writes.row_norms import note_lookup


class DistributedEmbedding(DistributedModule):
    """nn.Embedding: ids [B, ..] to [B, .., embedding_dim], where every rank has its own samples unless `prescaled_batch`.

    `_weight`: the whole table to start from. `initializer_range`: standard deviation of the normal distribution of the table; None: 1,
    as nn.Embedding. `_skip_allgather`: the ids already cover the whole scaled batch. `_skip_scatter_and_merge`: the result stays in the
    inner layout, [tp * B, .., D / tp]. `split_vocabulary` (not in the reference): split the rows.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        _weight: Tensor | None = None,
        initializer_range: float | None = 0.02,
        _skip_allgather: bool = False,
        _skip_scatter_and_merge: bool = False,
        *,
        split_vocabulary: bool = False,
        parallel: TensorParallel | None = None,
    ) -> None:
        super().__init__(parallel or current_parallel())
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx = _positive_index(padding_idx, num_embeddings)
        self.max_norm, self.norm_type = max_norm, norm_type
        self.scale_grad_by_freq, self.sparse = scale_grad_by_freq, sparse
        self.split_vocabulary = split_vocabulary
        self._gathers_ids = not (_skip_allgather or self.parallel.prescaled_batch)
        self._stays_inside = _skip_scatter_and_merge
        if split_vocabulary:
            self._check_rows(_skip_scatter_and_merge)
        else:
            self.parallel.check_divides("DistributedEmbedding", embedding_dim=embedding_dim)
        self.declare(
            "weight",
            (num_embeddings, embedding_dim),
            _normal_embedding_fill(1.0 if initializer_range is None else initializer_range),
            0 if split_vocabulary else 1,
        )
        self.reset_parameters()
        if _weight is not None:
            self._take(_weight)

    def forward(self, input: Tensor) -> Tensor:
        """Looks ids up. ValueError unless they are integers."""
        if input.is_floating_point() or input.dtype is torch.bool:
            raise ValueError(f"DistributedEmbedding: expected integer ids, found {input.dtype}")
        ids = self.parallel.enter_whole(input) if self._gathers_ids else input
        group = self.parallel.group
        if self.split_vocabulary:
            partial = _look_up_rows(ids, self.get_parameter("weight"), self.shards["weight"].start)
            keeps = group.size == 1 or self.parallel.prescaled_batch
            return all_reduce(partial, group) if keeps else reduce_scatter(partial, 0, group)
        self._renormalize(ids)
        channels = F.embedding(
            ids,
            self.get_parameter("weight"),
            self.padding_idx,
            scale_grad_by_freq=self.scale_grad_by_freq,
            sparse=self.sparse,
        )
        if self._stays_inside:
            return channels
        return all_gather(channels, -1, group) if self.parallel.prescaled_batch else all_to_all(channels, 0, -1, group)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws the table; the row of `padding_idx` is zero."""
        super().reset_parameters()
        weight, first = self.get_parameter("weight"), self.shards["weight"].start if self.split_vocabulary else 0
        if self.padding_idx is not None and not weight.is_meta and 0 <= self.padding_idx - first < weight.shape[0]:
            weight[self.padding_idx - first].zero_()

    def extra_repr(self) -> str:
        """The global sizes."""
        what = "rows" if self.split_vocabulary else "channels"
        return f"{self.num_embeddings}, {self.embedding_dim}, {what} over {self.parallel.group.size} ranks"

    def _check_rows(self, stays_inside: bool) -> None:
        given = {
            "padding_idx": self.padding_idx is not None,
            "max_norm": self.max_norm is not None,
            "scale_grad_by_freq": self.scale_grad_by_freq,
            "sparse": self.sparse,
            "_skip_scatter_and_merge": stays_inside,
        }
        wrong = [name for name, is_set in given.items() if is_set]
        if wrong:
            raise ValueError(
                f"DistributedEmbedding: expected no {', '.join(wrong)} with split_vocabulary; split the channels instead"
            )

    @torch.no_grad()
    def _take(self, whole: Tensor) -> None:
        if tuple(whole.shape) != (self.num_embeddings, self.embedding_dim):
            raise ValueError(
                f"DistributedEmbedding: expected a _weight of shape ({self.num_embeddings}, {self.embedding_dim}), "
                f"found {tuple(whole.shape)}"
            )
        if self.get_parameter("weight").is_meta:
            raise ValueError("DistributedEmbedding: expected no _weight where the initialization is delayed")
        self.get_parameter("weight").copy_(self.slice_of("weight", whole))

    @torch.no_grad()
    def _renormalize(self, ids: Tensor) -> None:
        """Scales the rows that are looked up and longer than `max_norm` down to it, as nn.Embedding does."""
        if self.max_norm is None:
            return
        weight = self.get_parameter("weight")
        note_lookup(weight, ids, self.max_norm, self.norm_type, is_sliced=True)
        used = torch.unique(ids)
        norms = all_gather(weight[used], -1, self.parallel.group).norm(self.norm_type, -1)
        scale = torch.where(norms > self.max_norm, self.max_norm / (norms + 1e-7), torch.ones_like(norms))
        weight[used] = weight[used] * scale[:, None]


class VocabularyEmbedding(DistributedModule):
    """The rows of a table split over ranks; whole ids [tp * B, S] to a hidden state inside."""

    def __init__(
        self, num_embeddings: int, embedding_dim: int, initializer_range: float, *, parallel: TensorParallel
    ) -> None:
        super().__init__(parallel)
        self.num_embeddings = num_embeddings
        self.declare("weight", (num_embeddings, embedding_dim), _normal_embedding_fill(initializer_range), 0)
        self.reset_parameters()

    def forward(self, ids: Tensor) -> Tensor:
        """Looks ids up, and sums over the ranks."""
        return self.parallel.after_rows(_look_up_rows(ids, self.get_parameter("weight"), self.shards["weight"].start))


class ChannelEmbedding(DistributedModule):
    """A table whose channels are split where hidden states are; ids to hidden states inside, without communication."""

    def __init__(
        self, num_embeddings: int, embedding_dim: int, initializer_range: float, *, parallel: TensorParallel
    ) -> None:
        super().__init__(parallel)
        dim = 1 if parallel.splits_hidden else None
        self.declare("weight", (num_embeddings, embedding_dim), _normal_embedding_fill(initializer_range), dim)
        self.reset_parameters()

    def forward(self, ids: Tensor) -> Tensor:
        """Looks ids up."""
        return F.embedding(ids, self.get_parameter("weight"))


def _look_up_rows(ids: Tensor, rows: Tensor, start: int) -> Tensor:
    """Rows of a slice of a table that begins at row `start`; zeros for ids outside."""
    index = ids - start
    outside = (index < 0) | (index >= rows.shape[0])
    return F.embedding(index.masked_fill(outside, 0), rows).masked_fill(outside[..., None], 0.0)


def _normal_embedding_fill(std: float) -> Callable[[Tensor], object]:
    return lambda block: block.normal_(0.0, std)


def _positive_index(padding_idx: int | None, num_embeddings: int) -> int | None:
    if padding_idx is None:
        return None
    if not -num_embeddings <= padding_idx < num_embeddings:
        raise ValueError(
            f"DistributedEmbedding: expected padding_idx within {num_embeddings} embeddings, found {padding_idx}"
        )
    return padding_idx % num_embeddings
