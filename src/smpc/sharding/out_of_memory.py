"""Ranks that tell each other, before each collective call of a sharded model, whether one of them has run out of memory.

    agreement = Agreement.over(model)                 every rank, once; the model works as before
    try:
        with agreement.watched():
            loss(model(batch)).backward()             raises PeerMemoryError, where another rank has failed
        failed = agreement.tell(False)
    except torch.OutOfMemoryError:
        failed = agreement.tell(True)
    if failed:                                        on all ranks, or on none
        agreement.recover()                           and the batch again, with less

    rank 0    gather  compute  gather  compute        reduce
    rank 1    gather  compute  gather  out of memory
    told      no      .        no      .              yes: rank 0 does not begin what rank 1 would never join

All ranks report in one order, because all communicate in one order. Everything that may fail comes before the report: the memory of a call
is allocated by then. Sliced layers communicate while they compute: `watched` reports before those calls, too. `recover` restores torch's
own state (`reset_iter_state`) and drops gradients of whole parameters, to which the next backward would add: without that, training would
continue with wrong numbers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from smpc.errors import ConfigUnsupportedError, PeerMemoryError
from smpc.sharding.in_step import InStep
from smpc.sharding.shard import own_parameters


@dataclass(slots=True)
class Agreement:
    """`modules`: the units of a sharded model, outer ones first. `is_sliced`: whether layers are. Made by `over`."""

    modules: tuple[FSDPModule, ...] = ()
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    is_sliced: bool = False
    in_step: InStep | None = None

    @classmethod
    def over(
        cls, model: nn.Module, device: torch.device, *, is_sliced: bool = False, in_step: InStep | None = None
    ) -> Agreement:
        """For all units of a model, none if it is not sharded. `is_sliced`: whether its layers communicate, too. `in_step`: what else
        ranks tell each other.

        Raises ConfigUnsupportedError, if this torch cannot give up a backward.
        """
        modules = tuple(module for module in model.modules() if isinstance(module, FSDPModule))
        if modules and not callable(getattr(FSDPModule, "reset_iter_state", None)):
            raise ConfigUnsupportedError(
                f"device_train_microbatch_size: 'auto' with FSDP needs FSDPModule.reset_iter_state, which torch {torch.__version__} does "
                "not have; give a number, or use a newer torch"
            )
        has_gloo = "gloo" in str(distributed.get_backend_config())
        found = cls(modules, torch.device("cpu") if has_gloo else device, is_sliced, in_step)
        if in_step is not None:
            in_step.before_message = found.check
        for module in modules if distributed.get_world_size() > 1 else ():
            module.set_custom_all_gather(cast("Any", _Gather(found)))
            module.set_custom_reduce_scatter(cast("Any", _Reduce(found, _num_shards(module) == 1)))
        return found

    def tell(self, failed: bool) -> bool:
        """Whether any rank says so. Collective."""
        flag = torch.tensor([int(failed)], device=self.device)
        distributed.all_reduce(flag, distributed.ReduceOp.MAX)
        return bool(flag.item())

    def check(self) -> None:
        """Before a collective call: raise PeerMemoryError if a rank will not come. Collective."""
        if self.tell(False):
            raise PeerMemoryError("another rank has run out of memory")

    def watched(self) -> contextlib.AbstractContextManager[object]:
        """Around forward and backward: reports before calls of sliced layers, as before calls of units."""
        return _Watch(self.check) if self.is_sliced else contextlib.nullcontext()

    def recover(self) -> None:
        """Put all units back to where a forward begins. Collective; gradients of parts are the caller's."""
        if self.in_step is not None:
            self.in_step.reset()
        for module in self.modules:
            if module._get_fsdp_state()._is_root:
                module.reset_iter_state()
        for module in self.modules:
            module.unshard()
            for parameter in own_parameters(cast("nn.Module", module)):
                parameter.grad = None
            module.reshard()


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Has something done before each collective call that DTensors make, with the memory of the call set aside."""

    def __init__(self, before: Callable[[], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._before = before

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Called by torch for every operation."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # what it is made of comes here by itself
        if func.namespace == "_c10d_functional" and func.overloadpacket.__name__ != "wait_tensor":
            times = args[1] if "all_gather" in func.overloadpacket.__name__ else 1
            own = [each for each in tree_leaves(args) if isinstance(each, Tensor)]
            room = [torch.empty(each.numel() * times, dtype=each.dtype, device=each.device) for each in own]
            self._before()
            del room
        return func(*args, **(kwargs or {}))


class _AllGatherCall:
    """torch's interface for collective calls: see `set_custom_all_gather`."""

    def __init__(self, agreement: Agreement, tells_memory: bool = False) -> None:
        self._agreement, self._tells_memory = agreement, tells_memory

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for a call. Units of one shard reduce without one: they only average over replicas, and tell here."""
        found = torch.empty(*size, dtype=dtype, device=device)
        if self._tells_memory:
            self._agreement.check()
        return found


class _Gather(_AllGatherCall):
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        self._agreement.check()
        return _GATHER(output_tensor, input_tensor, group=group, async_op=async_op)


class _Reduce(_AllGatherCall):
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        self._agreement.check()
        return _REDUCE(output_tensor, input_tensor, group=group, op=op, async_op=async_op)


def _num_shards(module: FSDPModule) -> int:
    """Over how many ranks a unit is divided, as the axis `shard` of its mesh has it, beside which layers may be sliced."""
    for part in own_parameters(cast("nn.Module", module)):
        if isinstance(part, DTensor):
            mesh = part.device_mesh
            names = mesh.mesh_dim_names or ()
            return int(mesh.shape[names.index("shard") if "shard" in names else -1])
    return 0


_GATHER: Any = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
_REDUCE: Any = getattr(distributed, "reduce_scatter_single", None) or distributed.reduce_scatter_tensor
