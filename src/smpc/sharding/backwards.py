"""Backwards of sharded blocks that all ranks have called, but that not all of them differentiate: `if mask.any(): loss = loss + aux(x)`.

torch gathers and reduces a block where the backward comes to it. A rank that does not come there would take the next block's message for
this one's, or wait without end. So ranks tell each other, before a backward's first message, which calls it will reach; autograd knows.
Mostly all reach the same ones, and nothing more is told. Otherwise each rank says, before each message, what it has come to. The earliest
of these is done by all of them; who has not come to it takes part with zeros, as a process would whose gradient is averaged:

    rank 0 has come to    reduce aux      reduce body     the end
    rank 1 has come to    reduce body     reduce body     the end
    done by both          reduce aux      reduce body     the end

Any order is right, as each rank's gradients are summed once; the order of the calls, reversed, has the fewest messages. What was called
without gradients may be repeated with them in a backward (`checkpoint(use_reentrant=True)`), and of the model's calls only the last is
remembered. Where a backward may reach others, ranks say at once what they have come to. A rank that has called nothing, and knows no order
of calls, `follow`s the others.
"""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import Node
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.utils._pytree import tree_leaves

from smpc.errors import StepError
from smpc.sharding.used_parameters import Uses, has_gradient

BEGIN, COME_TO = 1 << 40, 1 << 41  # messages: which calls a backward reaches; COME_TO + what it has come to
_END = COME_TO - 1
_MADE = _END - 1  # what only the ranks that have come to it can do
_AGAIN = 1 << 30  # what is computed again in a backward: all ranks know its parameter


class Backwards:
    """See above. `units`: what all ranks gather together, by name; `tell`: gives all ranks' messages for this rank's, which are of one
    kind. `is_alone`: whether nothing else in a backward waits for other ranks, such as experts that they divide; else all must reach
    the same. `uses`: completes gradients where no step does. `ends`: of which units torch ends a backward; by default of the last."""

    def __init__(
        self,
        units: Mapping[str, FSDPModule],
        tell: Callable[[int], list[int]],
        *,
        is_alone: bool = True,
        uses: Uses | None = None,
        ends: Sequence[int] | None = None,
    ) -> None:
        self._tell, self._is_alone, self._names, self._uses = tell, is_alone, list(units), uses
        # Of the outermost ones: torch's state, and what it does last.
        self._finals: dict[int, tuple[Any, Callable[[], None]]] = {}
        self._groups: list[Any] = []
        self._take_part: dict[int, Callable[[], None]] = {}  # in what others have come to
        self._counted: Sequence[bool] = ()
        self._calls: list[tuple[int, list[Node]]] = []  # of units and uses, of the last call of the model
        self._order: dict[int, None] = {}  # what these have to tell, by the last of several
        self._num_calls = self._num_uses = 0
        self.take_part_again: Callable[[int], None] = lambda number: None
        self.before_gather: Callable[[int], None] = lambda number: None  # outside of backwards
        self.at_end: Callable[[], None] = lambda: None
        self._is_open = self._is_called = self._is_blind = self._is_under_way = self._differs = self._is_ending = False
        self._completes = False
        self.is_followed = False  # by ranks that know no order of calls
        self._finished: set[int] = set()
        for number, unit in enumerate(units.values()):
            state = unit._get_fsdp_state()
            final = self._watch(number, unit, state)
            if number in (ends if ends is not None else [len(units) - 1]):
                self._finals[number] = state, final
        self._is_ordered = ends is not None
        if self._is_ordered:
            self._order = dict.fromkeys(_events_in_order(self._names))

    def _watch(self, number: int, unit: Any, state: Any) -> Callable[[], None]:
        """Take the place of what torch does for a unit; what it does at the end of a backward."""
        group = state._fsdp_param_group
        self._groups.append(group)
        final: Callable[[], None] = state._root_post_backward_final_callback
        state._root_post_backward_final_callback = functools.partial(self._finish, number, final)
        if group is None:
            return final
        self._take_part[2 * number] = functools.partial(self._reduce_with_others, number, group, group.post_backward)
        self._take_part[2 * number + 1] = functools.partial(_gather_with_others, group, group.unshard)
        group.unshard = functools.partial(self._gather, number, group, group.unshard)
        group.pre_backward = functools.partial(self._reach, group.pre_backward)
        group.post_backward = functools.partial(self._reduce, number, group, group.post_backward)
        module: nn.Module = unit
        module.register_forward_pre_hook(functools.partial(_ready_again, state, group), prepend=True)
        module.register_forward_pre_hook(functools.partial(self._enter, number), with_kwargs=True)
        module.register_forward_hook(functools.partial(self._leave, number))
        return final

    @property
    def is_open(self) -> bool:
        """Whether a backward of the last call may communicate."""
        return self._is_open

    @property
    def is_called(self) -> bool:
        """Whether the last call waits for its backward."""
        return self._is_called

    def begin_call(self, counted: Sequence[bool], *, looks: bool) -> None:
        """The model is called. `counted`: of which units gathers and reductions in its backward communicate; `looks`: whether parameters
        may be used outside of units."""
        self._is_blind = self._is_called  # and of that call nothing is known any more
        self.close()
        if not self._is_ordered:
            self._order.clear()
        self._num_calls += 1
        self._num_uses = 0
        self._is_under_way = self._is_ending = self._differs = False
        self._finished.clear()
        self._counted = counted
        self._is_open = self._is_called = torch.is_grad_enabled() and (looks or any(counted))

    def end_call(self) -> None:
        """All backwards of the call are over: ranks whose own has reached nothing take part in the others'. Collective."""
        if self._is_called and not self._is_under_way:
            self._begin()
            self._end()
            self._finish_all()
        self.close()

    def follow(self) -> None:
        """On a rank without a call: take part in the backward that the others have begun. Collective."""
        self._is_under_way, self._is_called, self._differs = True, False, True
        self._end()
        self._finish_all()

    def close(self) -> None:
        """What comes now is no backward of the call."""
        self._calls.clear()
        for event in range(2 * len(self._names), 2 * len(self._names) + self._num_uses):
            self._take_part.pop(event, None)
        self._is_open = self._is_called = False

    def resume(self) -> None:
        """The call is differentiated once more."""
        self._is_open = self._is_blind = True

    def note_use(self, nodes: list[Node], take_part: Callable[[], None]) -> Callable[[], None]:
        """A parameter was gathered for a use; returns what to call before its gradient is reduced. `take_part`: in that, without one."""
        event = 2 * len(self._names) + self._num_uses
        self._num_uses += 1
        if self._is_open:
            self._take_part[event] = take_part
            self._calls.append((event, nodes))
            self._order[event] = None
        return functools.partial(self._come_to_use, event, self._num_calls)

    def come_to_again(self, number: int | None) -> None:
        """Before a parameter is gathered, or its gradient reduced, for a use that a backward repeats. None: of what was made of some."""
        if not self._is_acting():
            return
        self._come_to(_MADE if number is None else _AGAIN + number)

    def _come_to_use(self, event: int, num_calls: int) -> None:
        if self._is_acting() and num_calls == self._num_calls:
            self._come_to(event)

    def _is_acting(self) -> bool:
        return self._is_open and is_in_backward()

    def _enter(self, number: int, _: object, args: Any, kwargs: Any) -> None:
        self._note(2 * number, (args, kwargs))

    def _leave(self, number: int, _: object, args: Any, output: Any) -> None:
        self._note(2 * number + 1, output)

    def _note(self, event: int, values: Any) -> None:
        if not self._is_open or not self._counted[event // 2] or is_in_backward():
            return
        if not self._is_ordered:
            self._order.pop(event, None)
            self._order[event] = None
        if torch.is_grad_enabled():
            self._calls.append((event, list(_nodes(values))))
        else:
            self._is_blind = True

    def _begin(self) -> None:
        """Before the first message of a backward, or for a call without one."""
        if self._is_under_way:
            return
        self._is_under_way, self._is_called = True, False
        if is_in_backward():
            Variable._execution_engine.queue_callback(self._finish_late)
        reach = torch._C._will_engine_execute_node if is_in_backward() else _reaches_nothing
        reached = bytes(any(reach(node) for node in nodes) for _, nodes in self._calls)
        gradients = b"" if self._uses is None else self._uses.reached(reach)
        told = self._tell(BEGIN + zlib.crc32(reached + gradients))
        self._differs = self._is_blind or any(number != told[0] for number in told)
        self._completes = self._differs and self._uses is not None and not self._uses.is_open
        if self._completes and self._uses is not None:
            self._uses.begin()
        if any(number != told[0] for number in told) and not self._is_alone:
            self._refuse(reached)

    def _refuse(self, reached: bytes) -> None:
        """Raise the error for the first call that only some ranks reach. Collective."""
        for (event, _), own in zip(self._calls, reached, strict=True):
            told = self._tell(BEGIN + own)
            if any(number != told[0] for number in told):
                ranks = ", ".join(str(rank) for rank, number in enumerate(told) if number == BEGIN)
                raise StepError(
                    "sharded parameters: expected the backwards of all replicas to reach the same blocks, since experts that ranks divide "
                    f"wait for each other in them; found that of replica {ranks} without {self._name(event)}; multiply what a rank "
                    "leaves out of its loss by zero"
                )

    def _name(self, event: int) -> str:
        number = event // 2
        return (self._names[number] or "the model") if number < len(self._names) else "a use of a parameter"

    def _come_to(self, event: int) -> None:
        """This rank is about to do it: take part in all that comes before."""
        self._begin()
        while self._differs:
            told = [number - COME_TO for number in self._tell(COME_TO + event)]
            if _MADE in told:
                raise StepError(
                    "sharded parameters: expected the backwards of all replicas to reach the same blocks, since one computes again what "
                    "uses values made of a parameter outside of its block, found different ones; multiply what a rank leaves out of its "
                    "loss by zero"
                )
            calls = () if self.is_followed else reversed(self._order)
            places = {each: place for place, each in enumerate(calls)}
            first = min(told, key=lambda each: (places.get(each, len(places)), each))
            if first == event:
                return
            if first >= _AGAIN:
                self.take_part_again(first - _AGAIN)
            else:
                self._take_part[first]()

    def _reach(self, original: Callable[..., None], default_prefetch: bool, *unused: Any) -> None:
        """In place of what torch does where a gradient reaches a unit's outputs."""
        if self._is_acting():
            self._begin()
        original(default_prefetch and not self._differs)

    def _gather(self, number: int, group: Any, original: Callable[..., None], async_op: bool = False) -> None:
        """In place of torch's gather."""
        if not group.is_unsharded and group._all_gather_result is None:
            if self._is_acting():
                self._come_to(2 * number + 1)
            elif not is_in_backward():
                self.before_gather(number)
        original(async_op)

    def gather_with_others(self, number: int) -> None:
        """In a gather outside of backwards that another rank has come to, and this one has not."""
        group = self._groups[number]
        is_whole = group.is_unsharded
        self._take_part[2 * number + 1]()
        if not is_whole:
            group._to_sharded()

    def _reduce(self, number: int, group: Any, original: Callable[..., None], *unused: Any) -> None:
        """In place of torch's end of a unit's backward."""
        if self._is_acting() and group.reduce_grads:
            if group._training_state is TrainingState.IDLE and not self._is_ending:
                group._training_state = TrainingState.PRE_BACKWARD  # gradients came by what is no output
            if group._training_state is not TrainingState.IDLE and _trains(group):
                self._come_to(2 * number)
        original()

    def _reduce_with_others(self, number: int, group: Any, original: Callable[..., None]) -> None:
        group.wait_for_unshard()  # of what was gathered ahead of a use that has not come
        if group._training_state is TrainingState.IDLE:
            group._training_state = TrainingState.PRE_BACKWARD
        original()

    def _finish(self, number: int, original: Callable[[], None]) -> None:
        """In place of what torch does at the end of a backward."""
        if self._is_under_way:
            self._end()
            self._finished.add(number)
        original()

    def _finish_late(self) -> None:
        """At the end of a backward: torch does not come to it, where gradients reach units by what is no output alone."""
        if self._is_under_way:
            self._end()
            Variable._execution_engine.queue_callback(self._finish_all)  # after all that torch has to do

    def _end(self) -> None:
        """Nothing more is computed in a backward."""
        if self._is_ending:
            return
        self._is_ending = True
        if self._differs:
            self._end_together()
        self.at_end()

    def _end_together(self) -> None:
        for number, group in enumerate(self._groups):
            if group is not None and _is_begun(group):
                group.post_backward()
            elif group is not None and _waits(group):
                self._come_to(2 * number)
                self._take_part[2 * number]()
        self._come_to(_END)
        if self._completes and self._uses is not None:
            self._uses.end()

    def _finish_all(self) -> None:
        """A backward is over."""
        try:
            for number, (state, final) in self._finals.items():
                was_called = state._is_root is not None  # a model may have been called on no rank yet
                if number not in self._finished and was_called:
                    final()
        finally:
            self._finished.clear()
            self._is_ending = self._is_under_way = self._differs = False


def is_in_backward() -> bool:
    """Whether autograd is at work."""
    return torch._C._current_graph_task_id() != -1


def _ready_again(state: Any, group: Any, *_: object) -> None:
    """Before a backward runs a unit again whose gradients it has reduced already, for another call of the forward.

    With `checkpoint(use_reentrant=True)` torch takes the rest of such a backward to be the unit's own. It then reduces none of it.
    """
    is_over = (
        state._training_state is TrainingState.PRE_BACKWARD and group._training_state is TrainingState.POST_BACKWARD
    )
    if is_over and is_in_backward() and torch.is_grad_enabled():
        state._training_state = TrainingState.IDLE


def _reaches_nothing(node: Node) -> bool:
    return False


def _nodes(values: Any) -> Iterator[Node]:
    for leaf in tree_leaves(values):
        if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
            yield leaf.grad_fn
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            yield from _nodes([getattr(leaf, field.name, None) for field in dataclasses.fields(leaf)])


def _trains(group: Any) -> bool:
    return any(each.sharded_param.requires_grad for each in group.fsdp_params)


def _is_begun(group: Any) -> bool:
    return group._training_state not in (TrainingState.IDLE, TrainingState.POST_BACKWARD)


def _waits(group: Any) -> bool:
    """Whether gradients of earlier backwards wait to be reduced."""
    is_idle = group._training_state is TrainingState.IDLE
    return is_idle and group.reduce_grads and any(has_gradient(each) for each in group.fsdp_params)


def _events_in_order(names: Sequence[str]) -> Iterator[int]:
    """Of calls of units in which those are called that are inside of them, by their names."""
    inside: list[str] = []
    for name in sorted(names, key=lambda name: _path(name)):
        while inside and not _is_inside(name, inside[-1]):
            yield 2 * names.index(inside.pop()) + 1
        inside.append(name)
        yield 2 * names.index(name)
    for name in reversed(inside):
        yield 2 * names.index(name) + 1


def _path(name: str) -> list[tuple[int, str]]:
    """What sorts names as their modules are nested, and numbers as such."""
    return [(int(part) if part.isdigit() else -1, part) for part in name.split(".") if part]


def _is_inside(name: str, outer: str) -> bool:
    return not outer or name.startswith(f"{outer}.")


def _gather_with_others(group: Any, original: Callable[..., None]) -> None:
    group.wait_for_unshard()
    if group.is_unsharded:  # for a use of this rank, which finds the same afterwards
        group._to_sharded()
    original(False)
    group.wait_for_unshard()
