"""What one rank of each stage computes for a microbatch, by its size and by how many ranks share it: recorded and rewritten when asked for.

A model is recorded once for each size of a microbatch, and rewritten once for each number of tensor-parallel, context-parallel and
expert-parallel ranks. Each takes long for a large model; `cost` foretells how long, in about milliseconds of a core, from the number of
operations alone: whoever has a budget is told the same on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from smpc.codegen.rewrite.context_parallel.rewrite import ContextPlan, collectives_of
from smpc.codegen.rewrite.expert_parallel import Experts, recorded_inside
from smpc.codegen.rewrite.outputs import loss_outputs
from smpc.compile.divided_experts import experts_to_divide
from smpc.compile.options import PipelineOptions
from smpc.compile.passes import ContextSharing, Sharing, rewrite_trace
from smpc.compile.result import Traced
from smpc.compile.search.space import Shape
from smpc.errors import ConfigError, SmpcError
from smpc.experts.confirm_cut import Confirmations
from smpc.mesh import Axis, Mesh
from smpc.partitioner.costs.device import Device, Group
from smpc.partitioner.costs.node_costs import Collective, CostModel, NodeTimes, node_times, times_with_collectives
from smpc.sample_inputs import Inputs, first_microbatch
from smpc.tracer.ir import Trace
from smpc.tracer.record import record
from smpc.tracer.structure import flatten

_RECORDED, _SHARED, _SEQUENCES = 1.3, 0.25, 0.5  # milliseconds for each operation
_CHECKED = 800.0  # milliseconds, once: attention over slices of a sequence is run beside the recorded one


@dataclass(frozen=True, slots=True)
class Load:
    """The size of a microbatch, and the ranks that share its operations, its sequences, and the experts."""

    size: int
    tensor: int = 1
    context: int = 1
    expert: int = 1

    @classmethod
    def of(cls, shape: Shape) -> Load:
        """The load of a shape."""
        return cls(
            shape.microbatch_size,
            shape.tensor_parallel_degree,
            shape.context_parallel_degree,
            shape.expert_parallel_degree,
        )

    @property
    def degrees(self) -> tuple[int, int, int]:
        """All but the size."""
        return self.tensor, self.context, self.expert


@dataclass
class Workloads:
    """The microbatches of one model."""

    model: nn.Module
    inputs: Inputs
    device: Device
    leaf_modules: tuple[str, ...]
    recorded: dict[int, Trace] = field(default_factory=dict)
    _with_whole_experts: dict[int, Trace] = field(default_factory=dict)
    known: dict[Load, Traced | str] = field(default_factory=dict)  # text: why there is none
    _losses: dict[int, tuple[str, ...] | None] = field(default_factory=dict)
    _divided: dict[int, tuple[Experts, ...]] = field(default_factory=dict)
    _confirmations: Confirmations = field(default_factory=Confirmations)
    _collectives: dict[Load, list[tuple[Sequence[Collective], Axis]]] = field(default_factory=dict)

    @property
    def batch_size(self) -> int:
        """Parts into which every tensor of the batch can be split: the greatest common divisor of their sizes along axis 0."""
        leaves, _ = flatten(self.inputs)
        sizes = [leaf.shape[0] for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()]
        if 0 in sizes:
            raise ConfigError("sample inputs: expected tensors of at least one sample, found an empty one")
        return math.gcd(*sizes) or 1

    def trace(self, size: int) -> Trace:
        """A microbatch of this size, as the model computes it."""
        if size not in self.recorded:
            args, kwargs = first_microbatch(self.inputs, self.batch_size // size)
            self.recorded[size] = record(self.model, args, kwargs, leaf_modules=self.leaf_modules)
        return self.recorded[size]

    @property
    def _opens_experts(self) -> bool:
        """Whether recordings for ranks that divide experts are others than those for ranks that do not, as far as is known."""
        return bool(self._with_whole_experts)

    def _trace_for_experts(self, load: Load) -> Trace:
        """The same, with those experts called whole that ranks divide."""
        trace = self.trace(load.size)
        inside = recorded_inside(trace, self.divided(load.expert))
        if not inside:
            return trace
        if load.size not in self._with_whole_experts:
            args, kwargs = first_microbatch(self.inputs, self.batch_size // load.size)
            leaves = (*self.leaf_modules, *inside)
            self._with_whole_experts[load.size] = record(self.model, args, kwargs, leaf_modules=leaves)
        return self._with_whole_experts[load.size]

    def outputs(self, load: Load) -> tuple[str, ...] | None:
        """What ranks that share operations or sequences return whole: the loss, where the model has one; None: all."""
        if load.tensor == load.context == 1:
            return None
        if load.size not in self._losses:
            self._losses[load.size] = loss_outputs(self.trace(load.size))
        return self._losses[load.size]

    def nearest(self, load: Load) -> Load | None:
        """The smallest microbatch that is known of ranks that share as much; None if there is none."""
        sizes = [
            known.size
            for known, traced in self.known.items()
            if known.degrees == load.degrees and isinstance(traced, Traced)
        ]
        return replace(load, size=min(sizes)) if sizes else None

    def cost(self, load: Load) -> float:
        """What `get` will take: see the module docstring."""
        if load in self.known:
            return 0.0
        number = len(next(iter(self.recorded.values())).nodes) if self.recorded else 0
        shared = (load.tensor > 1 or load.expert > 1) * _SHARED * number
        sequences = (load.context > 1) * (_SEQUENCES * number + _CHECKED)
        is_recorded = load.size in (
            self._with_whole_experts if load.expert > 1 and self._opens_experts else self.recorded
        )
        return (not is_recorded) * _RECORDED * number + shared + sequences

    def get(self, load: Load) -> Traced | str:
        """What one rank computes; a text says why ranks cannot share it so."""
        if load not in self.known:
            self.trace(load.size)
            try:
                self.known[load] = self._made(self._trace_for_experts(load), load)
            except SmpcError as error:
                self.known[load] = str(error)
        return self.known[load]

    def divided(self, degree: int) -> tuple[Experts, ...]:
        """The experts that so many ranks divide; ConfigError if there are none. Others stay whole."""
        if degree not in self._divided:
            self._divided[degree] = experts_to_divide(self.model, degree, self._confirmations) if degree > 1 else ()
        return self._divided[degree]

    def _made(self, trace: Trace, load: Load) -> Traced | str:
        options = PipelineOptions(
            device=self.device, data_parallel_degree=load.expert, expert_parallel_degree=load.expert
        )
        outputs, plan = self.outputs(load), ContextPlan(sums_later=True)
        found = rewrite_trace(
            trace,
            options,
            Sharing(load.tensor, outputs=outputs) if load.tensor > 1 else None,
            context=ContextSharing(load.context, plan, outputs) if load.context > 1 else None,
            experts=self.divided(load.expert),
        )
        if found.sharded is not None and not found.sharded.layouts:
            return f"no parameter can be split over {load.tensor} tensor-parallel ranks"
        return found

    def exchanges(self, load: Load, mesh: Mesh) -> list[tuple[Sequence[Collective], Group]]:
        """The collectives of a rank's microbatch, and the groups that they are among on this mesh."""
        if load not in self._collectives:
            traced = self.traced(load)
            found = self._collectives[load] = []
            if traced.sharded is not None:
                found.append((traced.sharded.collectives, Axis.TP))
            if traced.context is not None:
                found.append((collectives_of(traced.context, traced.trace), Axis.CP))
            if traced.divided is not None:
                found.append((traced.divided.collectives, Axis.EP))
        return [(collectives, Group.of(mesh, axis, self.device)) for collectives, axis in self._collectives[load]]

    def times(self, load: Load, mesh: Mesh, costs: CostModel) -> NodeTimes | None:
        """With ranks that share something, the times of a rank's operations and collectives on this mesh; None without."""
        exchanges = self.exchanges(load, mesh)
        if not exchanges:
            return None
        trace = self.traced(load).trace
        plain = node_times(trace, costs)
        forward, backward = plain.forward, plain.backward
        for collectives, group in exchanges:
            found = times_with_collectives(trace, collectives, costs, group, self.device, plain)
            forward, backward = forward + found.forward - plain.forward, backward + found.backward - plain.backward
        return replace(plain, forward=forward, backward=backward)

    def traced(self, load: Load) -> Traced:
        """What one rank computes, of ranks that can share it."""
        traced = self.get(load)
        assert isinstance(traced, Traced), "only asked of what can be shared"
        return traced
