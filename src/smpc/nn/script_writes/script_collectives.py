"""What collectives of scripts (`torch.distributed.all_reduce`, ...) leave of values that a rank has computed of its slices alone.

    ranks             0       1       2       3         0 and 1, and 2 and 3, have slices of the same weight
    norm              |w0|    |w1|    |w0|    |w1|      partial: ranks 0 and 1 have other ones
    summed over 0, 2  2|w0|   2|w1|   2|w0|   2|w1|     partial still
    summed over 0, 1  of all                            what one process has: nothing is known of it any more

A collective over a group makes values the same for those ranks that have the other slices, if all of them are in the group. A collective
that writes into slices themselves gives each rank what is of others' rows, which is an error. Ranks without rows have no elements to give:
another error.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from smpc.errors import UsageError
from smpc.nn.script_writes.slice_provenance import OfSlice, Ranks, known, known_again

_MODULE = "torch.distributed.distributed_c10d"
_IN_PLACE = ("all_reduce", "all_reduce_coalesced", "broadcast")
_TO_ALL = (*_IN_PLACE, "all_gather", "all_gather_single", "all_gather_into_tensor", "all_gather_coalesced")
_RECEIVE = ("recv", "irecv")


def is_collective(func: Callable[..., Any]) -> bool:
    """Whether a function is one of torch.distributed."""
    return getattr(func, "__module__", "") == _MODULE


def check_collective(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """UsageError for a collective that writes what other ranks have of other rows into a slice, or its gradient, or of other sizes."""
    name = func.__name__
    given, ranks = _given(func, args, kwargs)
    for each in tree_leaves(given):
        of = known(each)
        if of is not None and of.is_empty and any(len({*group} & ranks) > 1 for group in of.groups):
            raise UsageError(
                f"{name}: expected tensors that all of the ranks {sorted(ranks)} have, found one of {of.name!r}, which is "
                f"{of.holders or 'on another rank'}, and of which this one has nothing; give a group of ranks that have the same parameters"
            )
    if name not in (*_IN_PLACE, "reduce"):
        return
    counts = name != "broadcast" and given.get("op", dist.ReduceOp.SUM) not in (dist.ReduceOp.MIN, dist.ReduceOp.MAX)
    for each in _written(given) if counts else ():
        again = known_again(each)
        if again is not None and each.numel() < again.size and len({*again.ranks} & ranks) > 1:
            raise UsageError(
                f"{name}: expected numbers of which each parameter is in that of one rank, found one with {again.name!r}, which the ranks "
                f"{list(again.ranks)} have together (stages share it): a sum would count it {len({*again.ranks} & ranks)} times; leave it "
                f"out but on rank {again.ranks[0]}, or take clip_grad_norm_(model.parameters(), float('inf')), which is the norm of all"
            )
    for each in _written(given):
        of = known(each)
        if of is None or of.is_partial or not any(len({*group} & ranks) > 1 for group in of.groups):
            continue
        own = of.parameter()
        held = () if own is None else (own, own.grad)
        if any(have_one_memory(each, one) for one in held if one is not None):
            raise UsageError(
                f"{name}: expected a group of ranks that have the same rows of {of.name!r}, of which ranks have slices, found "
                f"{sorted(ranks)}, among them ranks that have other rows ({' and '.join(str(list(one)) for one in of.groups)}): values of "
                "other rows would be written into this rank's; give a group of ranks that have the same slice, or leave it out, as "
                "gradients are averaged already"
            )


def known_after(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[Tensor, OfSlice | None]]:
    """What is known of the tensors that a collective has written; tensors of which nothing changes are left out."""
    if func.__name__ in _RECEIVE:
        return
    given, ranks = _given(func, args, kwargs)
    written = _written(given)
    read = [each for each in tree_leaves(given) if isinstance(each, Tensor) and not any(each is one for one in written)]
    for each in written:
        sources = [of for one in (read or [each]) if (of := known(one)) is not None]
        if not sources:
            continue
        are_roots, mixes = (
            not any(of.is_partial for of in sources),
            any(len({*g} & ranks) > 1 for g in _groups(sources)),
        )
        is_mixed = are_roots and mixes and not read  # rows of ranks in one place
        left = _still_different(sources, ranks, makes_alike=func.__name__ in _TO_ALL and not is_mixed)
        is_own = are_roots and not mixes
        if is_own and not read:
            continue
        if is_own and each.shape == sources[0].size:
            yield each, sources[0].like(each, sources[0].dims)
        else:
            first = next((of for of in sources if of.hide is not None), sources[0])
            yield each, replace(first, is_partial=True, groups=left, twin=None, pieces=()) if left else None


def _given(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[dict[str, Any], frozenset[int]]:
    given = dict(inspect.signature(func).bind(*args, **kwargs).arguments)
    group = given.get("group")
    return given, frozenset(dist.get_process_group_ranks(group if isinstance(group, dist.ProcessGroup) else None))


def _written(given: Mapping[str, Any]) -> list[Tensor]:
    """What comes first, but for `gather`."""
    found = given["gather_list"] if given.get("gather_list") is not None else next(iter(given.values()))
    return [each for each in tree_leaves(found) if isinstance(each, Tensor)]


def _groups(sources: Sequence[OfSlice]) -> tuple[Ranks, ...]:
    return tuple(dict.fromkeys(group for of in sources for group in of.groups))


def _still_different(sources: Sequence[OfSlice], ranks: frozenset[int], *, makes_alike: bool) -> tuple[Ranks, ...]:
    return tuple(group for group in _groups(sources) if not makes_alike or not ranks.issuperset(group))


def have_one_memory(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors may be written by each other."""
    with torch._C.DisableTorchFunctionSubclass():
        own, others = ((each._local_tensor if isinstance(each, DTensor) else each) for each in (one, other))
        return (
            own.device == others.device and own.untyped_storage().data_ptr() == others.untyped_storage().data_ptr() != 0
        )
