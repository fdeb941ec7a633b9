"""Replicas that hold parts of blocks call the same blocks, in the same order, or a StepError says which rank calls which.

Ranks gather a block together when it is called. Others would gather one block's parameters in the place of another's, without a word:

    rank 0    gather block 0    gather block 1        a layer that is dropped by chance, or chosen by the batch
    rank 1    gather block 0    gather block 2

Over gloo ranks tell each other which block comes next; over other backends, which came, at the end of the model's forward. Blocks that are
whole for a training step need not be told: they are gathered when it begins. Parameters that are used outside of their blocks
(`smpc.sharding.outside_uses`) are told like blocks. Backwards may reach different blocks: see `smpc.sharding.backwards`.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NoReturn, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from smpc.config.keep import Keep
from smpc.errors import StepError
from smpc.sharding.backwards import BEGIN, COME_TO, Backwards, is_in_backward
from smpc.sharding.shard import Unit

START, TRAINED, IDLE = (
    "the start of a step",
    "the end of a step with a backward",
    "the end of a step without a backward",
)
_PHASES = (START, TRAINED, IDLE)
_LAST = "the end of the model"


class SameBlocks:
    """See above. `group`: all ranks that gather the units; a unit with a mesh of its own is left alone. `parameters`: names."""

    def __init__(
        self, module: nn.Module, units: Iterable[str | Unit], group: dist.ProcessGroup, parameters: Iterable[str]
    ) -> None:
        self._group, self._is_told, self._trains, self._looks = group, False, False, False
        self._tells_each = "gloo" in str(dist.get_backend_config(group))
        known = [unit if isinstance(unit, Unit) else Unit(unit) for unit in units]
        alike = {unit.name: unit.keep is Keep.STEP for unit in known if unit.mesh is None}
        self._is_whole = list(alike.values())  # in a training step
        for number, (name, is_whole) in enumerate(alike.items(), 1):
            enter = partial(self._enter, number, is_whole)
            module.get_submodule(name).register_forward_pre_hook(enter, prepend=True)
        module.register_forward_hook(self._leave)
        named = {name: cast(FSDPModule, module.get_submodule(name)) for name in alike}
        self._backwards = Backwards(named, self._tell_backward, is_alone=len(alike) == len(known))
        self._names, self._called = [_LAST, *(name or "the model" for name in alike)], list[int]()
        self._numbers = {name: number for number, name in enumerate(parameters, len(self._names))}
        self._numbers[""] = len(self._names) + len(self._numbers)
        self._names += [f"a use of {name or 'what was made of parts'}" for name in self._numbers]
        self._phases = {name: number for number, name in enumerate(_PHASES, len(self._names))}
        self._names += _PHASES

    @property
    def backwards(self) -> Backwards:
        """What the backwards of these blocks reach."""
        return self._backwards

    @contextmanager
    def told(self, trains: bool, looks: bool) -> Iterator[None]:
        """While the module is called. `trains`: in a training step, for which small blocks are whole on all ranks, and with its backward.
        `looks`: parameters may be used outside of their blocks."""
        self._is_told, self._trains, self._looks = True, trains, looks
        self._called.clear()
        self._backwards.begin_call([not (trains and is_whole) for is_whole in self._is_whole], looks=looks)
        try:
            yield
        finally:
            self._is_told = False
        if trains:
            self._backwards.end_call()

    def tell_phase(self, name: str) -> None:
        """A step begins or ends, by one of the names above; outside of steps that is around the model's call and its backward."""
        if self._tells_each:
            self._compare(self._phases[name])
        if name != START:
            self._backwards.close()
        elif is_in_backward():
            self._backwards.resume()

    def _enter(self, number: int, is_whole: bool, *_: object) -> None:
        if not self._is_told or (self._trains and is_whole) or is_in_backward():
            return
        self._tell(number)

    def tell_use(self, name: str) -> None:
        """A parameter, or with "" what was made of some, is about to be gathered outside of its block."""
        self._tell(self._numbers[name])

    def note_use(self, whole: Tensor, take_part: Callable[[], None]) -> Callable[[], None]:
        """It was; returns what to call before its gradient is reduced. `take_part`: in that, without a gradient."""
        return self._backwards.note_use([] if whole.grad_fn is None else [whole.grad_fn], take_part)

    def _tell(self, number: int) -> None:
        self._called.append(number)
        if self._tells_each:
            self._compare(number)

    def _leave(self, *_: object) -> None:
        """The backward that may follow gathers the blocks that were called."""
        if not self._is_told or is_in_backward() or (self._tells_each and self._backwards.is_open and self._trains):
            return  # the first message of the backward says so, too
        if self._looks or not (self._trains and all(self._is_whole)):
            self._compare(0 if self._tells_each else zlib.crc32(repr(self._called).encode()))

    def any_rank(self, has: bool) -> bool:
        """Whether some rank has it. Collective."""
        return any(self._numbers_of_ranks(int(has)))

    def _tell_backward(self, own: int) -> list[int]:
        found = self._numbers_of_ranks(own)
        kinds = {(number >= BEGIN) + (number >= COME_TO) for number in found}
        if len(kinds) > 1:
            self._refuse(found)
        return found

    def _numbers_of_ranks(self, own: int) -> list[int]:
        device = "cpu" if self._tells_each else torch.accelerator.current_accelerator()
        told = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(self._group.size())]
        dist.all_gather(told, torch.full_like(told[0], own), group=self._group)
        return [int(each) for each in told]

    def _compare(self, own: int) -> None:
        found = self._numbers_of_ranks(own)
        if any(number != own for number in found):
            self._refuse(found)

    def _refuse(self, found: Sequence[int]) -> NoReturn:
        ranks = dist.get_process_group_ranks(self._group)
        texts = [f"rank {rank}: {self._describe(number)}" for rank, number in zip(ranks, found, strict=True)]
        raise StepError(
            "sharded parameters: expected all replicas to call the same blocks in the same order, since they gather a block together; "
            f"found {', '.join(texts)}; call the block on every rank and multiply what it adds by zero, draw what is "
            "skipped alike on all ranks, or leave out fully_shard and sharded_data_parallel_degree"
        )

    def _describe(self, number: int) -> str:
        if number >= BEGIN:
            return "a backward"
        return self._names[number] if self._tells_each else f"the calls {number:x}"
