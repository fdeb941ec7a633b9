"""Modules whose parameters differ between the ranks of the replicas' group, such as experts that ranks divide, and their gradients.

    all else     in parts on all replicas            a unit of `smpc.sharding` over their mesh
    apart        in parts on those with the same     a unit over a mesh of its own, inside of what is around it

Gradients of what is apart are averaged over the ranks of its mesh; any further division is up to the code that divided the parameters.

`ExpertReplicas` averages gradients of experts that ranks divide among them, over the ranks that hold the same ones.

    inner      averages everything else over all replicas (`StageReplicas(..., apart=experts)`)
    group      ranks that hold the same experts: one of every so many replicas
    dividing   ranks that divide experts among them, where some are wholly on one of these: others have none of their rows

What comes back to an expert has been divided by the number of ranks that send it tokens (`smpc.experts.stacked`), so the average over this
group is the average over all replicas. An expert without a gradient on one rank counts there as zero; one without a gradient on all ranks
stays without. For an expert that others hold, a rank has a gradient without rows if they have one: so norms are of the same parameters on
all ranks.

    called     of experts that are wholly on one rank, those that this rank's tokens have called: in one process these have gradients,
               though it be of zero, and no others
    in_parts   parameters are in parts on the group, and whoever divided them has averaged
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from smpc.executor.collectives import TensorGroup, sum_over
from smpc.executor.replicas.data_parallel import broadcast
from smpc.executor.replicas.group_hooks import GroupHooks, StepHooks
from smpc.sharding import Unit
from smpc.sharding.whole_parameters import sum_together
from smpc.sharding.wide_gradients import gradient_dtype


@dataclass(frozen=True, slots=True)
class ExpertsApart:
    """See above. `group`: all ranks of `mesh`, which have the same values; `parameters`: those that differ elsewhere."""

    modules: tuple[nn.Module, ...]
    parameters: tuple[nn.Parameter, ...]
    mesh: DeviceMesh
    group: dist.ProcessGroup

    def inside(self, root: nn.Module) -> list[nn.Module]:
        """The modules that are inside another one, in its order."""
        own = {id(module) for module in self.modules}
        return [module for module in root.modules() if id(module) in own]

    def units(self, root: nn.Module) -> list[Unit]:
        """The units of what is apart in a module that runs as it is, to come before all others."""
        own = {id(module) for module in self.modules}
        return [Unit(name, mesh=self.mesh) for name, module in root.named_modules() if id(module) in own]


def make_equal(modules: Sequence[nn.Module], group: dist.ProcessGroup, apart: ExpertsApart | None) -> None:
    """Give all ranks of the group the first rank's parameters and buffers. What is apart comes from the first rank that has the same."""
    own = {} if apart is None else {id(parameter): parameter for parameter in apart.parameters}
    held = {id(parameter): parameter for module in modules for parameter in module.parameters()}
    broadcast(
        [
            *(parameter for key, parameter in held.items() if key not in own),
            *(buffer for module in modules for buffer in module.buffers()),
        ],
        group,
    )
    if apart is not None:
        broadcast([parameter for key, parameter in held.items() if key in own], apart.group)


class CalledExperts(Protocol):
    """Which experts a rank's tokens have called where gradients are wanted."""

    def parameters(self) -> Collection[int]:
        """Their parameters, by identity."""

    def forget(self) -> None:
        """Begin anew."""


class ExpertReplicas(GroupHooks):
    """See `GroupHooks`. Construction gives all ranks of the group the experts of its first one."""

    def __init__(
        self,
        experts: Iterable[nn.Parameter],
        group: TensorGroup,
        inner: StepHooks | None,
        backward_passes_per_step: int = 1,
        dividing: TensorGroup | None = None,
        called: CalledExperts | None = None,
        *,
        in_parts: bool = False,
    ) -> None:
        super().__init__(group, inner, backward_passes_per_step)
        held, self._dividing, self._called, self._in_parts = list(experts), dividing, called, in_parts
        self._experts = [parameter for parameter in held if parameter.requires_grad]
        self._before: frozenset[int] = frozenset()  # what had a gradient before the steps that accumulate
        if group.process_group is not None and group.size > 1 and not in_parts:
            broadcast([parameter.detach() for parameter in held], group.process_group)

    def _set_aside(self) -> None:
        """Gradients that are there are averages, alike on all ranks, and stay so."""
        if self._called is not None and self._is_complete:
            self._called.forget()
            self._before = frozenset(id(parameter) for parameter in self._experts if parameter.grad is not None)

    def _combine(self) -> None:
        if not self._experts or (self._group.size == 1 and self._dividing is None):
            return
        kinds: dict[torch.dtype, list[Tensor]] = {}
        for parameter, is_there in zip(self._experts, self._anywhere(), strict=True):
            if not is_there:
                parameter.grad = None
                continue
            dtype = gradient_dtype(parameter)
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, dtype=dtype)
            kinds.setdefault(dtype, []).append(parameter.grad)
        for grads in kinds.values() if self._group.size > 1 and not self._in_parts else ():
            sum_together(grads, self._add, divided_by=self._group.size)

    def _anywhere(self) -> list[bool]:
        """Which experts have a gradient on some rank."""
        own = self._before.union(() if self._called is None else self._called.parameters())
        present = torch.tensor(
            [id(p) in own or (p.grad is not None and not self._in_parts) for p in self._experts], dtype=torch.int32
        )
        counts = sum_over(present.to(self._experts[0].device), self._group)
        return [bool(count) for count in (counts if self._dividing is None else sum_over(counts, self._dividing))]
