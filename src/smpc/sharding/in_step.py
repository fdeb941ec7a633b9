"""Ranks that share sharded parameters, and whose batches take different ways through a model: `x = self.heads[task](x)`, a dropped layer.

torch gathers a unit where a rank calls it, and reduces its gradients where a backward comes to it. A rank that goes another way would
take one unit's message for another's, or wait without end. So ranks tell each other what they come to, and do the first of it together:

    rank 0 has come to    gather body     gather head 1    the end     a backward    reduce head 1 ...
    rank 1 has come to    gather body     gather head 0    the end     a backward    reduce head 0 ...
    done by all of them   gather body     gather head 0, gather head 1, the end ...  (`smpc.sharding.backwards`, with zeros)

What a rank takes part in without having come to it changes nothing of its own. So gradients are as in one process over all batches: a
parameter that some rank has used has the average over all, and one that none has used has none. A backward, and an update, are for all
ranks or for none: else a StepError says which rank has come to what. So it is where ranks wait in something that they do not tell each
other, such as experts that some of them divide, or units with a mesh of their own.

Messages are a few bytes between CPUs, over a group of their own. On a GPU nobody waits for it, and ranks tell no more than the gathers,
as a backward begins, and where a forward without gradients ends; these must be the same.
"""

from __future__ import annotations

import datetime
import functools
import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from smpc.errors import StepError
from smpc.sharding.backwards import BEGIN, COME_TO, Backwards, is_in_backward
from smpc.sharding.conversions import conversions_refused
from smpc.sharding.forward_writes.writes import KeptWrites
from smpc.sharding.used_parameters import Uses
from smpc.sharding.whole_parameters import WholeParameters

_UPDATE = BEGIN - 1


class InStep:
    """See above. `roots`: what is called, by name, and `units`: what all ranks of `mesh` gather together, by names that begin with their
    root's. `is_alone`: whether the models have no other units. `wholes`: what is averaged at the end of a backward. Collective."""

    def __init__(
        self,
        roots: Mapping[str, FSDPModule],
        units: Mapping[str, FSDPModule],
        mesh: DeviceMesh,
        *,
        is_alone: bool,
        wholes: WholeParameters | None = None,
    ) -> None:
        self._group, self._is_alone = message_group(ranks_of(mesh)), is_alone
        self._tells_each = mesh.device_type == "cpu"
        self._roots, self._units = dict(roots), dict(units)
        self._called: set[str] = set()  # the roots, since the last call began
        self._gathered: list[int] = []
        self.before_message: Callable[[], None] = lambda: None
        named = list(units)
        self.uses = Uses(units.values(), self._group)
        self._writes = KeptWrites(units.values(), self._group, torch.device("cpu"))
        self._is_written = False
        ends = [named.index(name) for name in roots if name in units]
        self._backwards = Backwards(units, self._tell_backward, is_alone=is_alone, uses=self.uses, ends=ends)
        self._backwards.before_gather = self._before_gather
        if wholes is not None:
            self._backwards.at_end = wholes.average
        self._first_forward: ExitStack | None = ExitStack()  # no parameters change their type in it
        self._first_forward_ends: list[RemovableHandle] = []
        for name in roots:
            root: nn.Module = roots[name]  # type: ignore[assignment]
            root.register_forward_pre_hook(functools.partial(self._enter, name), prepend=True)
            root.register_forward_hook(functools.partial(self._leave, name))
            self._first_forward_ends.append(
                root.register_forward_hook(
                    functools.partial(self._end_first_forward, self._first_forward), always_call=True
                )
            )
        handle = register_optimizer_step_pre_hook(functools.partial(_before_update, weakref.ref(self)))
        weakref.finalize(self, handle.remove)

    def begin(self) -> None:
        """A forward has begun without this one's knowledge."""
        if self._first_forward is not None:
            self._begin_first_forward(self._first_forward)
        if torch.is_grad_enabled():
            self._backwards.begin_call([True] * len(self._units), looks=False)

    def reset(self) -> None:
        """A batch is given up on all ranks: what it has called is never differentiated."""
        self._called.clear()
        self._gathered.clear()
        self._backwards.begin_call((), looks=False)
        self._backwards.close()

    def _enter(self, name: str, *_: object) -> None:
        if is_in_backward():
            return
        if self._first_forward is not None:
            self._begin_first_forward(self._first_forward)
        if not torch.is_grad_enabled():
            return
        if name in self._called or not self._backwards.is_called:
            self._called.clear()
            self._backwards.begin_call([True] * len(self._units), looks=False)
        self._called.add(name)

    def _leave(self, name: str, *_: object) -> None:
        if is_in_backward():
            return
        if self._tells_each:
            self._come_to(len(self._units) + list(self._roots).index(name))
        elif not torch.is_grad_enabled():
            self._tell(len(self._units))
            self._gathered.clear()

    def _before_gather(self, number: int) -> None:
        if self._tells_each:
            self._come_to(number)
        else:
            self._gathered.append(number)

    def _begin_first_forward(self, context: ExitStack) -> None:
        self._first_forward = None
        context.enter_context(conversions_refused(cast(list[nn.Module], [*self._roots.values()]), "fully_shard"))
        for handle in self._first_forward_ends:
            context.callback(handle.remove)

    @staticmethod
    def _end_first_forward(context: ExitStack, *_: object) -> None:
        context.close()

    def before_update(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to update parameters."""
        if not (self._tells_each or self._backwards.is_called or self._is_written):
            return
        own = {id(each) for unit in self._units.values() for each in unit.parameters()}  # type: ignore[attr-defined]
        if any(id(each) in own for group in optimizer.param_groups for each in group["params"]):
            if self._tells_each or self._backwards.is_called:
                self._come_to(_UPDATE)
            if self._is_written:
                self._is_written = False
                self._writes.settle()

    def _come_to(self, event: int) -> None:
        """This rank is about to do it: take part in all that comes before."""
        while (first := min(self._tell(event))) != event:
            self._take_part(first)

    def _tell_backward(self, own: int) -> list[int]:
        while True:
            told = self._tell(own)
            first = min(told)
            if first >= BEGIN:
                self._gathered.clear()
                return told
            self._take_part(first)

    def _take_part(self, event: int) -> None:
        if event < len(self._units):
            for root in self._roots.values():
                root._get_fsdp_state()._lazy_init()  # those that this rank has not called yet
            self._backwards.gather_with_others(event)

    def _tell(self, own: int) -> list[int]:
        """What all ranks have come to, or a StepError if they cannot go on together. Collective."""
        self.before_message()
        calls = 0 if self._tells_each else zlib.crc32(repr(self._gathered).encode())
        writes = int((own == _UPDATE or not self._tells_each) and self._writes.are_there())
        found = exchange([own, calls, writes], self._group, self._describe(own))
        told = [each[0] for each in found]
        self._is_written |= any(each[2] for each in found)
        first, kinds = min(told), {(number >= BEGIN) + (number >= COME_TO) for number in told}
        if len({each[1] for each in found}) > 1:
            self._refuse([f"the gathers {each[1]:x}" for each in found])
        if (first >= _UPDATE and len(kinds) > 1) or (first < BEGIN and first != max(told) and not self._is_alone):
            self._refuse([self._describe(number) for number in told])
        return told

    def _refuse(self, texts: Sequence[str]) -> NoReturn:
        ranks = dist.get_process_group_ranks(self._group)
        found = ", ".join(f"rank {rank}: {text}" for rank, text in zip(ranks, texts, strict=True))
        raise StepError(
            f"sharded parameters: expected all ranks to come to the same, found {found}; call the same blocks, backwards and updates on "
            "all ranks, and multiply what a rank leaves out of its loss by zero"
        )

    def _describe(self, number: int) -> str:
        if number >= BEGIN:
            return "a backward"
        if number == _UPDATE:
            return "an update of an optimizer"
        if number < len(self._units):
            return list(self._units)[number] or "the model"
        return f"the end of {list(self._roots)[number - len(self._units)] or 'the model'}"


def _before_update(found: weakref.ref[InStep], optimizer: torch.optim.Optimizer, *_: Any) -> None:
    in_step = found()
    if in_step is not None:
        in_step.before_update(optimizer)


def ranks_of(mesh: DeviceMesh) -> list[int]:
    """All ranks of a mesh, in order."""
    return sorted(int(rank) for rank in mesh.mesh.flatten())


def message_group(ranks: list[int]) -> dist.ProcessGroup:
    """A group of ranks for messages between CPUs. Collective over them."""
    made: dist.ProcessGroup = dist.new_group(ranks, backend="gloo", timeout=_patience(), use_local_synchronization=True)
    return made


def exchange(message: Sequence[int], group: dist.ProcessGroup, come_to: str) -> list[list[int]]:
    """The messages of all ranks of a group. `come_to`: what this one is about to do, for the StepError if others are gone. Collective."""
    own = torch.tensor(message, dtype=torch.int64)
    found = [torch.zeros_like(own) for _ in range(group.size())]
    try:
        dist.all_gather(found, own, group=group)
    except RuntimeError as error:
        raise StepError(
            f"sharded parameters: expected all ranks to tell what they come to, found no word of some when this one has come to "
            f"{come_to}; they have failed, or wait elsewhere: call models, backwards and updates on all ranks: {error}"
        ) from error
    return [each.tolist() for each in found]


def _patience() -> datetime.timedelta | None:
    """How long the default group waits."""
    own = dist.distributed_c10d._get_default_group()
    device = own._device_types[0] if own._device_types else torch.device("cpu")
    found: Tensor | Any = getattr(own._get_backend(device), "options", None)
    return getattr(found, "_timeout", None)
