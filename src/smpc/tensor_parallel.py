"""Tensor parallelism for any model, found by the compiler: record it, choose layouts, keep this rank's slices, run.

    group = TensorGroup.of(process_group)
    module = shard(model, {"input_ids": ids, "labels": labels}, group)
    loss = module(input_ids=ids, labels=labels).loss
    loss.backward()                                  # gradients of this rank's slices
    print(module.source)                             # the program: collectives are calls on plain tensors
    print(describe(module.rewritten))                # layouts, collectives and bytes, block by block

Every rank of the group runs the same inputs and gets the same outputs. `plan` is "auto", "huggingface" (the model's own tensor-parallel
plan), "off", or styles by name pattern (see `smpc.codegen.rewrite.tensor_parallel.styles`). A recording belongs to one signature of the
inputs; it is made in training and in evaluation mode, with the same slices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from smpc.codegen.rewrite.tensor_parallel.layouts import REPLICATED, Layout
from smpc.codegen.rewrite.tensor_parallel.rewrite import GROUP, TENSOR, ShardedTrace, describe
from smpc.codegen.rewrite.tensor_parallel.styles import StylePlan
from smpc.compile.divided_experts import find_sharing_plan
from smpc.compile.passes import Sharing, rewrite_trace
from smpc.compile.result import Traced
from smpc.errors import ConfigError
from smpc.executor.collectives import TensorGroup
from smpc.executor.parameter_slices import load_whole, slice_parameters, whole_of
from smpc.nn.init.note_slices import note_sliced
from smpc.nn.script_writes.compare_writes import compare_scripts
from smpc.optimizers.split_parameters import note_split
from smpc.recorded_module import RecordedModule, build_program, check_not_shared, record_modes
from smpc.tracer.ir import Trace
from smpc.tracer.record import Recording

__all__ = ["ShardedModule", "describe", "place", "shard"]


class ShardedModule(RecordedModule):
    """One rank's part of a model: parameters are slices under their old names, and it is called like the model.

    `recordings`: of the whole model in training and in evaluation mode. Both use the layouts that `plan` gives the first of them.
    """

    def __init__(
        self,
        model: nn.Module,
        group: TensorGroup,
        recordings: Mapping[bool, Recording],
        plan: StylePlan,
        outputs: Sequence[str] | None = None,
        draw_as_one_process: bool = False,
    ) -> None:
        super().__init__(recordings, draw_as_one_process)
        self.training = model.training
        self.group = group
        trace = recordings[model.training].trace
        traced = rewrite_trace(trace, self._options, Sharing(group.size, plan, outputs))
        rewritten = _sharded(traced)
        self._sharing = Sharing(group.size, dataclasses.replace(plan, layouts=rewritten.layouts), outputs)
        place(model, rewritten, group)
        self._begin(model)
        self._programs[model.training] = build_program(model, trace, traced)

    @property
    def rewritten(self) -> ShardedTrace:
        """Layouts and collectives in the present mode."""
        return _sharded(self._program.traced)

    @property
    def layouts(self) -> Mapping[str, Layout]:
        """How this rank's sliced parameters are sliced, by every name that they have."""
        return _by_every_name(self.rewritten)

    def whole_state_dict(self) -> dict[str, Tensor]:
        """The whole model's `state_dict`, on every rank; all must call it."""
        compare_scripts(self.model)
        state = self.model.state_dict(keep_vars=True)
        return {name: self._whole(name, tensor) for name, tensor in state.items()}

    def whole_gradients(self) -> dict[str, Tensor]:
        """The whole gradient of every parameter that has one, dense, on every rank; all must call it."""
        found = ((name, parameter.grad) for name, parameter in self.model.named_parameters())
        return {name: self._whole(name, grad.to_dense()) for name, grad in found if grad is not None}

    def load_whole_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Takes this rank's slices from a whole model's `state_dict`. UsageError if it does not fit."""
        load_whole(self.model, self.layouts, state, self.group)

    def _rewritten(self, trace: Trace) -> Traced:
        return rewrite_trace(trace, self._options, self._sharing)

    def _whole(self, name: str, tensor: Tensor) -> Tensor:
        return whole_of(tensor, self.layouts.get(name, REPLICATED), self.group)


def shard(
    model: nn.Module,
    sample_inputs: Any,
    group: TensorGroup,
    plan: str | Mapping[str, str] = "auto",
    outputs: Sequence[str] | None = None,
    *,
    draw_as_one_process: bool = False,
) -> ShardedModule:
    """This rank's part of `model`, which it takes over: parameters are replaced by slices in place.

    `sample_inputs`: one batch, in the forms of `smpc.sample_inputs`. `outputs` are the only tensors that calls return, such as ("loss",),
    so that logits need not be gathered; the others are None. By default all are returned. `draw_as_one_process`: dropout drops the same
    elements as without the group, at a cost in memory and time (docs/tensor_parallel_compiler.md). A model on the meta device stays
    there, as slices: move it with `to_empty` and fill it with `load_whole_state_dict`. Raises ConfigError for a wrong plan or output,
    TraceError for a model that cannot be recorded.
    """
    check_not_shared(model, TENSOR)
    styles = find_sharing_plan(model, plan)
    return ShardedModule(model, group, record_modes(model, sample_inputs), styles, outputs, draw_as_one_process)


def place(model: nn.Module, sharded: ShardedTrace, group: TensorGroup) -> None:
    """Replaces a model's parameters by this rank's slices, in place, for programs made of a sharded trace.

    With `compilation = compile_model(model, batch, tensor_parallel_degree=2, ...)` and `place(model, compilation.sharded, group)`, a
    `smpc.Runtime` over the model runs the compilation: pipeline and tensor parallelism together. Every pipeline rank has its own group.
    """
    check_not_shared(model, TENSOR)
    if group.size != sharded.degree:
        raise ConfigError(f"expected a group of {sharded.degree} tensor-parallel ranks, found one of {group.size}")
    vars(model)[GROUP] = group
    slice_parameters(model, dict(sharded.layouts), group)
    note_sliced(model, _by_every_name(sharded), group)
    if group.process_group is not None:
        note_split(model, _by_every_name(sharded), group.process_group)


def _by_every_name(sharded: ShardedTrace) -> dict[str, Layout]:
    layouts = dict(sharded.layouts)
    return {name: layouts[state.name] for state in sharded.trace.state if state.name in layouts for name in state.names}


def _sharded(traced: Traced) -> ShardedTrace:
    assert traced.sharded is not None, "it was rewritten for the ranks of a group"
    return traced.sharded
