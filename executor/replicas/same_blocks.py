"""Replicas that hold parts of blocks call the same blocks, in the same order, or a StepError says which rank calls which.

Ranks gather a block together when it is called. Others would gather one block's parameters in the place of another's, without a word:

    rank 0    gather block 0    gather block 1        a layer that is dropped by chance, or chosen by the batch
    rank 1    gather block 0    gather block 2

Over gloo ranks tell each other which block comes next; over other backends, which came, at the end of the model's forward. Blocks that are
whole for a training step need not be told: they are gathered when it begins. Parameters that are used outside of their blocks
(`smpc.sharding.outside_uses`) are told like blocks.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from smpc.errors import StepError
from smpc.sharding import Keep, Unit


class SameBlocks:
    """See above. `group`: all ranks that gather the units; a unit with a mesh of its own is left alone. `parameters`: names."""

    def __init__(
        self, module: nn.Module, units: Iterable[str | Unit], group: dist.ProcessGroup, parameters: Iterable[str]
    ) -> None:
        self._group, self._is_told, self._trains, self._looks = group, False, False, False
        self._tells_each = "gloo" in str(dist.get_backend_config(group))
        self._names, self._called = ["the end of the model"], list[int]()
        self._is_all_whole = True  # in a training step
        for unit in units:
            name, mesh, keep = (unit, None, None) if isinstance(unit, str) else (unit.name, unit.mesh, unit.keep)
            if mesh is None:
                self._names.append(name or "the model")
                enter = partial(self._enter, len(self._names) - 1, keep is Keep.STEP)
                module.get_submodule(name).register_forward_pre_hook(enter, prepend=True)
                self._is_all_whole &= keep is Keep.STEP
        module.register_forward_hook(self._leave)
        self._numbers = {name: number for number, name in enumerate(parameters, len(self._names))}
        self._numbers[""] = len(self._names) + len(self._numbers)
        self._names += [f"a use of {name or 'what was made of parts'}" for name in self._numbers]

    @contextmanager
    def told(self, trains: bool, looks: bool) -> Iterator[None]:
        """While the module is called. `trains`: in a training step, for which small blocks are whole on all ranks. `looks`: parameters may
        be used outside of their blocks."""
        self._is_told, self._trains, self._looks = True, trains, looks
        self._called.clear()
        try:
            yield
        finally:
            self._is_told = False

    def _enter(self, number: int, is_whole: bool, *_: object) -> None:
        if not self._is_told or (self._trains and is_whole):
            return
        self._tell(number)

    def tell_use(self, name: str) -> None:
        """A parameter, or with "" what was made of some, is about to be gathered outside of its block."""
        self._tell(self._numbers[name])

    def _tell(self, number: int) -> None:
        self._called.append(number)
        if self._tells_each:
            self._compare(number)

    def _leave(self, *_: object) -> None:
        """The backward that may follow gathers the blocks that were called."""
        if self._is_told and (self._looks or not (self._trains and self._is_all_whole)):
            self._compare(0 if self._tells_each else zlib.crc32(repr(self._called).encode()))

    def any_rank(self, has: bool) -> bool:
        """Whether some rank has it. Collective."""
        return any(self._numbers_of_ranks(int(has)))

    def _numbers_of_ranks(self, own: int) -> list[int]:
        device = "cpu" if self._tells_each else torch.accelerator.current_accelerator()
        told = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(self._group.size())]
        dist.all_gather(told, torch.full_like(told[0], own), group=self._group)
        return [int(each) for each in told]

    def _compare(self, own: int) -> None:
        found = self._numbers_of_ranks(own)
        if any(number != own for number in found):
            texts = [
                f"rank {rank}: {self._names[number] if self._tells_each else f'the calls {number:x}'}"
                for rank, number in zip(dist.get_process_group_ranks(self._group), found, strict=True)
            ]
            raise StepError(
                "sharded parameters: expected all replicas to call the same blocks in the same order, since they gather a block together; "
                f"found {', '.join(texts)}; call the block on every rank and multiply what it adds by zero, draw what is "
                "skipped alike on all ranks, or leave out fully_shard and sharded_data_parallel_degree"
            )
