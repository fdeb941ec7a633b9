"""Common ground of tensor-parallel modules: how they are split, the layouts between them, and their sliced parameters.

Terms
    scaled batch   the samples of all tensor-parallel ranks of a group together, [tp * B, S, H]. With `prescaled_batch` every rank is
                   given the scaled batch; otherwise each is given its own B samples, which are brought together on entry
    inside         between the first and the last of a chain of distributed layers. There a hidden state has the scaled batch and, by
                   `optimize`, is replicated ("speed": [tp * B, S, H] on every rank, least communication) or split along the hidden
                   dimension ("memory": [tp * B, S, H / tp], nothing is held twice)
    slice          the part of a parameter that this rank holds; `ParameterSlice` says along which dimension, and of how much

            outside                       entry                       inside, memory          inside, speed
            own batch   [B, S, H]         all-to-all | all-gather     [tp * B, S, H / tp]     [tp * B, S, H]
            prescaled   [tp * B, S, H]    slice      | nothing

A parameter of a distributed module acts on the scaled batch, so its gradient is summed over the samples of the whole tensor-parallel
group already: replicas average it over RDP, and without `prescaled_batch` it is divided by the group's size besides, as the losses of
its ranks are averaged. The other parameters are averaged over DP.

Values are drawn block by block for the whole parameter, and only the slice is kept: the same seed gives the same weights for every
degree, leaves the random state the same, and no rank ever holds more than its slice and one block.

Source: "Tensor Parallelism API for PyTorch" and "Prescaled Batch" in the public references of SMP v1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from smpc.errors import ConfigError
from smpc.executor.collectives import (
    TensorGroup,
    all_gather,
    all_reduce,
    all_to_all,
    gather_in,
    gathered,
    reduce_scatter,
    replicate_in,
    split,
)
from smpc.nn.random import RandomStreams
from smpc.tracer import mark_leaf

_BLOCK_ELEMENTS = 1 << 20


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """How modules are split: the group, the layout inside, what the ranks are given, and the dtype of parameters."""

    group: TensorGroup = field(default_factory=TensorGroup)
    optimize: str = "memory"
    prescaled_batch: bool = False
    dtype: torch.dtype | None = None  # None: torch's default
    streams: RandomStreams = field(default_factory=RandomStreams)

    def __post_init__(self) -> None:
        if self.optimize not in ("memory", "speed"):
            raise ConfigError(f"optimize: expected memory or speed, found {self.optimize!r}")

    def __deepcopy__(self, memo: dict[int, object]) -> TensorParallel:
        """Itself: copies of a module belong to the same group, and process groups cannot be copied."""
        return self

    @property
    def splits_hidden(self) -> bool:
        """Whether hidden states are split inside."""
        return self.optimize == "memory"

    def enter(self, hidden: Tensor) -> Tensor:
        """From outside to inside."""
        if self.splits_hidden:
            return split(hidden, -1, self.group) if self.prescaled_batch else all_to_all(hidden, -1, 0, self.group)
        return hidden if self.prescaled_batch else all_gather(hidden, 0, self.group)

    def leave(self, hidden: Tensor) -> Tensor:
        """From inside to outside."""
        if self.splits_hidden:
            return all_gather(hidden, -1, self.group) if self.prescaled_batch else all_to_all(hidden, 0, -1, self.group)
        return hidden if self.prescaled_batch else split(hidden, 0, self.group)

    def enter_whole(self, tensor: Tensor) -> Tensor:
        """Brings a tensor without gradient (a mask, token numbers), whose first dimension is the batch, inside."""
        return tensor if self.prescaled_batch else gathered(tensor, 0, self.group)

    def enter_batch(self, tensor: Tensor, batch: int) -> Tensor:
        """Like `enter_whole`; a first dimension of 1 applies to all samples, and stays 1."""
        return tensor if tensor.shape[0] == 1 and batch > 1 else self.enter_whole(tensor)

    def before_columns(self, hidden: Tensor) -> Tensor:
        """From inside to the whole hidden dimension, for a weight that is split by output channels."""
        return gather_in(hidden, -1, self.group) if self.splits_hidden else replicate_in(hidden, self.group)

    def after_rows(self, partial: Tensor) -> Tensor:
        """To inside, from the summands that a weight split by input channels gives."""
        return reduce_scatter(partial, -1, self.group) if self.splits_hidden else all_reduce(partial, self.group)

    def check_divides(self, owner: str, **sizes: int) -> None:
        """Raises ConfigError, one line for each size that the tensor-parallel ranks do not divide."""
        wrong = [
            f"{owner}: expected {name} divisible by tensor_parallel_degree {self.group.size}, found {size}"
            for name, size in sizes.items()
            if size % self.group.size
        ]
        if wrong:
            raise ConfigError("\n".join([*wrong, "change the degree or the size, or leave the module undistributed"]))


_CURRENT: ContextVar[TensorParallel | None] = ContextVar("tensor_parallel", default=None)


def current_parallel() -> TensorParallel:
    """How modules that are created now are split, where their constructor is not told: not at all, unless `use_parallel` says so."""
    return _CURRENT.get() or TensorParallel()


@contextmanager
def use_parallel(parallel: TensorParallel) -> Iterator[None]:
    """Splits the modules that are created in this context as `parallel` says."""
    token = _CURRENT.set(parallel)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def set_parallel(parallel: TensorParallel | None) -> None:
    """Splits the modules that this thread creates from now on; `smpc.v1` says it once a session."""
    _CURRENT.set(parallel)


@dataclass(frozen=True, slots=True)
class ParameterSlice:
    """A parameter is this rank's slice along `dim` of one that has `size` there. `start` is where the slice begins.

    `runs`: of a slice that is several runs of the whole, the start and length of each, in its order; empty: it is one run.
    """

    dim: int
    size: int
    start: int
    runs: tuple[tuple[int, int], ...] = ()

    def runs_of(self, length: int) -> tuple[tuple[int, int, int], ...]:
        """(start in the slice, start in the whole, length) of every run of the slice, which is `length` long."""
        if not self.runs:
            return ((0, self.start, length),)
        found, own = [], 0
        for start, each in self.runs:
            found.append((own, start, each))
            own += each
        return tuple(found)


class DistributedModule(nn.Module):
    """A module split over tensor-parallel ranks. A recorder calls it whole, unless `is_container`.

    Every parameter that a subclass declares acts on the scaled batch, unless it is named in `local_batch`.
    """

    is_container = False  # holds only distributed modules, which a pipeline may spread over its stages

    def __init__(self, parallel: TensorParallel) -> None:
        super().__init__()
        self.parallel = parallel
        self.shards: dict[str, ParameterSlice] = {}
        self.local_batch: tuple[str, ...] = ()
        self._fills: dict[str, Callable[[Tensor], object]] = {}
        if not self.is_container:
            mark_leaf(self)

    def declare(
        self,
        name: str,
        shape: tuple[int, ...],
        fill: Callable[[Tensor], object],
        dim: int | None = None,
    ) -> None:
        """Registers a parameter of the global `shape`, split along `dim` (None: whole on every rank) and filled by `fill`."""
        local = list(shape)
        if dim is not None:
            group = self.parallel.group
            self.shards[name] = ParameterSlice(dim, shape[dim], group.start(shape[dim]))
            local[dim] = group.share(shape[dim])
        self.register_parameter(name, nn.Parameter(torch.empty(local, dtype=self.parallel.dtype)))
        self._fills[name] = fill

    def draw(self, name: str, fill: Callable[[Tensor], object]) -> None:
        """Has `reset_parameters` fill an own parameter in another way."""
        self._fills[name] = fill

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws this module's own parameters anew, where they are not on the meta device."""
        for name, fill in self._fills.items():
            parameter = self.get_parameter(name)
            if not parameter.is_meta:
                fill_slice(parameter, self.shards.get(name), fill)

    def slice_of(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of the whole value of an own parameter; a view."""
        shard = self.shards.get(name)
        if shard is None:
            return whole
        return whole.narrow(shard.dim, shard.start, self.get_parameter(name).shape[shard.dim])


def fill_slice(parameter: Tensor, shard: ParameterSlice | None, fill: Callable[[Tensor], object]) -> None:
    """Fills a slice with `fill`'s values for the whole tensor, drawn in blocks of its rows."""
    shape = whole_shape(parameter, shard)
    if not shape:
        fill(parameter)
        return
    rows_per_block = max(1, _BLOCK_ELEMENTS // max(1, math.prod(shape[1:])))
    for first in range(0, shape[0], rows_per_block):
        block = parameter.new_empty((min(rows_per_block, shape[0] - first), *shape[1:]))
        fill(block)
        last = first + block.shape[0]
        if shard is None or shard.dim:
            parameter[first:last] = own_part_of(block, shard, parameter.shape)
            continue
        for own, start, length in shard.runs_of(parameter.shape[0]):
            low, high = max(first, start), min(last, start + length)
            if low < high:
                parameter[own + low - start : own + high - start] = block[low - first : high - first]


def whole_shape(part: Tensor, shard: ParameterSlice | None) -> list[int]:
    """The shape of the whole tensor of this slice."""
    shape = list(part.shape)
    if shard is not None:
        shape[shard.dim] = shard.size
    return shape


def own_part_of(whole: Tensor, shard: ParameterSlice | None, shape: torch.Size) -> Tensor:
    """The slice, of this shape along its dimension, of a whole tensor or of some of its rows."""
    if shard is None:
        return whole
    runs = [whole.narrow(shard.dim, start, length) for _, start, length in shard.runs_of(shape[shard.dim])]
    return runs[0] if len(runs) == 1 else torch.cat(runs, shard.dim)


def linear_fills(
    in_features: int, initializer_range: float, use_normal_initialization: bool
) -> tuple[Callable[[Tensor], object], Callable[[Tensor], object]]:
    """How the weight and the bias of a linear layer are drawn: normally, with zero biases, or as torch.nn.Linear does."""
    if use_normal_initialization:
        return (lambda block: block.normal_(0.0, initializer_range)), Tensor.zero_
    bound = 1 / math.sqrt(in_features) if in_features else 0.0

    def uniform(block: Tensor) -> object:
        return block.uniform_(-bound, bound)

    return uniform, uniform


def distributed_modules(module: nn.Module) -> Iterator[tuple[str, DistributedModule]]:
    """The distributed modules in a module, itself included, with their names."""
    for name, child in module.named_modules():
        if isinstance(child, DistributedModule):
            yield name, child
