"""Experts that are modules of their own, called by a block in whatever way it routes to them: each rank keeps some of them.

The block may loop over experts, skip those without tokens, sort, or call all: it is run twice.

    first run     every call of an expert is written down, with its rows, and returns zeros
    exchange      all rows go to the ranks of their experts, are served there, and come back
    second run    the calls return what came back; its result counts

So ranks may call different experts, in any order, and none. What the first run changes is undone or kept from happening: random numbers are
drawn again from the same state, buffers get their values back, inputs are copied, and forward hooks inside of the block are called in the
second run alone. UsageError if the runs pass different rows: then what one expert gets depends on what another returned, and these are no
experts. An expert must treat every row alike, whatever the others are, and take nothing but rows: `smpc.experts.confirm_cut` tries it.

The modules of the experts stay where they are. Modules of other ranks' experts have no parameters: under their names are tensors on the
meta device. Whoever `keeps` their parameters leaves nothing in them (no rows), and they stay the objects that optimizers know.

A recorder calls a block whole, and runs copies of it on invented values. These send nothing: one of this rank's experts serves the rows of
all, so that shapes are right, and costs are as for experts chosen evenly.

Where parameters are `in_parts` on ranks that hold the same experts, these are served inside of a call of their container, whose hooks
gather them. All of them are then called whenever gradients are wanted, as all ranks average the same gradients: an expert without rows gets
a row that belongs to no token. Which experts have gradients in one process is said by what this rank's blocks have called, where a backward
comes to it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from smpc.errors import TraceError, UsageError
from smpc.executor.collectives import TensorGroup, sum_over
from smpc.experts.dispatch import capacity_of, combine, dispatch, owned
from smpc.experts.expert_linear import scale_gradient, touched
from smpc.experts.find_experts import LEAVE_WHOLE, Listed
from smpc.experts.stacked import Options, take_role
from smpc.sharding.backwards import is_in_backward
from smpc.tracer import mark_leaf

_BLOCK, _MEMBER = "_smpc_block_of_experts", "_smpc_expert"


@dataclass(slots=True)
class _ExpertCall:
    """One call of an expert: its number, its rows in the shape that it got, whether gradients are enabled, and, after the exchange, what it
    returns."""

    expert: int
    given: Tensor
    has_gradients: bool
    result: Tensor | None = None


@dataclass(slots=True, eq=False)
class ListedBlock:
    """A block of experts on this rank. `calls` is a list while the block runs; `position`: of the second run's next call."""

    name: str
    members: list[nn.Module]
    group: TensorGroup
    options: Options
    outside: list[nn.Module]  # the modules of the block that are not in an expert
    keeps: bool = False
    in_parts: bool = False
    container: nn.Module | None = None  # whose hooks gather what is in parts
    absent: nn.Module | None = None  # an expert on the meta device, for what it returns
    is_invented: bool = False  # a recorder's copy
    wanted: set[int] = field(default_factory=set)  # the experts whose results gradients have reached
    calls: list[_ExpertCall] | None = None
    position: int | None = None
    autocast: dict[str, tuple[bool, torch.dtype]] = field(
        default_factory=dict
    )  # by kind of device, where the block was called
    widths: dict[tuple[int, torch.dtype], torch.Size] = field(default_factory=dict)
    reached: frozenset[str] | None = None  # see `parameters_in_results`

    def __deepcopy__(self, memo: dict[int, Any]) -> ListedBlock:
        copied = ListedBlock(self.name, [], self.group, self.options, [], self.keeps, is_invented=self.is_recorded)
        memo[id(self)] = copied
        copied.members, copied.outside = copy.deepcopy((self.members, self.outside), memo)
        return copied

    @property
    def mine(self) -> range:
        """The experts of this rank."""
        return owned(len(self.members), self.group)

    @property
    def is_recorded(self) -> bool:
        """Whether a recorder's fakes are in the places of parameters."""
        own = (parameter for expert in self.mine for parameter in self.members[expert].parameters())
        return any(isinstance(parameter, FakeTensor) for parameter in own)

    def called(self, expert: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """What a call of an expert returns in this run."""
        if self.is_invented:
            found: Tensor = self.members[self.mine.start].own(*args, **kwargs)  # type: ignore[operator]
            return found
        assert self.calls is not None
        given = (*args, *kwargs.values())
        if len(given) != 1 or not isinstance(given[0], Tensor) or not given[0].is_floating_point():
            raise UsageError(
                f"{self.name}: expected experts to be called with one tensor of rows, found "
                f"{', '.join(type(value).__name__ for value in given) or 'nothing'}; {LEAVE_WHOLE}"
            )
        rows = given[0]
        if self.position is None:
            self.calls.append(_ExpertCall(expert, rows, torch.is_grad_enabled()))
            is_cast, kind = _autocast(rows.device.type)
            if self.autocast.get(rows.device.type, (is_cast, kind)) != (is_cast, kind):
                raise UsageError(
                    f"{self.name}: expected experts to be called with the autocast of their block, as ranks serve the rows of all, found "
                    f"{kind if is_cast else 'none'} for module {expert}; set it around the block, or {LEAVE_WHOLE}"
                )
            return rows.new_zeros(rows.shape[:-1] + self.width(rows), dtype=kind if is_cast else rows.dtype)
        return self._again(expert, rows)

    def _again(self, expert: int, rows: Tensor) -> Tensor:
        assert self.calls is not None
        assert self.position is not None
        call = self.calls[self.position] if self.position < len(self.calls) else None
        self.position += 1
        if call is None or call.expert != expert or not _same_expert_values(call.given, rows):
            raise UsageError(
                f"{self.name}: expected what one expert gets not to depend on what another returns, nor on how often the block has run, "
                f"found other rows for module {expert} when they had returned; {LEAVE_WHOLE}"
            )
        assert call.result is not None
        return call.result if torch.is_grad_enabled() else call.result.detach()

    def width(self, rows: Tensor) -> torch.Size:
        """The sizes of what an expert returns for a row, found on the meta device where absent experts are there."""
        key = (rows.shape[-1], rows.dtype)
        if key not in self.widths:
            with self.options.uses.inside():
                found = self._of_one(rows) if self.keeps and self.absent is None else self._of_absent(rows)
            if not isinstance(found, Tensor) or found.dim() != 2 or found.shape[0] != 1:
                raise UsageError(f"{self.name}: expected experts to return a row for every row; {LEAVE_WHOLE}")
            self.widths[key] = found.shape[1:]
        return self.widths[key]

    def _of_absent(self, rows: Tensor) -> Any:
        """What an expert of another rank returns for a row."""
        row = torch.empty(1, rows.shape[-1], dtype=rows.dtype, device="meta")
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            if self.absent is not None:
                return self.absent.to(rows.dtype).forward(row)
            member = next(member for expert, member in enumerate(self.members) if expert not in self.mine)
            _absent_dtype(member, rows.dtype)
            return own_forward(member, row)

    def _of_one(self, rows: Tensor) -> Any:
        """What an expert of this rank returns for a row of zeros."""
        with torch.no_grad(), torch.random.fork_rng(devices=_devices_of_listed_experts(rows)):
            return own_forward(self.members[self.mine.start], rows.new_zeros(1, rows.shape[-1]))

    def _note_gradient(self, call: _ExpertCall) -> None:
        """Learn of a gradient that reaches what a call returns."""
        assert call.result is not None
        if call.has_gradients and call.result.requires_grad:
            call.result.register_hook(partial(self._reach, call.expert))  # type: ignore[no-untyped-call]

    def _reach(self, expert: int, _: Tensor) -> None:
        self.wanted.add(expert)

    def wanted_parameters(self) -> Iterator[nn.Parameter]:
        """Of the experts whose results gradients have reached, the parameters that these reach."""
        names = self.parameters_in_results() if self.wanted else ()
        return (p for expert in self.wanted for name, p in self.members[expert].named_parameters() if name in names)

    def wanted_parameters_of_all(self) -> list[nn.Parameter]:
        """Of this rank's experts whose results gradients have reached on some rank, the parameters that these reach. Collective."""
        called = torch.zeros(len(self.members), dtype=torch.int32)
        called[sorted(self.wanted)] = 1
        device = next(self.members[self.mine.start].parameters()).device
        counts = sum_over(called.to(device), self.group).tolist()
        own = [expert for expert in self.mine if counts[expert]]
        names = self.parameters_in_results() if own else ()
        return [p for expert in own for name, p in self.members[expert].named_parameters() if name in names]

    def parameters_in_results(self) -> frozenset[str]:
        """The parameters that an expert's result depends on, by their names in it: one may have others, which stay without gradients."""
        if self.reached is None:
            width, dtype = next(iter(self.widths))
            copied = (self.absent or _sharing_memory(self.members[self.mine.start], self)).to(dtype)
            own = {name: parameter for name, parameter in copied.named_parameters() if parameter.requires_grad}
            row = torch.zeros(1, width, dtype=dtype, device=next(copied.parameters()).device)
            with torch.enable_grad(), torch.random.fork_rng(devices=_devices_of_listed_experts(row)):
                found = own_forward(copied, row) if self.absent is None else copied.forward(row)
                total = found.sum() + row.new_zeros(()).requires_grad_()
            grads = torch.autograd.grad(total, [*own.values()], allow_unused=True)
            self.reached = frozenset(name for name, grad in zip(own, grads, strict=True) if grad is not None)
        return self.reached

    def exchange(self, like: Tensor | None) -> Tensor:
        """Serves all calls; returns what came back, whole. `like`: a tensor of the block's inputs, for a rank without calls."""
        calls, count = self.calls or [], len(self.members)
        flat = [call.given.reshape(-1, call.given.shape[-1]) for call in calls]
        if not flat:
            if like is None:
                raise UsageError(f"{self.name}: expected a tensor of floating point among the inputs, found none")
            flat = [like.reshape(-1, like.shape[-1])[:0]]
        rows = torch.cat(flat)
        if torch.is_grad_enabled() and not rows.requires_grad and self._trains():
            rows = rows.detach().requires_grad_()  # gradients go back from all ranks, those too that serve no rows
        numbers = [call.expert for call in calls]
        sizes = torch.tensor([len(part) for part in flat[: len(numbers)]], dtype=torch.int64)
        index = torch.tensor(numbers, dtype=torch.int64).repeat_interleave(sizes).unsqueeze(1).to(rows.device)
        factor, scale = self.options.capacity_factor, self.options.gradient_scale
        capacity = None if factor is None else capacity_of(factor, len(rows), 1, count)
        arrived, plan = dispatch(rows, index, count, self.group, way=self.options.way, capacity=capacity)
        width, arrived = self.width(rows), scale_gradient(arrived, 1 / scale)
        if self.container is None:
            served = self._served(arrived, plan.counts, width)
        else:
            served = self.container(lambda own: self._served(own, plan.counts, width), arrived)
        back = combine(scale_gradient(served, scale), plan, None, self.group)
        start = 0
        for call in calls:
            length = call.given.shape[:-1].numel()
            call.result = back[start : start + length].view(call.given.shape[:-1] + back.shape[1:])
            self._note_gradient(call)
            start += length
        return back

    def _trains(self) -> bool:
        """Whether this rank's experts have parameters that train."""
        return any(p.requires_grad for expert in self.mine for p in self.members[expert].parameters())

    def _served(self, rows: Tensor, counts: tuple[int, ...], width: torch.Size) -> Tensor:
        """This rank's experts on the rows of all ranks. Those without rows are not called, but for what is in parts; without any, the
        result is connected.
        """
        needs_all = self.in_parts and torch.is_grad_enabled()
        found = []
        for expert, part in zip(self.mine, torch.split(rows, list(counts)), strict=True):
            if part.shape[0]:
                found.append(own_forward(self.members[expert], part))
            elif needs_all:
                with torch.random.fork_rng(devices=_devices_of_listed_experts(rows)):
                    found.append(own_forward(self.members[expert], rows.new_ones(1, rows.shape[1]))[:0])
        if found:
            served = torch.cat(found)
            return served if rows.shape[0] else touched(served, rows)
        like: Tensor = self._of_one(rows)
        return rows.sum(1, keepdim=True).expand(0, *width).to(like.dtype)


class BlockOfExperts(nn.Module):
    """The forward of a module that calls experts, some of which are on other ranks."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What its forward returns; whoever calls it whole may look at all that it holds."""
        block: ListedBlock = vars(self)[_BLOCK]
        with block.options.uses.inside():
            return super().__call__(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the block returns with all experts at hand, for this rank's inputs. All ranks of the group call it."""
        block: ListedBlock = vars(self)[_BLOCK]
        own = super().forward
        if block.is_invented:
            return own(*args, **kwargs)
        if block.is_recorded:
            raise TraceError(
                f"{block.name}: a block some of whose experts are on other ranks is run on invented values alone"
            )
        block.calls, block.position = [], None
        block.autocast = {kind: _autocast(kind) for kind in ("cpu", "cuda")}
        uses = block.options.uses
        try:
            with uses.looking(self), _undone_expert_run(self, block):
                own(*tree_map(_copied_for_expert, args), **tree_map(_copied_for_expert, kwargs))
            with uses.inside():
                back = block.exchange(_like_expert_arguments(args, kwargs))
            block.position = 0
            output = own(*args, **kwargs)
            if block.position != len(block.calls):
                raise UsageError(
                    f"{block.name}: expected {len(block.calls)} calls of experts, found {block.position}; {LEAVE_WHOLE}"
                )
        finally:
            block.calls, block.position = None, None
        return _connected_expert_output(output, back) if back.requires_grad else output


class ListedContainer(nn.Module):
    """The forward of what holds the experts and has none of its own: whoever gathers its parameters has them in place."""

    def forward(self, serve: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
        """What `serve` returns for the rows."""
        return serve(rows)


def holds_parts(module: nn.Module) -> bool:
    """Whether a module gathers what is in parts: a container of experts, or a block that is one."""
    if isinstance(module, BlockOfExperts):
        block: ListedBlock = vars(module)[_BLOCK]
        return block.in_parts and block.container is None
    return isinstance(module, ListedContainer)


class ListedExpert(nn.Module):
    """The forward of an expert: in a run of its block, what the block says."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the expert returns, wherever it is."""
        block, expert = vars(self)[_MEMBER]
        if block.calls is None and not block.is_invented:
            again = "a call in a backward: recompute the whole block, not a part of its forward, or"
            raise UsageError(
                f"{block.name}: expected expert {expert} to be called by its block, found "
                f"{again if is_in_backward() else 'a call from elsewhere;'} {LEAVE_WHOLE}"
            )
        return block.called(expert, args, kwargs)

    def own(self, *args: Any, **kwargs: Any) -> Any:
        """What the expert's class returns."""
        return super().forward(*args, **kwargs)


def own_forward(member: nn.Module, rows: Tensor) -> Any:
    """The forward that an expert's class has."""
    return cast(ListedExpert, member).own(rows)


def spread_out(
    found: Listed, group: TensorGroup, options: Options, *, keeps: bool = False, in_parts: bool = False
) -> ListedBlock:
    """Leaves this rank its experts, in place. Their parameters stay the same objects; the other experts' parameters are dropped.

    `keeps`: they are not dropped; the caller has left nothing in them, or will before the block is called. `in_parts`: what stays will be
    in parts on the ranks that hold the same.
    """
    members = found.members
    inside = {id(module) for member in members for module in member.modules()}
    outside = [module for module in found.block.modules() if id(module) not in inside]
    block = ListedBlock(found.name, members, group, options, outside, keeps, in_parts)
    if in_parts:
        block.absent = _on_meta(members[block.mine.start])
    if in_parts and found.container is not found.block:
        block.container = found.container
        take_role(found.container, ListedContainer)
    for expert, member in enumerate(members):
        if expert not in block.mine and not keeps:
            _drop_parameters(member)
        vars(member)[_MEMBER] = (block, expert)
        options.uses.add(f"{found.name}.{found.keys[expert]}", member)
        take_role(member, ListedExpert)
    vars(found.block)[_BLOCK] = block
    take_role(found.block, BlockOfExperts)
    mark_leaf(found.block)
    return block


def rows_of_rank(found: Listed, group: TensorGroup) -> Iterator[tuple[nn.Parameter, range]]:
    """The parameters of experts, and this rank's rows of them: all or none."""
    mine = owned(found.num_experts, group)
    for expert, member in enumerate(found.members):
        for parameter in member.parameters():
            rows = parameter.shape[0]
            yield parameter, range(rows) if expert in mine else range(rows, rows)


def unsuited_as_rows(found: Listed, *, in_parts: bool) -> str | None:
    """Why other ranks cannot have experts without rows. `in_parts`: what stays will be in parts on the ranks that hold the same."""
    own = [parameter for member in found.members for parameter in member.parameters()]
    if any(True for member in found.members for _ in member.buffers()):
        return "there are buffers in its experts, of which other ranks would not see the changes"
    if in_parts and len(own) < sum(1 for _ in found.container.parameters()):
        return "beside its experts their container has parameters, which others average; keep these outside of it"
    if any(parameter.dim() == 0 for parameter in own):
        return "there are parameters without a dimension in its experts; give them one"
    return None


def _on_meta(member: nn.Module) -> nn.Module:
    """A copy without memory."""
    return _with_parameters(member, lambda parameter: torch.empty_like(parameter, device="meta"), {})


def _sharing_memory(member: nn.Module, block: ListedBlock) -> nn.Module:
    """A copy with the same values."""
    return _with_parameters(member, torch.detach, {id(block): block})


def _with_parameters(member: nn.Module, make: Callable[[Tensor], Tensor], memo: dict[int, Any]) -> nn.Module:
    """A copy with other parameters, all of which may have gradients."""
    for parameter in member.parameters():
        memo[id(parameter)] = nn.Parameter(make(parameter.detach()), requires_grad=parameter.is_floating_point())
    return copy.deepcopy(member, memo)


def _drop_parameters(member: nn.Module) -> None:
    for module in member.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in list(tensors.items()):
                if tensor is not None:
                    del tensors[name]
                    vars(module)[name] = tensor.detach().to("meta")


def _absent_dtype(member: nn.Module, dtype: torch.dtype) -> None:
    """Tensors under the names of absent parameters follow the dtype that the present ones have been moved to."""
    for module in member.modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and value.is_meta and value.is_floating_point():
                vars(module)[name] = value.to(dtype)


@contextmanager
def _undone_expert_run(module: nn.Module, block: ListedBlock) -> Iterator[None]:
    """Takes back what a run does to random numbers and buffers, and calls no forward hooks inside."""
    buffers = [(buffer, buffer.detach().clone()) for part in block.outside for buffer in part.buffers(recurse=False)]
    parts = [part for part in (*block.outside, *block.members) if part is not module]
    hooks = [(part, part._forward_hooks) for part in parts if part._forward_hooks]
    for part, _ in hooks:
        part._forward_hooks = type(part._forward_hooks)()
    with torch.random.fork_rng(
        devices=_devices_of_listed_experts(*(buffer for buffer, _ in buffers), *module.parameters())
    ):
        try:
            yield
        finally:
            for part, own in hooks:
                part._forward_hooks = own
            with torch.no_grad():
                for buffer, before in buffers:
                    if not torch.equal(buffer, before):
                        buffer.copy_(before)


def _devices_of_listed_experts(*tensors: Tensor) -> list[int]:
    """The GPUs that tensors are on, for `fork_rng`."""
    return sorted({tensor.get_device() for tensor in tensors if tensor.is_cuda})


def _autocast(kind: str) -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)


def _copied_for_expert(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _like_expert_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    leaves, _ = tree_flatten((args, kwargs))
    return next((leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dim()), None)


def _connected_expert_output(output: Any, back: Tensor) -> Any:
    """The output, whose backward reaches what came back, though no row may have been used."""
    leaves, structure = tree_flatten(output)
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            leaves[place] = touched(leaf, back)
            return tree_unflatten(leaves, structure)
    return output


def _same_expert_values(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors have the same values; NaN is NaN."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    return torch.equal(first, second) or torch.allclose(first, second, rtol=0, atol=0, equal_nan=True)
