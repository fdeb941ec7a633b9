"""Tensor parallelism for any model, found by the compiler: record it, choose layouts, keep this rank's slices, run.

    group = TensorGroup.of(process_group)
    module = shard(model, {"input_ids": ids, "labels": labels}, group)
    loss = module(input_ids=ids, labels=labels).loss
    loss.backward()                                  # gradients of this rank's slices
    print(module.source)                             # the program: collectives are calls on plain tensors
    print(describe(module.rewritten))                # layouts, collectives and bytes, block by block

Every rank of the group runs the same inputs and gets the same outputs. `plan` is "auto", "huggingface" (the model's own tensor-parallel
plan), "off", or styles by name pattern (see `smpc.codegen.rewrite.plan`). A recording belongs to one signature of the inputs; it is made
in training and in evaluation mode, with the same slices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from smpc.codegen.rewrite.outputs import keep_outputs
from smpc.codegen.rewrite.plan import Plan as StylePlan
from smpc.codegen.rewrite.plan import choose_by_plan, find_plan
from smpc.codegen.rewrite.sharding import REPLICATED, Layout
from smpc.codegen.rewrite.tensor_parallel import GROUP, ShardedTrace, describe, rewrite
from smpc.codegen.split import split
from smpc.codegen.stage import StageModule, build_stage
from smpc.compile import PipelineOptions, make_plan
from smpc.errors import ConfigError, UsageError
from smpc.executor.collectives import TensorGroup
from smpc.executor.sharded_state import load_whole, slice_parameters, whole_of
from smpc.sample_inputs import as_inputs
from smpc.tracer.guards import broken_guard
from smpc.tracer.ir import Trace
from smpc.tracer.literals import TraceDevice, map_references
from smpc.tracer.record import record
from smpc.tracer.replay import input_values

__all__ = ["ShardedModule", "describe", "place", "shard"]


@dataclass(frozen=True)
class _Program:
    """What runs in one mode."""

    trace: Trace  # of the whole model
    rewritten: ShardedTrace
    stage: StageModule
    source: str
    inputs: tuple[str, ...]


class ShardedModule(nn.Module):
    """One rank's part of a model: parameters are slices under their old names, calls are those of the model.

    `traces`: of the whole model in training and in evaluation mode. The layouts that `plan` gives the first of them are those of both.
    """

    def __init__(self, model: nn.Module, group: TensorGroup, traces: Mapping[bool, Trace], plan: StylePlan) -> None:
        super().__init__()
        self.training = model.training
        self.group = group
        self._traces = dict(traces)
        rewritten = rewrite(traces[model.training], choose_by_plan(traces[model.training], group.size, plan))
        self._plan = dataclasses.replace(plan, layouts=rewritten.layouts)
        place(model, rewritten, group)
        self.model = model
        self._programs = {model.training: _build(model, traces[model.training], rewritten)}

    @property
    def rewritten(self) -> ShardedTrace:
        """Layouts and collectives in the present mode."""
        return self._program.rewritten

    @property
    def source(self) -> str:
        """The program in the present mode, as readable Python."""
        return self._program.source

    @property
    def layouts(self) -> Mapping[str, Layout]:
        """How the parameters that this rank holds slices of are sliced, by every name that they have."""
        sliced = dict(self.rewritten.layouts)
        return {
            name: sliced[state.name]
            for state in self.rewritten.trace.state
            if state.name in sliced
            for name in state.names
        }

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the whole model returns, on every rank. TraceError for inputs of another signature than the sample's."""
        program = self._program
        values = input_values(program.trace, args, kwargs)
        broken = broken_guard(program.trace, self.model, values) if program.trace.guards else None
        if broken is not None:
            guard, found = broken
            raise UsageError(
                f"expected inputs for which {guard} gives {guard.expected}, as the sample's did, found {found}; shard another copy of "
                "the model with such inputs"
            )
        program.stage.refresh()
        outputs = program.stage(*(values[name] for name in program.inputs))
        trace = program.rewritten.trace
        by_name = dict(zip(trace.output_names, outputs, strict=True))
        device = next(iter(values.values())).device if values else torch.device("cpu")
        return _output(trace, by_name, device)

    def whole_state_dict(self) -> dict[str, Tensor]:
        """The whole model's `state_dict`, on every rank; all must call it."""
        state = self.model.state_dict(keep_vars=True)
        return {name: self._whole(name, tensor) for name, tensor in state.items()}

    def whole_gradients(self) -> dict[str, Tensor]:
        """The whole gradient of every parameter that has one, on every rank; all must call it."""
        found = ((name, parameter.grad) for name, parameter in self.model.named_parameters())
        return {name: self._whole(name, grad) for name, grad in found if grad is not None}

    def load_whole_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Takes this rank's slices from a whole model's `state_dict`. UsageError if it does not fit."""
        load_whole(self.model, self.layouts, state, self.group)

    @property
    def _program(self) -> _Program:
        if self.training not in self._programs:
            trace = self._traces[self.training]
            rewritten = rewrite(trace, choose_by_plan(trace, self.group.size, self._plan))
            self._programs[self.training] = _build(self.model, trace, rewritten)
        return self._programs[self.training]

    def _whole(self, name: str, tensor: Tensor) -> Tensor:
        return whole_of(tensor, self.layouts.get(name, REPLICATED), self.group)


def shard(
    model: nn.Module,
    sample_inputs: Any,
    group: TensorGroup,
    plan: str | Mapping[str, str] = "auto",
    outputs: Sequence[str] | None = None,
) -> ShardedModule:
    """This rank's part of `model`, which it takes over: parameters are replaced by slices in place.

    `sample_inputs`: one batch, in the forms of `smpc.sample_inputs`. `outputs` are the only tensors that calls return, such as ("loss",),
    so that logits need not be gathered; in place of others there is None. By default all are returned. A model on the meta device stays
    there, as slices: move it with `to_empty` and fill it with `load_whole_state_dict`. Raises ConfigError for a plan or an output that
    is wrong, TraceError for a model that cannot be recorded.
    """
    _check_not_sharded(model)
    args, kwargs = as_inputs(sample_inputs)
    styles = find_plan(model, plan)
    traces = {training: _recorded(model, training, args, kwargs) for training in (model.training, not model.training)}
    if outputs is not None:
        traces = {training: keep_outputs(trace, outputs) for training, trace in traces.items()}
    return ShardedModule(model, group, traces, styles)


def place(model: nn.Module, sharded: ShardedTrace, group: TensorGroup) -> None:
    """Replaces a model's parameters by this rank's slices, in place, for programs made of a sharded trace.

    With `compilation = compile_model(model, batch, tensor_parallel_degree=2, ...)` and `place(model, compilation.sharded, group)`, a
    `smpc.Runtime` over the model runs the compilation: pipeline and tensor parallelism together. Every pipeline rank has its own group.
    """
    _check_not_sharded(model)
    if group.size != sharded.degree:
        raise ConfigError(f"expected a group of {sharded.degree} tensor-parallel ranks, found one of {group.size}")
    vars(model)[GROUP] = group
    slice_parameters(model, dict(sharded.layouts), group)


def _check_not_sharded(model: nn.Module) -> None:
    if GROUP in vars(model):
        raise ConfigError(f"expected a model without an attribute {GROUP!r}, found one; has it been sharded before?")


def _recorded(model: nn.Module, training: bool, args: Any, kwargs: Any) -> Trace:
    modes = [(module, module.training) for module in model.modules()]
    if training != model.training:
        model.train(training)
    try:
        return record(model, args, kwargs)
    finally:
        for module, before in modes:
            module.training = before


def _build(model: nn.Module, trace: Trace, rewritten: ShardedTrace) -> _Program:
    plan = make_plan(rewritten.trace, PipelineOptions(), prove=False)
    (code,), _ = split(rewritten.trace, plan)
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    return _Program(trace, rewritten, build_stage(code, model, device), code.source, code.inputs)


def _output(trace: Trace, values: Mapping[str, Tensor], device: torch.device) -> Any:
    leaves = (map_references(leaf, lambda name: values[name]) for leaf in trace.output_leaves)
    return trace.output.unflatten(device if isinstance(leaf, TraceDevice) else leaf for leaf in leaves)
