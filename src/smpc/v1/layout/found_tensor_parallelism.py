"""Tensor parallelism that the compiler finds, in a training script: the configuration's `tensor_parallel_plan`.

    degrees = {"pipeline_parallel_degree": 2, "tensor_parallel_degree": 2, "ddp": True}
    smp.init(degrees | {"prescaled_batch": True, "tensor_parallel_plan": "auto"})
    model = smp.DistributedModel(AnyModel())          # nothing is annotated

The first step records the whole model, chooses layouts (`smpc.codegen.rewrite`), cuts the trace of one tensor-parallel rank into
stages, and leaves each rank its slices of its stage's parameters. All later signatures keep the layouts of the first.

    model is created        until the first step              what a rank holds in its first step, at most
    with a delay            no memory for its parameters      its slices, and a block of one parameter being drawn
    as always               whole, on the CPU                 that, and on its device its slices and one whole parameter; then slices alone

Terms
    plan       "modules": `smp.tensor_parallelism` decides, and this file is not used; otherwise as in
               `smpc.codegen.rewrite.tensor_parallel.styles`: "auto", "huggingface", or a .json file of styles by name pattern
    outputs    names of the tensors that the model returns whole; others become None, so that logits need not be gathered

All ranks of a group get the same batch and compute equal gradients of whole parameters, so gradients are only reduced over replicas.
They start from the parameters, buffers and random state of the group's first rank.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn

from smpc.codegen.rewrite.expert_parallel import parts_of_experts
from smpc.codegen.rewrite.tensor_parallel.layouts import Layout, LayoutKind
from smpc.codegen.rewrite.tensor_parallel.rewrite import GROUP, ShardedTrace
from smpc.codegen.rewrite.tensor_parallel.styles import read_styles
from smpc.compile.divided_experts import divided_parts, find_sharing_plan
from smpc.compile.passes import Sharing
from smpc.config import MODULES
from smpc.errors import ConfigError, TraceError
from smpc.executor.collectives import TensorGroup
from smpc.executor.parameter_slices import check_no_hooks, slice_of
from smpc.executor.replicas.data_parallel import broadcast
from smpc.mesh import Axis
from smpc.nn.init.note_slices import note_sliced
from smpc.nn.parallel import ParameterSlice, distributed_modules
from smpc.tracer.ir import Trace
from smpc.v1.layout.placement import Placement, Slices
from smpc.v1.session.object_messages import gather_objects
from smpc.v1.session.process_state import Session


class CompiledTensors:
    """How one rank's model is split over its tensor-parallel group: decided by the first program, the same for all."""

    def __init__(self, module: nn.Module, session: Session, slices: Slices) -> None:
        config = session.config
        _check_none_distributed(module)
        self._module, self._session, self._slices = module, session, slices
        self._group = session.parallel.group
        self._plan = find_sharing_plan(module, read_styles(config.tensor_parallel_plan, "tensor_parallel_plan"))
        self._outputs = config.kept_outputs
        self.latest: ShardedTrace | None = None  # the rewritten form of the last recording
        self._sliced: dict[int, None] = {}  # parameters, by identity
        vars(module)[GROUP] = self._group  # parameters that the programs read

    @property
    def is_placed(self) -> bool:
        """Whether layouts are decided, and parameters are slices."""
        return self._plan.layouts is not None

    def is_sliced(self, tensor: Tensor) -> bool:
        """Whether each rank holds its own slice of a parameter."""
        return id(tensor) in self._sliced

    def exchange(self, exchanged: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Some parameters were replaced by others."""
        moved = {id(old): id(new) for old, new in exchanged.items()}
        self._sliced = dict.fromkeys(moved.get(key, key) for key in self._sliced)

    @property
    def sharing(self) -> Sharing:
        """Each rank's part of the whole model. Only the first signature must have the outputs: a signature for evaluation may have no loss.

        Of experts that are divided over expert-parallel ranks each rank of this group has some: slices of these would be slices of slices.
        """
        parts = divided_parts(self._module)
        whole = tuple(name for name in parts_of_experts(self._module) if name not in parts)
        by_expert = {**dict(self._plan.by_expert), **parts}
        plan = dataclasses.replace(self._plan, whole=whole, by_expert=tuple(by_expert.items()))
        return Sharing(self._group.size, plan, self._outputs, may_lack_outputs=self.is_placed)

    def place(self, placement: Placement, state: MutableMapping[Tensor, Any]) -> None:
        """After the first program: replaces the parameters that this rank holds by its slices. Collective over the group.

        Parameters with values are sliced on this rank's device, one after another; delayed parameters are drawn as slices. `state`: an
        optimizer's, which may have some before the first step; what has the shape of a parameter is sliced, too.
        """
        assert self.latest is not None, "a trace has been rewritten"
        check_no_hooks(self._module, dict(self.latest.layouts))
        placement.release_graphs()
        self._agree(self.latest.trace, placement)
        self._plan = dataclasses.replace(self._plan, layouts=self.latest.layouts)
        layouts, group, device = dict(self.latest.layouts), self._group, self._session.device
        assert group.process_group is not None, "there are several ranks"
        for name, parameter in self._module.named_parameters():
            layout, whole = layouts.get(name), placement.shape(name)
            if layout is not None:
                shard = _within(self._slices.get(name), shard_of(layout, whole[layout.dim], group))
                self._sliced[id(parameter)] = None
                self._slices.add(name, shard)
                placement.slice(name, shard, torch.Size(layout.local_shape(tuple(whole), group.size)))
            if parameter.is_meta or not placement.is_local(name):
                continue
            parameter.grad = None
            values = parameter.data.to(device)
            broadcast([values], group.process_group)
            parameter.data = values if layout is None else slice_of(values, layout, group).clone()
            del values  # before the next one comes
            for key, value in list(state.get(parameter, {}).items()):
                if layout is not None and isinstance(value, Tensor) and value.shape == whole:
                    state[parameter][key] = slice_of(value.to(device), layout, group).clone()
        placement.apply()
        note_sliced(self._module, layouts, group, functools.partial(_shape_in, weakref.ref(placement)))
        broadcast([b for name, b in self._module.named_buffers() if placement.is_local(name)], group.process_group)

    def _agree(self, trace: Trace, placement: Placement) -> None:
        """Makes ranks draw the same numbers for whole data. Raises TraceError on all ranks of the group if they have different models."""
        session = self._session
        delayed = tuple(name for name, parameter in self._module.named_parameters() if parameter.is_meta)
        on_gpu = session.device.type == "cuda"
        cuda = torch.cuda.get_rng_state(session.device) if on_gpu else None
        mine = (trace.fingerprint, delayed, placement.seed, torch.get_rng_state(), cuda)
        found = gather_objects(mine, session.groups[Axis.TP], session.message_device, session.device)
        fingerprints = [fingerprint for fingerprint, *_ in found]
        if len(dict.fromkeys(fingerprints)) > 1:
            raise TraceError(
                "the ranks of a tensor-parallel group recorded different models, fingerprints by rank: "
                f"{[fingerprint[:12] for fingerprint in fingerprints]}; build the same model on every rank, and give all the same batch"
            )
        if any(names != delayed for _, names, *_ in found):
            raise TraceError(
                "the ranks of a tensor-parallel group created their models differently: expected all to delay the initialization of the "
                f"same parameters, found, by rank, {[len(names) for _, names, *_ in found]} of them; use "
                "smp.delay_param_initialization on every rank or on none"
            )
        _, _, placement.seed, cpu, cuda = found[0]
        torch.set_rng_state(cpu.cpu())
        if cuda is not None:
            torch.cuda.set_rng_state(cuda.cpu(), session.device)


def make_compiled_tensors(
    module: nn.Module, session: Session, slices: Slices, *, measures: bool
) -> CompiledTensors | None:
    """None if the configuration leaves tensor parallelism to modules, or if there is one tensor-parallel rank.

    Raises ConfigError for a wrong plan, or for a setting that does not combine with one.
    """
    if session.config.tensor_parallel_plan == MODULES or session.mesh.tp_size == 1:
        return None
    if measures:
        raise ConfigError(
            "trace_execution_times: not with tensor_parallel_plan, nor is trace_memory_usage: they measure the whole model; leave "
            "one of them out"
        )
    return CompiledTensors(module, session, slices)


def shard_of(layout: Layout, size: int, group: TensorGroup) -> ParameterSlice:
    """A layout along a dimension of this size, in the form that checkpoints and gathered state use."""
    assert layout.kind is LayoutKind.SHARDED, layout
    runs, begin = [], 0
    for block in layout.blocks or (size,):
        length = block // group.size
        runs.append((begin + group.rank * length, length))
        begin += block
    return ParameterSlice(layout.dim, size, runs[0][0], tuple(runs) if len(runs) > 1 else ())


def _within(outer: ParameterSlice | None, inner: ParameterSlice) -> ParameterSlice:
    """A slice of a slice, which begin in the same dimension, as a slice of the whole. `outer`: one run of it; None: all of it."""
    return inner if outer is None else ParameterSlice(outer.dim, outer.size, outer.start + inner.start)


def _check_none_distributed(module: nn.Module) -> None:
    found = [name or "the model" for name, _ in distributed_modules(module)]
    if found:
        raise ConfigError(
            f"tensor_parallel_plan: expected a model without distributed modules, which communicate by themselves, found {found[0]} and "
            f"{len(found) - 1} more; leave out smp.tensor_parallelism, or set tensor_parallel_plan: {MODULES}"
        )


def _shape_in(placement: weakref.ref[Placement], name: str, _: Tensor) -> tuple[torch.Size, bool] | None:
    """See `smpc.nn.init.note_slices.note_sliced`."""
    found = placement()
    return None if found is None else (found.shape(name), found.is_local(name))
