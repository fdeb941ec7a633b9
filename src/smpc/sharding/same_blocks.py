"""Replicas that hold parts of blocks call the same blocks, in the same order, or a StepError says which rank calls which.

Ranks gather a block together when it is called. Others would gather one block's parameters in the place of another's, without a word:

    rank 0    gather block 0    gather block 1        a layer that is dropped by chance, or chosen by the batch
    rank 1    gather block 0    gather block 2

Over gloo ranks tell each other which block comes next; over other backends, which came, at the end of the model's forward. Blocks that are
whole for a training step need not be told: they are gathered when it begins. Parameters that are used outside of their blocks
(`smpc.sharding.outside_uses`) are told like blocks. Backwards may reach different blocks: see `smpc.sharding.backwards`.

Ranks without a batch may follow the others (`let_follow`). Then each gather is told, over all backends, and so is the end of a call:

    rank 0    gather block 0    gather block 1    a backward    ...    the end of the call
    rank 1    follow(): the same gathers and reductions, with zeros, until that end
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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
_FOLLOWS = -1


@dataclass(frozen=True, slots=True)
class Use:
    """A parameter that is gathered outside of its block; "": what was made of some. `is_kept`: its gradient may come."""

    name: str
    is_kept: bool


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The end of a call of the model that ranks follow. `looks`: for uses outside of blocks; `has_gradients`: they were enabled."""

    looks: bool
    has_gradients: bool


_ENDS = [CallEnd(looks, has_gradients) for looks in (False, True) for has_gradients in (False, True)]


class SameBlocks:
    """See above. `group`: all ranks that gather the units; a unit with a mesh of its own is left alone. `parameters`: names."""

    def __init__(
        self, module: nn.Module, units: Iterable[str | Unit], group: dist.ProcessGroup, parameters: Iterable[str]
    ) -> None:
        self._group, self._is_told, self._trains, self._looks = group, False, False, False
        self._is_on_cpu = self._tells_each = "gloo" in str(dist.get_backend_config(group))
        self._is_followed = False
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
        self._uses = [Use(name, is_kept) for name in (*parameters, "") for is_kept in (False, True)]
        self._first_use = len(self._names)
        self._names += [f"a use of {use.name or 'what was made of parts'}" for use in self._uses]
        self._phases = {name: number for number, name in enumerate(_PHASES, len(self._names))}
        self._names += _PHASES
        self._first_end = len(self._names)
        self._names += ["the end of a call"] * len(_ENDS)

    @property
    def backwards(self) -> Backwards:
        """What the backwards of these blocks reach."""
        return self._backwards

    def let_follow(self, is_followed: bool) -> None:
        """From now on: whether some ranks follow what the others do."""
        self._is_followed = self._backwards.is_followed = is_followed
        self._tells_each = is_followed or self._is_on_cpu
        self._backwards.before_gather = self._tell_gather if is_followed else lambda number: None

    def follow(self, take_part_in_use: Callable[[Use], None]) -> CallEnd:
        """On a rank without a batch: take part in what the others gather and reduce in one call of the model and its backwards. Returns its
        end. Collective."""
        self._backwards.begin_call([True] * len(self._is_whole), looks=True)
        while True:
            found = self._numbers_of_ranks(_FOLLOWS)
            numbers = {number for number in found if number != _FOLLOWS}
            number = min(numbers)
            if len(numbers) > 1 and number < BEGIN:
                self._refuse(found)
            if number >= BEGIN:
                self._backwards.follow()
            elif number >= self._first_end:
                self._backwards.close()
                return _ENDS[number - self._first_end]
            elif number >= self._first_use:
                take_part_in_use(self._uses[number - self._first_use])
            elif number:
                self._backwards.gather_with_others(number - 1)

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
        if self._is_followed:
            self._compare(self._first_end + _ENDS.index(CallEnd(looks, torch.is_grad_enabled())))

    def tell_phase(self, name: str) -> None:
        """A step begins or ends, by one of the names above; outside of steps that is around the model's call and its backward."""
        if self._tells_each:
            self._compare(self._phases[name])
        if name != START:
            self._backwards.close()
        elif is_in_backward():
            self._backwards.resume()

    def _enter(self, number: int, is_whole: bool, *_: object) -> None:
        if not self._is_told or (self._trains and is_whole) or is_in_backward() or self._is_followed:
            return
        self._tell(number)

    def _tell_gather(self, number: int) -> None:
        if self._is_told:
            self._compare(number + 1)

    def tell_use(self, use: Use) -> None:
        """It is about to be gathered."""
        self._tell(self._first_use + self._uses.index(use))
        if self._is_followed and not use.name:
            raise no_part_in_what_was_made()

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
        kinds = {(number >= BEGIN) + (number >= COME_TO) for number in found if number != _FOLLOWS}
        if len(kinds) > 1:
            self._refuse(found)
        return found

    def _numbers_of_ranks(self, own: int) -> list[int]:
        device = "cpu" if self._is_on_cpu else torch.accelerator.current_accelerator()
        told = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(self._group.size())]
        dist.all_gather(told, torch.full_like(told[0], own), group=self._group)
        return [int(each) for each in told]

    def _compare(self, own: int) -> None:
        found = self._numbers_of_ranks(own)
        if any(number not in (own, _FOLLOWS) for number in found):
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
        if number == _FOLLOWS:
            return "no batch"
        return self._names[number] if self._tells_each else f"the calls {number:x}"


def no_part_in_what_was_made() -> StepError:
    """The error of all ranks where those without a batch would have to gather what others have made of parts."""
    return StepError(
        "sharded parameters: expected uses of parameters outside of their blocks to be of parameters themselves, as some ranks have no "
        "batch and take part (model.join), found a use of what was made of parts; use it in its block, or give all ranks as many batches"
    )
