"""Sharded data parallelism (FSDP2, `fully_shard`): parameters, gradients and optimizer state of stages or modules in parts on replicas.

`StageShards` has the stages of a program in parts:

    between steps     parameters are DTensors, of which this rank has 1 / replicas
    in a step         the first forward of a stage gathers its parameters, once for all microbatches; backwards add up whole gradients;
                      the last one averages them over the replicas, leaves each its part, and lets go of the whole parameters
    evaluation        the same without gradients; the parameters are let go of at the end

A stage is one unit of `smpc.sharding`, which says how gradients are averaged, and what comes in the place of parameters. What is apart
(`smpc.executor.replicas.divided_modules`) is another unit inside of it.

Programs of other inputs have stage modules of their own over the same parameters. All of them run inside one module for each stage, whose
hooks FSDP uses, and first take over the parameters that are there now.

Example: `shards = StageShards(stages, group)`, then `Interpreter(program, shards.modules(stages), transport, hooks=shards)`.

`ModuleShards` has a module that runs as it is, without a program: its blocks are units of `smpc.sharding`.

Construction gives all ranks the parameters and buffers of the group's first rank, and divides the parameters over the mesh. A step calls
the hooks; without them, every backward averages its gradients. What is `apart` is in parts on other ranks.

Replicas may use different parameters in a step, if their batches take other branches (`smpc.sharding.used_parameters`). Blocks that are
gathered when they are called must be the same on all of them (`smpc.sharding.same_blocks`).

A replica without a batch may take part in a step (`Joined`): stages are then gathered as the step begins, and reduced as it ends; of a
module, each block when the others come to it, with zeros.

A parameter without dimensions (CLIP's `logit_scale`), or without elements, has no parts: every rank has it whole, and averages its gradient
at the end of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from smpc.executor.replicas.data_parallel import broadcast
from smpc.executor.replicas.divided_modules import ExpertsApart, make_equal
from smpc.sharding import Keep, OutsideUses, Sharded, ShardingOptions, Unit, shard
from smpc.sharding.same_blocks import IDLE, START, TRAINED, SameBlocks
from smpc.sharding.shard import check_gradients_of_parts
from smpc.sharding.whole_parameters import WholeParameters


@dataclass(frozen=True, slots=True)
class Joined:
    """The replicas of a step, where not all need have a batch. `source`: whose buffers count; `divisor`: of gradients, None: the number of
    all replicas; `is_followed`: whether some have no batch; `looks`: at parameters and their whole gradients, before these are reduced."""

    source: int = 0
    divisor: int | None = None
    is_followed: bool = False
    looks: Callable[[Tensor, Tensor], None] | None = None


class _GatheredModules(nn.Module):
    """Modules whose parameters are there while something runs. They keep their class and their hooks, which recordings look at."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self.held = nn.ModuleList(modules)

    def forward(self, run: Callable[..., Any], *inputs: Tensor) -> Any:
        """Called by FSDP's hooks, with the whole parameters in place."""
        return run(*inputs)


class _ShardedRoot(_GatheredModules):
    """What is sharded: the first stage modules that share parameters, usually one; runs any that has the same parameters."""

    def __init__(self, stages: Sequence[nn.Module], apart: ExpertsApart | None) -> None:
        super().__init__(stages)
        found = [] if apart is None else apart.inside(self)
        self.apart = _GatheredModules(found) if found else None

    def forward(self, run: Callable[..., Any], *inputs: Tensor) -> Any:
        """The same, with those in place that are apart."""
        return super().forward(run, *inputs) if self.apart is None else self.apart(run, *inputs)


class _Member(nn.Module):
    """A stage module of some program, run inside its root."""

    def __init__(self, stage: nn.Module, root: nn.Module) -> None:
        super().__init__()
        self.stage = stage
        # Not a submodule: its parameters are the stage's own.
        object.__setattr__(self, "_root", root)
        self._moves = _moves_of_sharded_stage(stage, root)

    def forward(self, *inputs: Tensor) -> Any:
        """Run the stage."""
        root: Any = self._root
        return root(self._run, *inputs)

    def _run(self, *inputs: Tensor) -> Any:
        for own, name, source, source_name in self._moves:
            own[name] = source[source_name]
        return self.stage(*inputs)


class StageShards:
    """Shards the parameters of stages over `group`; the hooks of an interpreter, in place of `StageReplicas`. `mesh`: of the same ranks,
    (shard) or (replica, shard); by default all of the group shard.

    Construction gives all ranks the parameters and buffers of the group's rank 0. `broadcast_buffers`: its buffers replace the others' at
    the start of every training step. A stage's parameters that train must have one dtype. Stages of a rank that share a parameter are
    gathered, averaged and let go of together, with the last of their last backwards. What is `apart` is a unit of its own.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        group: dist.ProcessGroup,
        mesh: DeviceMesh | None = None,
        *,
        device_type: str = "cpu",
        broadcast_buffers: bool = True,
        apart: ExpertsApart | None = None,
    ) -> None:
        self._group = group
        self._stages = [stages[index] for index in sorted(stages)]
        self._buffers_of = self._stages if broadcast_buffers else []
        self._wholes = WholeParameters(self._stages, [group])
        self._joined = Joined()
        if (
            mesh is None
        ):  # torch keeps layouts by meshes that are equal, even of groups that were destroyed: a name for each group
            mesh = DeviceMesh.from_group(group, device_type, mesh_dim_names=(f"replicas_{group.group_name}",))
        self.exchanged: dict[nn.Parameter, nn.Parameter] = {}
        self._roots: dict[int, nn.Module] = {}
        self._sharded: dict[int, Sharded] = {}  # by the first of the stages that share parameters
        self._first: dict[int, int] = {}
        self._waits: dict[int, set[int]] = {}  # by that one, the stages whose last backward is still to come
        for members in _stages_sharing_shards(stages):
            for index in members:
                check_gradients_of_parts(stages[index], self._wholes.all())  # by the names that they have in the model
            root = _ShardedRoot([stages[index] for index in members], apart)
            make_equal([root], group, apart)
            self._roots.update(dict.fromkeys(members, root))
            if any(True for _ in root.parameters()):
                units = () if apart is None or root.apart is None else (Unit("apart", mesh=apart.mesh),)
                options = ShardingOptions(Keep.STEP, stays_outside=True)
                made = self._sharded[members[0]] = shard(root, units, mesh, options, self._wholes.all(), group=group)
                self._first.update(dict.fromkeys(members, members[0]))
                self.exchanged.update(made.exchanged)

    @property
    def group(self) -> dist.ProcessGroup:
        """The replicas that gradients are averaged over."""
        return self._group

    def modules(self, stages: Mapping[int, nn.Module]) -> dict[int, nn.Module]:
        """What an interpreter runs in place of the stage modules of a program."""
        return {index: _Member(stage, self._roots[index]) for index, stage in stages.items()}

    def release(self) -> None:
        """Let go of whole parameters. A training step has done so in its last backwards, if there were any."""
        for sharded in self._sharded.values():
            sharded.release()

    def parameters(self) -> list[nn.Parameter]:
        """All of them, in one order on all replicas."""
        return _all_parameters(self._stages)

    def join(self, joined: Joined) -> None:
        """Before a step. Replicas without a batch then call `start_of_step` and `end_of_step`."""
        self._joined = joined
        for sharded in self._sharded.values():
            sharded.divide_by(joined.divisor)
            sharded.look(joined.looks)

    def follow(self, *, trains: bool) -> None:
        """On a replica without a batch: take part in what the others gather before a training step ends, or in all of an evaluation."""
        if not trains:
            self._gather()
            self.release()

    def share_buffers(self, source: int) -> None:
        """Give all replicas the buffers of one, if buffers are shared. Collective."""
        for stage in self._buffers_of:
            broadcast(stage.buffers(), self._group, source)

    def _gather(self) -> None:
        """In the order in which a step runs stages for the first time."""
        for first in sorted(self._sharded):
            self._sharded[first].gather()

    def start_of_step(self) -> None:
        """Broadcast buffers; gradients add up until the last backward."""
        self.share_buffers(self._joined.source)
        self._waits = {first: {s for s in self._first if self._first[s] == first} for first in self._sharded}
        self._wholes.begin(self._joined.divisor)
        for sharded in self._sharded.values():
            sharded.begin_step()
        if self._joined.is_followed:
            self._gather()

    def before_last_backward(self, stage: int, roots: Sequence[Tensor]) -> None:
        """Average gradients in the backward that follows, or now if none does, and let go of the whole parameters."""
        first = self._first.get(stage)
        if first is None or self._joined.is_followed:
            return
        self._waits[first].discard(stage)
        if not self._waits[first] and roots:
            self._sharded[first].last_backward()
        elif not self._waits[first]:
            self._sharded[first].end_step()

    def end_of_step(self) -> None:
        """Average what the last backward of a stage has not: there was none, or it did not reach the stage."""
        for index in sorted(self._sharded, reverse=True):
            self._sharded[index].end_step()
        self._wholes.average()

    def did_not_train(self) -> None:
        """Nothing was counted."""


def _all_parameters(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    return list({id(p): p for module in modules for p in module.parameters()}.values())


def _moves_of_sharded_stage(
    stage: nn.Module, first: nn.Module
) -> list[tuple[dict[str, Any], str, dict[str, Any], str]]:
    """Where the stage has parameters of its own dictionaries, and where those are that FSDP exchanges."""
    names: dict[int, tuple[dict[str, Any], str]] = {}
    exchanged: set[int] = set()
    for module in first.modules():
        exchanged.add(id(module._parameters))
        for name, parameter in module._parameters.items():
            if parameter is not None:
                names.setdefault(id(parameter), (module._parameters, name))
    return [
        (module._parameters, name, *names[id(parameter)])
        for module in stage.modules()
        if id(module._parameters) not in exchanged
        for name, parameter in module._parameters.items()
        if parameter is not None
    ]


def _stages_sharing_shards(stages: Mapping[int, nn.Module]) -> list[tuple[int, ...]]:
    """The stages, those that share parameters together, directly or by way of others."""
    found: list[tuple[list[int], set[int]]] = []
    for index in sorted(stages):
        members, known = [index], {id(parameter) for parameter in stages[index].parameters()}
        for other in [each for each in found if each[1] & known]:
            found.remove(other)
            members, known = [*other[0], *members], known | other[1]
        found.append((members, known))
    return sorted(tuple(sorted(members)) for members, _ in found)


class ModuleShards:
    """The hooks of steps of one module. `group`: all ranks of the mesh; `units` says which units a module has, once all ranks are equal."""

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup,
        mesh: DeviceMesh,
        units: Callable[[nn.Module], Iterable[str | Unit]],
        options: ShardingOptions,
        *,
        broadcast_buffers: bool = True,
        apart: ExpertsApart | None = None,
    ) -> None:
        self._module, self._group, self._has_buffers = module, group, broadcast_buffers
        make_equal([module], group, apart)
        self._wholes, known = WholeParameters([module], [group]), list(units(module))
        self._sharded = shard(module, known, mesh, options, self._wholes.all(), group=group)
        parts = {name: p for name, p in module.named_parameters() if isinstance(p, DTensor)}
        self._order = SameBlocks(module, known, group, parts)
        self._outside = OutsideUses(parts, group.size(), self._sharded.note, self._order)
        self.exchanged = self._sharded.exchanged
        self._joined = Joined()

    def release(self) -> None:
        """Free whole parameters: a backward of what has run gathers them again."""
        self._sharded.release()

    def parameters(self) -> list[nn.Parameter]:
        """All of them, in one order on all replicas."""
        return _all_parameters([self._module])

    def join(self, joined: Joined) -> None:
        """Before a step. Replicas without a batch then call `start_of_step`, `follow` for each call of the module, and what ends a step."""
        self._joined = joined
        self._outside.divisor = joined.divisor or self._group.size()
        self._sharded.divide_by(joined.divisor)
        self._sharded.look(joined.looks)
        self._order.let_follow(joined.is_followed)

    @torch.enable_grad()
    def follow(self, *, trains: bool) -> None:
        """On a replica without a batch: take part in what the others do in one call of the module, and its backwards."""
        self._sharded.make_ready()
        end = self._order.follow(self._outside.take_part)
        self._outside.end_following(end, trains=trains)

    def share_buffers(self, source: int) -> None:
        """Give all replicas the buffers of one, if buffers are shared. Collective."""
        if self._has_buffers:
            broadcast(self._module.buffers(), self._group, source)

    def start_of_step(self) -> None:
        """Broadcast buffers, and gather the blocks that stay whole for the step."""
        self._order.tell_phase(START)
        self.share_buffers(self._joined.source)
        if self._joined.is_followed:
            self.release()
        self._wholes.begin(self._joined.divisor)
        self._sharded.begin_step()
        self._sharded.gather()

    @contextmanager
    def running(self, *, trains: bool) -> Iterator[None]:
        """Around what calls the module: ranks that are about to gather different blocks raise a StepError."""
        looks = self._outside.is_looking(trains=trains)
        with self._order.told(trains, looks), self._outside.looking(trains=trains):
            yield
        if looks and self._order.any_rank(self._outside.is_found):
            self._outside.begin()

    def before_last_backward(self, stage: int, roots: Sequence[Tensor]) -> None:
        """Nothing: blocks that wait for the end of the step are reduced there, in one order on all ranks."""

    def end_of_step(self) -> None:
        """Average what no backward has, and let go of what is whole."""
        self._order.tell_phase(TRAINED)
        self._sharded.end_step()
        self._wholes.average()

    def did_not_train(self) -> None:
        """Let go of what is whole."""
        self._order.tell_phase(IDLE)
        self._sharded.end_step()
