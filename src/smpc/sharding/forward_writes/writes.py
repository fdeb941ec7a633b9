"""Keeps what a model's forward writes into whole parameters, when they are in parts again.

A momentum encoder that follows another one in forward, `nn.Embedding(max_norm=...)`, a weight that is clamped: torch's `fully_shard` drops
the whole parameter, and what was written into it, without a word. Each rank keeps its part of it:

    whole, written into    w0 w1 w2 w3
    parts                  rank 0: w0 w1    rank 1: w2 w3

So all ranks must write the same. They compare what they have written before the update; what depends on a rank's batch is a StepError on
all of them. Rows that lookups scale down (`row_norms`, beside) are scaled in the parts, whichever rank has looked them up.

    writes = KeptWrites(units, group)
    writes.are_there()                   whether this rank has written anything since it was settled
    writes.settle()                      on all ranks, if that is so on some of them; collective
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from smpc.errors import StepError
from smpc.sharding.dtensors import digest, local, own_part_of_sharded
from smpc.sharding.forward_writes.freezing import FollowedFreezing
from smpc.sharding.forward_writes.row_norms import LookedUpRows, Lookup

_NOTHING = torch.iinfo(torch.int64).min


class KeptWrites:
    """See above. Has units take over what is written into their whole parameters. `group`: all ranks that have parts of them, whose
    messages are on `device`, by default the units'; None: there is one rank."""

    def __init__(
        self, units: Iterable[FSDPModule], group: ProcessGroup | None, device: torch.device | None = None
    ) -> None:
        found = (unit._get_fsdp_state()._fsdp_param_group for unit in units)
        self._groups: list[Any] = [each for each in found if each is not None]
        self._group, self._device = group, device
        self._versions: dict[int, int] = {}  # of whole parameters, by number
        self._digests: dict[int, Tensor] = {}  # of what was written since it was settled
        self._hidden: dict[
            int, Tensor
        ] = {}  # of wholes of which this rank's part has changed, though nothing counted it
        self._rows = None if group is None else LookedUpRows(self._number_of, group)
        self._parameters = [each for group in self._groups for each in group.fsdp_params]
        self._numbers = {id(each): number for number, each in enumerate(self._parameters)}
        FollowedFreezing(self._groups)
        for each in self._groups:
            each._to_sharded = functools.partial(self._let_go, each, each._to_sharded)

    def are_there(self) -> bool:
        """Whether this rank has written into a whole parameter."""
        wholes = (each for group in self._groups if not group.is_sharded for each in group.fsdp_params)
        is_written = any(self._is_written(each) for each in wholes)
        return is_written or bool(self._digests or self._hidden) or (self._rows is not None and self._rows.are_there)

    def _is_written(self, parameter: Any) -> bool:
        whole = getattr(parameter, "_unsharded_param", None)
        return whole is not None and self._versions.get(self._numbers[id(parameter)], 0) != _version(whole)

    @torch.no_grad()
    def settle(self) -> None:
        """Have the rows that ranks have looked up scaled in the parts. StepError on all ranks for what they have written otherwise, if it
        is not the same. Collective."""
        if self._rows is None or not self._parameters:
            return
        parameters, device = self._parameters, self._device or self._groups[0].device
        for lookup, codes in self._rows.exchanged(device).items():
            _scale_rows(self._rows, parameters[lookup.table], lookup, codes)
        tables = self._rows.tables
        counted = torch.zeros(len(parameters), dtype=torch.int64, device=device)
        hidden = torch.full((2, len(parameters)), _NOTHING, dtype=torch.int64, device=device)
        for number in {*self._digests, *self._hidden} - tables:
            if number in self._digests:
                counted[number] = self._digests[number]
            else:
                hidden[:, number] = torch.stack([self._hidden[number], -self._hidden[number]])
        self._digests.clear()
        self._hidden.clear()
        told = torch.stack([counted, -counted, *hidden])
        dist.all_reduce(told, dist.ReduceOp.MAX, group=self._group)
        wrong = [n for n, (a, b, c, d) in enumerate(told.T.tolist()) if a != -b or (c != _NOTHING and c != -d)]
        if wrong:
            raise _differing([_name(parameters[number]) for number in wrong])

    def _number_of(self, tensor: Tensor) -> int | None:
        wholes = (getattr(each, "_unsharded_param", None) for each in self._parameters)
        return next((number for number, whole in enumerate(wholes) if whole is tensor), None)

    @torch.no_grad()
    def _let_go(self, group: Any, original: Callable[[], None]) -> None:
        """In place of what frees whole parameters."""
        self._keep(group)
        original()

    @torch.no_grad()
    def _keep(self, group: Any) -> None:
        if group.is_sharded:
            return
        for each in group.fsdp_params:
            whole = getattr(each, "_unsharded_param", None)
            if whole is not None:
                self._keep_one(self._numbers[id(each)], each, whole)

    def _keep_one(self, number: int, parameter: Any, whole: Tensor) -> None:
        part, is_written = local(parameter.sharded_param), self._is_written(parameter)
        self._versions[number] = _version(whole)
        if self._rows is not None and self._rows.notes(number):
            return  # scaled in the parts
        if whole.dtype != part.dtype:
            if is_written:
                raise _lost(parameter, part, whole)
            return
        own = _own_part(parameter, whole.detach())
        # Comparing is cheap where nothing waits for a device. The part's version stays, but for writes, of which it tells masters.
        is_same = torch.equal(own, part) if own.is_cpu else not is_written and part.is_cpu
        if not is_same:
            counts = is_written or own.is_cpu
            with contextlib.nullcontext() if counts else _unsafe_preserve_version_counter(part):
                part.copy_(own)
        if is_written:
            self._digests[number] = 31 * self._digests.get(number, 0) + digest(local(whole)) + 1
        elif own.is_cpu and (not is_same or number in self._hidden):  # another rank's part may be as it was
            self._hidden[number] = digest(local(whole))
        if isinstance(whole, DTensor):
            return  # `weight.data = ...` writes into it
        room = parameter.all_gather_outputs[0]
        if whole.untyped_storage().data_ptr() != room.untyped_storage().data_ptr():  # `weight.data = ...`
            whole.data = torch.as_strided(room, whole.shape, parameter._contiguous_orig_stride, storage_offset=0)


def _version(whole: Tensor) -> int:
    """How often it was written into: a slice counts what is written through its DTensor there alone."""
    return local(whole)._version + (whole._version if isinstance(whole, DTensor) else 0)


def _own_part(parameter: Any, whole: Tensor) -> Tensor:
    """This rank's part of a whole parameter, or of the slice of one that this rank's unit has."""
    if not isinstance(whole, DTensor):
        return own_part_of_sharded(parameter.sharded_param, whole)
    dim, mesh, own = parameter.fsdp_placement.dim, parameter.mesh_info, local(whole)
    parts = own.chunk(getattr(mesh, "shard_mesh_size", 1), dim)
    rank = getattr(mesh, "shard_mesh_rank", 0)
    return parts[rank] if rank < len(parts) else own.narrow(dim, 0, 0)


def _scale_rows(looked_up: LookedUpRows, parameter: Any, lookup: Lookup, codes: Tensor) -> None:
    """Scale down this rank's part of the rows that some rank has looked up."""
    sharded, name = parameter.sharded_param, _name(parameter)
    part = local(sharded)  # without gradients, the memory itself: its version tells masters of writes
    if lookup.is_sliced or any(place.dim != 0 for place in sharded.placements if isinstance(place, Shard)):
        raise StepError(
            f"{name}: expected parts of whole rows, whose norms forward limits (max_norm), found rows that ranks divide; leave the "
            "table out of tensor parallelism"
        )

    def cut(rows: Tensor) -> Tensor:
        return own_part_of_sharded(sharded, rows[:, None].expand(sharded.shape))[:, 0].to(part.device)

    others = [f"{name} of another module"] if parameter._module_info.shared_modules else []
    grad = None if sharded.grad is None else local(sharded.grad)
    looked_up.check_use(lookup.table, name, others, grad, cut)
    rows = cut(codes).nonzero()[:, 0]
    if rows.numel():
        torch.embedding_renorm_(part, rows, lookup.max_norm, lookup.norm_type)


def _name(parameter: Any) -> str:
    return str(parameter._param_fqn or parameter._module_info.param_name)


def _lost(parameter: Any, part: Tensor, whole: Tensor) -> StepError:
    return StepError(
        f"sharded parameters: expected forward to leave {_name(parameter)} alone, which is kept in {part.dtype}, found that it writes into "
        f"its copy in {whole.dtype}, which is dropped afterwards; write between steps, or hold it in a buffer"
    )


def _differing(names: list[str]) -> StepError:
    return StepError(
        f"sharded parameters: expected forward to write the same into {', '.join(names[:5])}{' ...' if len(names) > 5 else ''} on all "
        "ranks, found what depends on a rank's own samples; make it alike on all ranks (smpc.dist.all_reduce of what is written), or "
        "hold it in a buffer"
    )
