"""What there is to try: the ways to train a model on so many devices.

A candidate is a pipeline of p stages' ranks, each of them t tensor-parallel ranks that share every operation, d replicas of it with
p t d = world size, where they lie, v stages on a rank, m microbatches of a replica's part of the batch, a schedule, and what is computed
again in the backward: what the model itself asks for ("model"), or every repeated block as well ("blocks": the members of its outermost
lists of modules of one class). The global batch is the same for all, so m times d times the size of a microbatch is. Tensor-parallel
ranks are neighbours: they talk in every block.

    >>> [(c.pipeline_parallel_degree, c.microbatches, c.schedule) for c in candidates(2, 2, find_device("h100"), ("1f1b",))]
    [(1, 1, '1f1b'), (2, 1, '1f1b'), (2, 2, '1f1b')]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from smpc.mesh import Axis, Mesh
from smpc.partitioner.device import Device, Wire
from smpc.tracer.ir import Trace

# name -> stages of a rank that are tried
SCHEDULES: tuple[tuple[str, tuple[int, ...]], ...] = (
    ("1f1b", (1,)),
    ("gpipe", (1,)),
    ("zb-h1", (1,)),
    ("zb-h2", (1,)),
    ("interleaved-1f1b", (2, 4)),
    ("zb-v", (2,)),
)


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to train: see the module docstring. Names are those of the configuration."""

    pipeline_parallel_degree: int
    data_parallel_degree: int
    placement_strategy: str
    virtual_pipeline_degree: int
    microbatches: int
    microbatch_size: int
    schedule: str
    recompute: str = "model"
    tensor_parallel_degree: int = 1

    @property
    def num_parts(self) -> int:
        """Microbatches of all replicas together: what the global batch is split into."""
        return self.microbatches * self.data_parallel_degree

    @property
    def mesh(self) -> Mesh:
        """Its ranks."""
        world_size = self.pipeline_parallel_degree * self.data_parallel_degree * self.tensor_parallel_degree
        return Mesh(world_size, self.pipeline_parallel_degree, self.tensor_parallel_degree, self.placement_strategy)


def candidates(
    world_size: int,
    batch_size: int,
    device: Device,
    schedules: Sequence[str],
    recompute: Sequence[str] = ("model",),
    tensor_degrees: Sequence[int] = (1,),
) -> Iterator[Candidate]:
    """All candidates, the simple ones first. Another dimension is another loop here and another field of `Candidate`."""
    for tensor_degree in tensor_degrees:
        for pipeline_degree in divisors(world_size // tensor_degree):
            replicas = world_size // tensor_degree // pipeline_degree
            if batch_size % replicas:
                continue
            for placement in _placements(device, world_size, pipeline_degree, tensor_degree):
                for microbatches in divisors(batch_size // replicas):
                    size = batch_size // replicas // microbatches
                    for schedule, pieces in _schedules(pipeline_degree, schedules):
                        shape = pipeline_degree, replicas, placement, pieces, microbatches, size, schedule
                        yield from (Candidate(*shape, again, tensor_degree) for again in recompute)


def tensor_degrees(world_size: int, device: Device) -> tuple[int, ...]:
    """What is tried of tensor parallelism: the numbers of ranks of one host that divide the world, since wires between hosts are slow."""
    return tuple(degree for degree in divisors(world_size) if device.devices_per_host % degree == 0)


def wire(device: Device, mesh: Mesh, axis: Axis) -> Wire:
    """What the groups of an axis talk over: the wires inside hosts if each group lies in one, else those between hosts."""
    hosts = [{rank // device.devices_per_host for rank in group} for group in mesh.groups(axis)]
    return device.inside_host if all(len(found) == 1 for found in hosts) else device.between_hosts


def repeated_blocks(trace: Trace) -> tuple[str, ...]:
    """Names of the repeated blocks, in order of execution: calls of one class in one list, and not inside another block."""
    lists: dict[tuple[str, str], dict[str, None]] = {}
    for call in trace.calls:
        around, _, name = call.fqn.rpartition(".")
        if name.isdecimal():
            lists.setdefault((around, call.class_name), {})[call.fqn] = None
    repeated = {name for names in lists.values() if len(names) > 1 for name in names}
    return tuple(
        name
        for name in dict.fromkeys(call.fqn for call in trace.calls)
        if name in repeated and not any(name.startswith(f"{other}.") for other in repeated)
    )


def divisors(number: int) -> tuple[int, ...]:
    """Ascending."""
    return tuple(divisor for divisor in range(1, number + 1) if number % divisor == 0)


def _placements(device: Device, world_size: int, pipeline_degree: int, tensor_degree: int) -> tuple[str, ...]:
    """Pipelines on neighbours; and replicas on neighbours, where that changes who shares a host. Tensor-parallel ranks always are."""
    found: dict[tuple[Wire, Wire], str] = {}
    for name in ("cluster", "spread" if tensor_degree == 1 else "PDT"):
        mesh = Mesh(world_size, pipeline_degree, tensor_degree, name)
        found.setdefault((wire(device, mesh, Axis.PP), wire(device, mesh, Axis.RDP)), name)
    return tuple(found.values())


def _schedules(pipeline_degree: int, wanted: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Schedules and stages of a rank; on one rank all take as long, and 1f1b needs the least memory."""
    if pipeline_degree == 1:
        yield "1f1b", 1
        return
    for name, numbers in SCHEDULES:
        if name in wanted:
            yield from ((name, number) for number in numbers)
