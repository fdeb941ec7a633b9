"""Ranks whose batches take other ways through a model that FullyShardedDataParallel shards are told, before they wait for each other.

torch gathers a unit where a rank calls it, and reduces its gradients where a backward comes to it. Ranks that call or differentiate other
units would take one unit's message for another's, or wait without end. So each says what it comes to, and all must have come to the same:

    rank 0    a gather of blocks.0    a gather of blocks.1    --.
    rank 1    a gather of blocks.0    a gather of blocks.2    --+--> StepError on both, which says so

With `fully_shard` ranks take part in what others come to instead (`smpc.sharding.in_step`).

A parameter that a unit has made part of its flat one trains no more. A gradient or an update of it, by a module outside of all units
that shares it or by an optimizer made earlier, is a UsageError.

    what a rank has come to                                                             is told to
    a gather; the end of a forward that gathers, of a backward that does not reduce     the ranks that share parts
    a reduction; the end of a backward that reduces; a norm; an update                  and then those that have the same parts

After a forward torch keeps whole what it is about to differentiate, and computes with it until then. Where no backward has come, writes
into the parts (an average of weights in their place, for an evaluation) would not be seen by the next forward, nor be in a state dict:
units let go first.

A rank that fails tells those that have the same parts, without waiting for them. Messages are a few bytes between CPUs.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, _flat_param, _runtime_utils
from torch.distributed.fsdp._common_utils import HandleTrainingState
from torch.distributed.fsdp._flat_param import RESHARD_AFTER_FORWARD_HANDLE_STRATEGIES
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from smpc.errors import StepError, UsageError
from smpc.in_place.model_copy import plain_name
from smpc.optimizers.torch_patches import held_by, replace_method
from smpc.sharding.backwards import is_in_backward
from smpc.sharding.in_step import exchange, message_group

_GATHER, _REDUCE, _FORWARD, _BACKWARD, _NORM, _UPDATE = _EVENTS = range(6)
_TEXTS = (
    "a gather of",
    "a reduction of gradients of",
    "the end of a forward of",
    "the end of a backward of",
    "a norm of",
    "an update of",
)
_FAILED = -1


class FlatUnits:
    """See above. The units of a session, in the order in which the script makes them: the same on all ranks."""

    def __init__(self) -> None:
        self._roots: weakref.WeakSet[FullyShardedDataParallel] = weakref.WeakSet()
        self._undone: weakref.WeakSet[FullyShardedDataParallel] = (
            weakref.WeakSet()
        )  # roots since a forward, until a backward
        self._made: list[weakref.ref[FullyShardedDataParallel]] = []
        self._of_handles: weakref.WeakKeyDictionary[Any, tuple[int, Any]] = (
            weakref.WeakKeyDictionary()
        )  # (number, root)
        self._numbers: weakref.WeakKeyDictionary[FullyShardedDataParallel, int] = weakref.WeakKeyDictionary()
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._flattened = WeakIdKeyDictionary()  # parameters that are part of a unit's flat one, with their names in it

    def note(self, unit: FullyShardedDataParallel, before: Mapping[str, nn.Parameter]) -> None:
        """The script has made a unit, of a module that had these parameters."""
        self._numbers[unit] = len(self._made)
        self._made.append(weakref.ref(unit))
        left = {id(parameter) for parameter in unit.parameters()}
        for name, parameter in before.items():
            if id(parameter) not in left:
                text = f"{type(unit.module).__name__}.{name}"
                if parameter.requires_grad and not self.flattened(parameter):
                    refuse = functools.partial(_refuse_flattened, "a gradient", text)
                    parameter.register_hook(refuse)  # type: ignore[no-untyped-call]
                self._flattened[parameter] = text

    def flattened(self, parameter: nn.Parameter) -> str:
        """The name of a parameter in the unit that has its values in a flat one; "" if none has."""
        return str(self._flattened.get(parameter, ""))  # type: ignore[no-untyped-call]

    def patch(self) -> list[Callable[[], None]]:
        """Have ranks tell each other; the functions that take it back."""
        return [
            replace_method(_runtime_utils, "_share_state_and_init_handle_attrs", self._beginning),
            replace_method(FullyShardedDataParallel, "forward", self._forward),
            replace_method(_flat_param.FlatParamHandle, "unshard", self._unshard),
            replace_method(_runtime_utils, "_register_post_backward_hook", _registering),
            replace_method(_runtime_utils, "_reduce_grad", self._reduce),
            replace_method(_runtime_utils, "_reduce_grad_no_shard", self._reduce),
            replace_method(_runtime_utils, "_post_backward_final_callback", self._end_of_backward),
            replace_method(FullyShardedDataParallel, "clip_grad_norm_", self._norm),
            register_optimizer_step_pre_hook(self._before_update).remove,
        ]

    def _beginning(self, original: Callable[..., None]) -> Callable[..., None]:
        def share_state(state: Any, root: FullyShardedDataParallel) -> None:
            original(state, root)
            if root not in self._numbers or (state.process_group.size() == 1 and _replicas(state) is None):
                return
            self._roots.add(root)
            for each in state._all_fsdp_states:
                if each._handle is not None and each in self._numbers:
                    self._of_handles[each._handle] = self._numbers[each], weakref.ref(root)

        return share_state

    def _forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(unit: FullyShardedDataParallel, *args: Any, **kwargs: Any) -> Any:
            if unit in self._undone and not is_in_backward():
                let_go(unit)
            gathers = unit._is_root is not False and _gathers(unit)
            output = original(unit, *args, **kwargs)
            if unit in self._roots and not is_in_backward():
                self._undone.add(unit)
                if gathers:
                    self._tell(_FORWARD, unit, unit)
                if not torch.is_grad_enabled():
                    let_go(unit)
            return output

        return forward

    def _unshard(self, original: Callable[..., None]) -> Callable[..., None]:
        def unshard(handle: Any) -> None:
            if handle._training_state is HandleTrainingState.SUMMON_FULL_PARAMS and _is_left_whole(handle):
                handle.reshard(True)
            if handle.needs_unshard():
                self._come_to(_GATHER, handle)
            original(handle)

        return unshard

    def _reduce(self, original: Callable[..., None]) -> Callable[..., None]:
        def reduce(state: Any, handle: Any) -> None:
            self._come_to(_REDUCE, handle)
            original(state, handle)

        return reduce

    def _end_of_backward(self, original: Callable[..., None]) -> Callable[..., None]:
        def end(state: Any, root: Any) -> None:
            if root in self._roots and (state._sync_gradients or any(map(_reshards, state._all_fsdp_states))):
                self._tell(_BACKWARD, root, root)
            self._undone.discard(root)
            original(state, root)

        return end

    def _norm(self, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def clip_grad_norm_(unit: FullyShardedDataParallel, *args: Any, **kwargs: Any) -> Tensor:
            if unit in self._roots:
                self._tell(_NORM, unit, unit)
            return original(unit, *args, **kwargs)

        return clip_grad_norm_

    def _before_update(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        held = held_by(optimizer)
        for each in held:
            name = self.flattened(each) if isinstance(each, nn.Parameter) else ""
            if name:
                _refuse_flattened("an update", name)
        given = {id(each) for each in held}
        for root in sorted(self._roots, key=self._numbers.__getitem__):
            if any(id(each) in given for each in root.parameters()):
                self._tell(_UPDATE, root, root)

    def _come_to(self, event: int, handle: Any) -> None:
        number, ref = self._of_handles.get(handle, (0, lambda: None))
        root = ref()
        if root is not None:
            self._tell(event, self._made[number](), root)

    def _tell(self, event: int, unit: Any, root: Any) -> None:
        """Raise the StepError unless all ranks have come to the same. Collective."""
        own = event + len(_EVENTS) * self._numbers[unit]
        replicas = _replicas(root)
        self._compare(own, root.process_group, replicas)
        if replicas is not None and (
            event in (_REDUCE, _NORM, _UPDATE) or (event == _BACKWARD and root._sync_gradients)
        ):
            self._compare(own, replicas, None)

    def _compare(self, own: int, among: dist.ProcessGroup, waiting: dist.ProcessGroup | None) -> None:
        """`waiting`: who must hear of a failure."""
        if among.size() == 1:
            return
        group = self._group(among)
        found = [each[0] for each in exchange([own], group, self._describe(own))]
        if all(each == own for each in found):
            return
        if waiting is not None and _FAILED not in found:
            message = torch.tensor([_FAILED])
            dist.all_gather(
                [message.clone() for _ in range(waiting.size())], message, self._group(waiting), async_op=True
            )
        self._refuse(dist.get_process_group_ranks(among), found)

    def _group(self, like: dist.ProcessGroup) -> dist.ProcessGroup:
        ranks = dist.get_process_group_ranks(like)
        if tuple(ranks) not in self._groups:
            self._groups[tuple(ranks)] = message_group(ranks)
        return self._groups[tuple(ranks)]

    def _refuse(self, ranks: Sequence[int], found: Sequence[int]) -> NoReturn:
        texts = [f"rank {rank}: {self._describe(number)}" for rank, number in zip(ranks, found, strict=True)]
        raise StepError(
            f"FullyShardedDataParallel: expected all ranks to come to the same, found {', '.join(texts)}; call the same blocks, backwards "
            "and updates on all ranks, and multiply what a rank leaves out by zero, or use fully_shard, with which ranks may differ"
        )

    def _describe(self, number: int) -> str:
        if number == _FAILED:
            return "an error"
        number, event = divmod(number, len(_EVENTS))
        unit = self._made[number]()
        for root in self._roots:
            for name, module in root.named_modules():
                if module is unit:
                    return f"{_TEXTS[event]} {plain_name(name) or 'the model'}"
        return f"{_TEXTS[event]} another model"


def _refuse_flattened(what: str, name: str, *_: object) -> NoReturn:
    raise UsageError(
        f"FullyShardedDataParallel: expected gradients and updates of its own parameters, found {what} of {name} as it was before it "
        "became part of a unit's flat parameter; make optimizers after the units, make one unit of all modules that share the parameter, "
        "or use fully_shard"
    )


def _registering(original: Callable[..., None]) -> Callable[..., None]:
    """Hooks of a forward that had no backward are of another kind, if the script has frozen the unit since, or trains it again."""

    def register(state: Any, handle: Any) -> None:
        flat = None if handle is None or not torch.is_grad_enabled() else handle.flat_param
        hooks = getattr(flat, "_post_backward_hook_state", None)
        if hooks is not None and len(hooks) != 1 + handle.flat_param.requires_grad:
            hooks[-1].remove()
            del handle.flat_param._post_backward_hook_state
        original(state, handle)

    return register


def _replicas(state: Any) -> dist.ProcessGroup | None:
    """The ranks that have the same parts as this one; None if parts have no copies."""
    return getattr(state, "_inter_node_pg", None)


def let_go(root: Any) -> None:
    """Free what units have left whole."""
    for each in root._all_fsdp_states:
        handle = each._handle
        if handle is not None and _is_left_whole(handle):
            _runtime_utils._reshard(each, handle, True)


def _is_left_whole(handle: Any) -> bool:
    return bool(handle.uses_sharded_strategy and not handle.needs_unshard())


def _gathers(root: Any) -> bool:
    """Whether a forward of a root may gather units."""
    states = FullyShardedDataParallel.fsdp_modules(root) if root._is_root is None else root._all_fsdp_states
    handles = [each._handle for each in states if each._handle is not None]
    return any(each.needs_unshard() if root._is_root else each.uses_sharded_strategy for each in handles)


def _reshards(state: Any) -> bool:
    """Whether a unit is in parts again after its forward."""
    handle = state._handle
    return (
        handle is not None
        and not state._is_root
        and handle._sharding_strategy in RESHARD_AFTER_FORWARD_HANDLE_STRATEGIES
    )
