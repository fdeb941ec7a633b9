"""A model whose weights, sequences or both several ranks share: recorded, rewritten and run in place (`smpc.in_place`).

Layouts of weights are chosen once, by a sample; every recording that follows keeps them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from smpc.codegen.rewrite.context_parallel.rewrite import ZIGZAG, ContextPlan
from smpc.codegen.rewrite.expert_parallel import parts_of_experts
from smpc.codegen.rewrite.tensor_parallel.layouts import Layout
from smpc.codegen.rewrite.tensor_parallel.rewrite import CONTEXT, TENSOR, group_attribute
from smpc.codegen.rewrite.tensor_parallel.styles import find_plan
from smpc.compile.passes import ContextSharing, Sharing, rewrite_trace
from smpc.compile.result import Traced
from smpc.errors import SmpcError
from smpc.executor.collectives import TensorGroup
from smpc.executor.draws import draw_as_first
from smpc.in_place import InPlace, Whole, skeleton, whole_parameters
from smpc.recorded import OPTIONS, check_not_shared
from smpc.sample_inputs import Inputs
from smpc.tracer.ir import NodeKind, Trace
from smpc.tracer.record import record
from smpc.v2.transforming.sequences import own_output, whole_inputs
from smpc.v2.transforming.slices import Cut, Part, Slices, keep_slices, note_slices

_OPTIONS = dataclasses.replace(OPTIONS, draw_as_one_process=True)  # as the reference asks


class Shared(InPlace):
    """The forward of a model that ranks share. `tensor`, `context`: the groups, where there are several ranks."""

    def __init__(
        self,
        model: nn.Module,
        parameters: tuple[Whole, ...],
        tensor: TensorGroup | None,
        context: TensorGroup | None,
        attention: str,
    ) -> None:
        super().__init__(model, parameters, self._rewritten)
        self.context = context
        self._groups = [group for group in (tensor, context) if group is not None]
        self._called: set[str] = set()
        self.layouts: Mapping[str, Layout] = {}
        self._tensor = None if tensor is None else Sharing(tensor.size, find_plan(model, "auto"))
        plan = ContextPlan(ZIGZAG, attention, output_dim=1)
        experts = parts_of_experts(model)
        self._context = None if context is None else ContextSharing(context.size, plan, experts=experts)

    def choose(self, model: nn.Module, samples: Sequence[Inputs]) -> None:
        """Chooses the layouts of weights, by the first of the samples that can be recorded. The last one's error if none can."""
        if self._tensor is None:
            return
        copied = skeleton(model, self._parameters).model
        for number, (args, kwargs) in enumerate(samples):
            try:
                with torch.enable_grad():
                    traced = self._rewritten(record(copied, args, kwargs))
            except SmpcError:
                if number + 1 == len(samples):
                    raise
                continue
            break
        assert traced.sharded is not None, "it was rewritten for the ranks of a group"
        chosen = traced.sharded
        self._called = {node.target for node in chosen.trace.nodes if node.kind is NodeKind.CALL_MODULE}
        self._tensor = dataclasses.replace(
            self._tensor, plan=dataclasses.replace(self._tensor.plan, layouts=chosen.layouts)
        )
        sliced = dict(chosen.layouts)
        self.layouts = {
            name: sliced[one.name] for one in chosen.trace.state if one.name in sliced for name in one.names
        }

    def is_inside(self, name: str) -> bool:
        """Whether a parameter is used by a module that is called whole."""
        return any(name.startswith(f"{module}.") for module in self._called)

    def otherwise(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output for the whole sequence, cut like the inputs."""
        if self.context is not None:
            args, kwargs = whole_inputs(args, kwargs, self.context)
        return super().otherwise(*args, **kwargs)

    def begin(self, traced: Traced, device: torch.device) -> None:
        """Ranks that share a model draw as the first of them, however the script has seeded them. Modules called whole may draw, too."""
        if any(node.random or node.kind is NodeKind.CALL_MODULE for node in traced.trace.nodes):
            for group in self._groups:
                draw_as_first(group, device)

    def finish(self, traced: Traced, position: int, value: Any) -> Any:
        """Outputs that have the sequence as dimension 1 are cut."""
        if self.context is None or not isinstance(value, Tensor):
            return value
        assert traced.context is not None, "it was rewritten for the ranks of a group"
        slices, whole = traced.context.slices
        if position not in slices and position not in whole:
            return value
        return own_output(value, is_whole=position in whole, group=self.context)

    def _rewritten(self, trace: Trace) -> Traced:
        return rewrite_trace(trace, _OPTIONS, self._tensor, context=self._context)


def share(
    model: nn.Module,
    samples: Sequence[Inputs],
    tensor: TensorGroup | None,
    context: TensorGroup | None,
    *,
    attention: str,
    sources: Sequence[int] | None,
) -> Shared:
    """Has the ranks of the groups share a model, in place. `samples`: batches, one of which can be recorded. Collective.

    `sources`: see `smpc.v2.transforming.slices`.

    Raises TraceError if no sample can be recorded, ConfigError if the model is shared already.
    """
    for axis in (TENSOR, CONTEXT):
        check_not_shared(model, axis)
    whole = whole_parameters(model)
    shared = Shared(model, whole, tensor, context, attention)
    shared.choose(model, samples)
    if tensor is not None:
        vars(model)[group_attribute(TENSOR)] = tensor
        shapes = {name: one.shape for one in whole for name in one.names}
        parts = {
            name: Part((Cut(layout, shapes[name], tensor),), is_inside=shared.is_inside(name))
            for name, layout in shared.layouts.items()
        }
        keep_slices(model, shared.layouts, tensor, sources)
        note_slices(model, Slices(parts))
    if context is not None:
        vars(model)[group_attribute(CONTEXT)] = context
    vars(model)["forward"] = shared
    return shared
