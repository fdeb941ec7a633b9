"""A model that runs its recorded and rewritten trace, in one process: the base of the modules of tensor- and context-parallel ranks.

A recording belongs to one signature of the inputs and to the values that the model's Python has read. It is made in training and in
evaluation mode.
"""

from __future__ import annotations

import contextlib
import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from smpc.changes_after_compile import KeptParameters, LateHooks
from smpc.codegen.program import StageCode
from smpc.codegen.rewrite.tensor_parallel.rewrite import group_attribute
from smpc.codegen.stage import StageModule, build_stage
from smpc.compile.options import PipelineOptions
from smpc.compile.passes import plan_trace, write_programs
from smpc.compile.result import Traced
from smpc.errors import ConfigError, StepError, UsageError
from smpc.nn.script_writes.between_steps import are_noticed, plain_parameters
from smpc.nn.script_writes.compare_writes import compare_scripts
from smpc.output_gradients import copied_outputs, without_gradient
from smpc.sample_inputs import as_inputs
from smpc.tracer.attempt import RecordingRequest
from smpc.tracer.constants import Ref, TraceDevice, map_references
from smpc.tracer.environment.environment_guards import Environment
from smpc.tracer.environment.object_identity import moved
from smpc.tracer.input_guards import broken_guard
from smpc.tracer.ir import Trace
from smpc.tracer.left_inputs import LeftInputs
from smpc.tracer.record import Recording, record_guarded
from smpc.tracer.replay import input_values

OPTIONS = PipelineOptions(kernels="off")


@dataclass(frozen=True)
class Program:
    """The program of one mode."""

    trace: Trace  # of the whole model
    traced: Traced
    stage: StageModule
    source: str
    inputs: tuple[str, ...]
    late_hooks: LateHooks
    code: StageCode
    parameters: KeptParameters
    copied: frozenset[str]

    @classmethod
    def of(cls, model: nn.Module, trace: Trace, traced: Traced, code: StageCode) -> Program:
        """The program over the model's parameters of now."""
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        stage, late_hooks = build_stage(code, model, device), LateHooks(model, trace, [code])
        copied = copied_outputs(traced.trace)
        return cls(trace, traced, stage, code.source, code.inputs, late_hooks, code, KeptParameters(model), copied)


class RecordedModule(nn.Module, ABC):
    """It is called like the model, and runs a program for each mode. `recordings`: of the whole model, by `training`."""

    def __init__(self, recordings: Mapping[bool, Recording], draw_as_one_process: bool = False) -> None:
        super().__init__()
        self._options = dataclasses.replace(OPTIONS, draw_as_one_process=draw_as_one_process)
        self._recordings = dict(recordings)
        self._programs: dict[bool, Program] = {}

    model: nn.Module

    def _begin(self, model: nn.Module) -> None:
        """Called when the model has this rank's parameters: starts the guards of the recordings."""
        self.model, self._environments = model, dict[bool, Environment]()
        for training, each in self._recordings.items():
            with _in_mode(model, training):
                self._environments[training] = moved(each.environment, each.trace, model.named_modules())

    @abstractmethod
    def _rewritten(self, trace: Trace) -> Traced:
        """This rank's part of a trace."""

    @property
    def source(self) -> str:
        """The program in the present mode, as readable Python."""
        return self._program.source

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError(
            f"{type(self).__name__}: expected not to be copied or pickled, as its ranks run programs together; save whole_state_dict(), or "
            "shard another copy of the model"
        )

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The whole model's result, on every rank. torch.compile leaves the module as it is.

        Raises TraceError for inputs of another signature than the sample's, StepError for a model that has changed since it was
        sharded.
        """
        with plain_parameters(self.model) if are_noticed(self.model) else contextlib.nullcontext():
            return self._run(args, kwargs)

    def _run(self, args: Any, kwargs: Any) -> Any:
        program = self._program_of_now()
        self._check_model(program)
        values = input_values(program.trace, args, kwargs)
        _check_differentiated(program.trace, values)
        broken = broken_guard(program.trace, self.model, values) if program.trace.guards else None
        if broken is not None:
            guard, found = broken
            raise UsageError(
                f"expected inputs for which {guard} gives {guard.expected}, as the sample's did, found {found}; shard another copy of "
                "the model with such inputs"
            )
        compare_scripts(self.model)
        program.stage.refresh()
        outputs = program.stage(*(values[name] for name in program.inputs))
        trace = program.traced.trace
        by_name = dict(zip(trace.output_names, outputs, strict=True))
        device = next(iter(values.values())).device if values else torch.device("cpu")
        return outputs_of(trace, by_name, device, (args, kwargs), copied=program.copied)

    def _check_model(self, program: Program) -> None:
        """StepError if the program no longer matches the model; else sets the state that a run of the model itself would leave."""
        difference = self._environments[self.training].difference()
        if difference is not None:
            raise StepError(f"{difference} when the model was sharded; shard another copy of it, or put it back")
        program.late_hooks.check()
        self._recordings[self.training].environment.leave()

    @property
    def _program(self) -> Program:
        """Of the present mode."""
        if self.training not in self._programs:
            trace = self._recordings[self.training].trace
            self._programs[self.training] = build_program(self.model, trace, self._rewritten(trace))
        return self._programs[self.training]

    def _program_of_now(self) -> Program:
        """Over the parameters that the model has now: `to_empty`, `fully_shard`, and loading by `assign` bring others."""
        program = self._program
        if not program.parameters.are_as_they_were:
            program.parameters.check_replaced()
            program = Program.of(self.model, program.trace, program.traced, program.code)
            self._programs[self.training] = program
        return program


def record_modes(model: nn.Module, sample_inputs: Any) -> dict[bool, Recording]:
    """Recordings of a model by `training`, the present mode first. `sample_inputs`: one batch, in the forms of `smpc.sample_inputs`."""
    args, kwargs = as_inputs(sample_inputs)
    return {training: _recorded(model, training, args, kwargs) for training in (model.training, not model.training)}


def build_program(model: nn.Module, trace: Trace, traced: Traced) -> Program:
    """A function that runs a rewritten trace over the model's parameters."""
    (program,) = write_programs(plan_trace(traced, OPTIONS, prove=False)).programs
    (code,) = program.stages
    return Program.of(model, trace, traced, code)


def check_not_shared(model: nn.Module, axis: str) -> None:
    """ConfigError if the model belongs to a group of that axis already."""
    name = group_attribute(axis)
    if name in vars(model):
        raise ConfigError(f"expected a model without an attribute {name!r}, found one; has it been sharded before?")


def _recorded(model: nn.Module, training: bool, args: Any, kwargs: Any) -> Recording:
    with _in_mode(model, training):
        return record_guarded(model, RecordingRequest(tuple(args), dict(kwargs), differentiates=True))


def _check_differentiated(trace: Trace, values: Mapping[str, Tensor]) -> None:
    """UsageError for inputs that require grad, if the sample's did not: ranks would have parts of their gradients."""
    if not torch.is_grad_enabled():
        return
    specs = {name: trace.node(name).spec for name, value in values.items() if value.requires_grad}
    wrong = [name for name, spec in specs.items() if spec is None or not spec.requires_grad]
    if wrong:
        raise UsageError(
            f"expected inputs that do not require grad, as the sample's, found {', '.join(wrong)} that do; shard another copy of the "
            "model with a sample whose inputs require grad, or detach them"
        )


@contextmanager
def _in_mode(model: nn.Module, training: bool) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    if training != model.training:
        model.train(training)
    try:
        yield
    finally:
        for module, before in modes:
            module.training = before


def outputs_of(
    trace: Trace,
    values: Mapping[str, Tensor],
    device: torch.device,
    inputs: Any,
    finish: Callable[[int, Any], Any] = lambda position, value: value,
    copied: frozenset[str] = frozenset(),
) -> Any:
    """The model's result, built from the values by name; what it leaves in the containers of its inputs is put there.

    `finish` gets each leaf and its position. `copied`: without gradients.
    """
    leaves = (map_references(leaf, lambda name: values[name]) for leaf in trace.output_leaves)
    found = (device if isinstance(leaf, TraceDevice) else leaf for leaf in leaves)
    finished = [finish(position, leaf) for position, leaf in enumerate(found)]
    for leaf, value in zip(trace.output_leaves, finished, strict=True):
        if isinstance(leaf, Ref) and leaf.name in copied:
            without_gradient(value)
    if trace.left is not None:
        LeftInputs(trace.inputs, trace.left, finished[trace.output.num_leaves :]).put_into(inputs)
    return trace.output.unflatten(finished)
