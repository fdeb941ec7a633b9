"""Products of experts on rows that are grouped by expert: forward(rows [R, in], sizes) to [R, out], `sizes` a list of E numbers of rows.

    >>> experts.weight.shape, experts(rows, [3, 0, 5, 1]).shape        # doctest: +SKIP
    (torch.Size([4, 48, 32]), torch.Size([9, 48]))

Tensor-parallel ranks may have some of the experts each: a rank passes the rows of its own, and the results of all are put together. The
block around such modules, with its router, is called whole and runs alike on all ranks (`in_segments`).

Names of models and classes play no part. A module looks so if all its parameters have a leading dimension E, one of them two more, and
its forward takes two arguments; it is run on invented values to see that the rows of some experts, passed without the others' to a
module with these alone, come out the same.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from smpc.errors import UsageError
from smpc.executor.collectives import TensorGroup, all_reduce, replicate_in
from smpc.experts.confirm_cut import copy_with_experts, counting_attributes, invented_parameters
from smpc.experts.find_experts import Stacked
from smpc.experts.stacked import counting

_SIZES = (2, 0, 3, 1)  # rows of invented experts


def find_segmented(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """The modules of this form whose experts ranks may divide, by name, and the attributes that count experts in each."""
    found: dict[str, tuple[str, ...]] = {}
    for name, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        sizes = {parameter.shape[0] if parameter.dim() > 1 else 0 for parameter in own.values()}
        if len(sizes) != 1 or min(sizes) < 2 or max(parameter.dim() for parameter in own.values()) < 3:
            continue
        if len(own) != len(list(module.parameters())) or any(True for _ in module.buffers()) or not _takes_two(module):
            continue
        known = _confirmed(Stacked(name, module, min(sizes), tuple(own)))
        if known is not None:
            found[name] = known
    return found


def _takes_two(module: nn.Module) -> bool:
    try:
        parameters = list(inspect.signature(module.forward).parameters.values())
    except (TypeError, ValueError):
        return False
    return len(parameters) == 2 and all(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)


def _confirmed(experts: Stacked) -> tuple[str, ...] | None:
    """The attributes that count experts; None for a module that computes something else."""
    widths = dict.fromkeys(size for name in experts.parameters for size in experts.module.get_parameter(name).shape[1:])
    for counts in counting_attributes(experts):
        if any(_holds(experts, counts, width) for width in widths):
            return counts
    return None


def _holds(experts: Stacked, counts: tuple[str, ...], width: int) -> bool:
    """Whether some of the experts return what they return among all, and draw nothing."""
    count = experts.num_experts
    sizes = [_SIZES[expert % len(_SIZES)] for expert in range(count)]
    first, generator = count // 2, torch.Generator().manual_seed(0)
    start = sum(sizes[:first])
    rows = torch.randn(sum(sizes), width, generator=generator)
    values = invented_parameters(experts, count, generator)
    try:
        with torch.no_grad(), torch.random.fork_rng():
            before = torch.get_rng_state()
            whole = copy_with_experts(experts, values, ()).train()(rows, list(sizes))
            parts = [
                copy_with_experts(experts, [value[own] for value in values], counts).train()(part, sizes[own])
                for own, part in ((slice(0, first), rows[:start]), (slice(first, count), rows[start:]))
            ]
            is_drawn = not torch.equal(before, torch.get_rng_state())
    except Exception:  # whatever its forward raises
        return False
    fits = all(isinstance(part, Tensor) and part.dim() == 2 for part in (whole, *parts))
    return (
        fits
        and not is_drawn
        and len(whole) == len(rows)
        and torch.allclose(torch.cat(parts), whole, rtol=1e-4, atol=1e-5)
    )


def in_segments(
    block: nn.Module, inside: tuple[tuple[str, tuple[str, ...]], ...], group: TensorGroup, *args: Any, **kwargs: Any
) -> Any:
    """Calls a block in which this rank has some of the experts of the modules `inside`, with what counts experts in each."""
    with ExitStack() as stack:
        for name, counts in inside:
            stack.enter_context(_divided(block.get_submodule(name), counts, group))
        return block(*args, **kwargs)


@contextmanager
def _divided(module: nn.Module, counts: tuple[str, ...], group: TensorGroup) -> Iterator[None]:
    """In this context the module returns what it would with the experts of all ranks."""
    own, instead = module.forward, vars(module).get("forward")
    few = next(module.parameters()).shape[0]
    names = list(inspect.signature(own).parameters)

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        given = [*args, *(kwargs[name] for name in names[len(args) :])]
        rows, sizes = given[0], [int(size) for size in given[1]]
        if len(sizes) != few * group.size or sum(sizes) != len(rows):
            raise UsageError(
                f"expected the numbers of rows of {few * group.size} experts, {len(rows)} together, found {sizes}; leave these experts "
                "whole (tensor_parallel_plan)"
            )
        first = few * group.rank
        start, mine = sum(sizes[:first]), sizes[first : first + few]
        end = start + sum(mine)
        rows = replicate_in(rows, group)  # its backward is a sum over the ranks, which all must reach
        part = rows[start:end]
        with counting(module, counts, few):
            found = own(part, mine) if len(part) else _of_none(own, rows, few)
        every = torch.cat(
            (found.new_zeros(start, *found.shape[1:]), found, found.new_zeros(len(rows) - end, *found.shape[1:]))
        )
        return all_reduce(every, group)

    vars(module)["forward"] = forward
    try:
        yield
    finally:
        del vars(module)["forward"]
        if instead is not None:
            vars(module)["forward"] = instead


def _of_none(own: Any, rows: Tensor, few: int) -> Tensor:
    """No rows, connected to the experts, whose gradients are zero."""
    one = rows[:0].sum(0, keepdim=True)
    alone: Tensor = own(one, [1] + [0] * (few - 1))
    return alone[:0]
