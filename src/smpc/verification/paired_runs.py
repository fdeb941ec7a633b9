"""One microbatch of a model twice, by itself and by its compiled programs, each on a copy and from the same random state.

    eager = run_eager(model, conditions, inputs)
    compiled = run_compiled(model, conditions, inputs, compilation)

The programs are the training step's, reduced to the instructions of its first microbatch: the stage code, the values on every edge and
the order of the remaining instructions are the step's own. They run in one process (`smpc.runtime.LoopbackRuntime`), where every rank
has memory of its own.

Backward starts from every output that requires grad, with a gradient of numbers between -1 and 1, the same for both runs; 1 for an
output of one element. So no Python runs but the model's.

Parameters of the copies are the model's own memory, but for those that the model may write into.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from smpc.codegen.program import RankProgram
from smpc.codegen.verify import verify_programs
from smpc.compile.result import Compilation
from smpc.errors import ConfigError
from smpc.rank_models import copied_model, own_parameter
from smpc.runtime import LoopbackRuntime
from smpc.sample_inputs import Inputs
from smpc.tracer.effects.randomness import generators_of
from smpc.tracer.effects.torch_calls import kept_settings, uncompiled
from smpc.tracer.ir import Autocast, NodeKind, Trace
from smpc.tracer.replay import context, replay
from smpc.tracer.structure import flatten
from smpc.verification.random_state import RandomState

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Conditions:
    """How the model is run: where, with autograd or without, under which autocast."""

    device: torch.device = _CPU
    grad_enabled: bool = True
    autocast: Autocast | None = None


@dataclass(frozen=True)
class RunResults:
    """The results of a run, and the state that it left in its copy of the model."""

    model: nn.Module
    outputs: dict[str, Any]  # leaves, by path
    gradients: dict[str, Tensor | None]
    written: dict[str, Tensor]  # parameters that the model may write into
    overwritten: tuple[str, ...]  # parameters that have been written into against what the trace says
    buffers: dict[str, Tensor]
    random: dict[str, str]
    frozen: dict[str, bool] = field(default_factory=dict)  # parameter -> whether it requires grad

    @property
    def num_compared(self) -> int:
        """Outputs, gradients, buffers and the states of random generators."""
        return len(self.outputs) + len(self.gradients) + len(self.buffers) + len(self.random)


def run_eager(model: nn.Module, conditions: Conditions, inputs: Inputs, trace: Trace) -> RunResults:
    """Plain PyTorch. Raises what the model raises."""
    copied = copy_of(model, trace, conditions.device)
    with surroundings(conditions):
        args, kwargs = own_inputs(inputs, conditions.device)
        with context(conditions.grad_enabled, conditions.autocast):
            output = copied(*args, **kwargs)
        _backward(output)
        return _results_of_run(copied, trace, output, conditions.device)


def run_compiled(model: nn.Module, conditions: Conditions, inputs: Inputs, compilation: Compilation) -> RunResults:
    """The compiled programs."""
    trace, device = compilation.trace, conditions.device
    copied = copy_of(model, trace, device)
    with surroundings(conditions):
        runtime, program = installed(copied, compilation, device)
        output = run_programs(runtime, program, conditions, own_inputs(inputs, device))
        return _results_of_run(copied, trace, output, device)


def run_replayed(model: nn.Module, conditions: Conditions, inputs: Inputs, trace: Trace) -> RunResults:
    """The recording, node by node."""
    copied = copy_of(model, trace, conditions.device)
    with surroundings(conditions):
        args, kwargs = own_inputs(inputs, conditions.device)
        output = replay(trace, copied, args, kwargs)
        _backward(output)
        return _results_of_run(copied, trace, output, conditions.device)


def by_stage(compilation: Compilation) -> Trace:
    """The trace in the order in which the stages run one microbatch; the trace itself if nothing that draws changes its place."""
    trace, stages = compilation.trace, dict(compilation.plan.assignment)
    for node in trace.nodes:  # what no stage owns is computed wherever it is used
        stages.setdefault(node.name, max((stages[name] for name in node.inputs), default=0))
    nodes = sorted(trace.nodes, key=lambda node: stages[node.name])
    draw = [node.name for node in nodes if node.random or node.kind is NodeKind.CALL_MODULE]
    if draw == [node.name for node in trace.nodes if node.random or node.kind is NodeKind.CALL_MODULE]:
        return trace
    return dataclasses.replace(trace, nodes=tuple(nodes))


def installed(copied: nn.Module, compilation: Compilation, device: torch.device) -> tuple[LoopbackRuntime, int]:
    """A runtime over a copy of the model, and the number of the programs in it."""
    runtime = LoopbackRuntime(copied, device)
    return runtime, runtime.install(first_microbatch_alone(compilation))


def run_programs(runtime: LoopbackRuntime, program: int, conditions: Conditions, inputs: Inputs) -> Any:
    """The output of one microbatch; the backward pass has been done."""
    outputs = []

    def on_output(microbatch: int, output: Any) -> list[tuple[Tensor, Tensor | None]] | None:
        outputs.append(output)
        return _roots(output) or None

    with torch.set_grad_enabled(conditions.grad_enabled):
        runtime.run(program, [inputs], on_output, training=conditions.grad_enabled)
    (output,) = outputs
    return output


def first_microbatch_alone(compilation: Compilation) -> Compilation:
    """The compilation with programs of one microbatch: only the instructions of the step's first one."""
    training, evaluation = (_first_of(p) for p in (compilation.programs, compilation.evaluation_programs))
    schedule = dataclasses.replace(compilation.plan.schedule, num_microbatches=1, active_microbatches=1)
    plan = dataclasses.replace(compilation.plan, schedule=schedule)
    return dataclasses.replace(
        compilation, plan=plan, programs=training, evaluation_programs=evaluation, environment=None, planned=None
    )


def _first_of(programs: Sequence[RankProgram]) -> tuple[RankProgram, ...]:
    found = tuple(
        dataclasses.replace(
            program,
            num_microbatches=1,
            instructions=tuple(i for i in program.instructions if i.microbatch <= 0),
        )
        for program in programs
    )
    verify_programs(found)
    return found


@contextlib.contextmanager
def surroundings(conditions: Conditions) -> Iterator[None]:
    """The surroundings of both runs: none of the caller's modes, nothing compiled by torch.compile, and settings that are restored."""
    with (
        warnings.catch_warnings(),
        kept_settings(),
        torch.inference_mode(False),
        torch.set_grad_enabled(conditions.grad_enabled),
        uncompiled(),
    ):
        warnings.simplefilter("ignore")  # the step itself will show them
        yield


def copy_of(model: nn.Module, trace: Trace, device: torch.device) -> nn.Module:
    """The model with modules, buffers, attributes and generators of its own, on a device, as a stage puts them there."""
    memo: dict[int, Any] = {id(generator): _twin(generator) for generator in generators_of(model)}
    own = frozenset(written_parameters(trace))
    for name, parameter in model.named_parameters():
        if type(parameter) is nn.Parameter:
            value = parameter.data.to(device)
            is_alias = value.untyped_storage()._cdata == parameter.data.untyped_storage()._cdata
            memo[id(parameter)] = own_parameter(parameter, value.clone() if is_alias and name in own else value)
    copied = copied_model(model, memo)
    for parameter in copied.parameters():
        parameter.grad = None
    for buffer in copied.buffers():
        if buffer.device != device:
            buffer.data = buffer.data.to(device)
    return copied


def _twin(generator: torch.Generator) -> torch.Generator:
    twin = torch.Generator(generator.device)
    twin.set_state(generator.get_state())
    return twin


def written_parameters(trace: Trace) -> Collection[str]:
    """Parameters that the model writes into, or may, in modules that are called whole."""
    written = {trace.node(name).storage for node in trace.nodes for name in node.mutates}
    whole = [f"{node.target}." for node in trace.nodes if node.kind is NodeKind.CALL_MODULE]
    return dict.fromkeys(
        state.name
        for state in trace.state
        if state.is_parameter and (state.storage in written or any(n.startswith(w) for n in state.names for w in whole))
    )


def own_inputs(inputs: Inputs, device: torch.device) -> Inputs:
    """The inputs with copies of their tensors on a device; one tensor in two places stays one."""
    leaves, structure = flatten(inputs)
    copies = {id(leaf): leaf.detach().to(device, copy=True) for leaf in leaves if isinstance(leaf, Tensor)}
    args, kwargs = structure.unflatten([copies.get(id(leaf), leaf) for leaf in leaves])
    return args, kwargs


def output_name(path: str) -> str:
    """The name of an output: "loss" for `['loss']`, "output" for the only one, "output[0]" in a tuple."""
    inside = path[2:-2]
    return inside if path == f"['{inside}']" and inside.isidentifier() else f"output{path}"


def objective(output: Any) -> Tensor:
    """A number with the backward pass of the runs: the sum over the outputs that require grad, each times the gradient it would get.

    Raises ConfigError where there is none.
    """
    terms = [leaf.sum() if gradient is None else (leaf * gradient).sum() for leaf, gradient in _roots(output)]
    if not terms:
        raise ConfigError("expected a model with an output that requires grad, found none")
    return torch.stack([term.to(terms[0].dtype) for term in terms]).sum()


def _roots(output: Any) -> list[tuple[Tensor, Tensor | None]]:
    leaves = [leaf for leaf in flatten(output)[0] if isinstance(leaf, Tensor) and leaf.requires_grad]
    return [(leaf, None if leaf.numel() == 1 else _gradient(leaf, number)) for number, leaf in enumerate(leaves)]


def _backward(output: Any) -> None:
    roots = _roots(output)
    if roots:
        torch.autograd.backward([root for root, _ in roots], [gradient for _, gradient in roots])


def _gradient(tensor: Tensor, number: int) -> Tensor:
    """Numbers between -1 and 1 that look random."""
    steps = torch.arange(tensor.numel(), dtype=torch.float32, device=tensor.device)
    return torch.cos(steps * 2.399963 + number).to(tensor.dtype).reshape(tensor.shape)


def _results_of_run(model: nn.Module, trace: Trace, output: Any, device: torch.device) -> RunResults:
    """What a run has given: outputs, gradients, buffers and the rest."""
    leaves, structure = flatten(output)
    parameters: Mapping[str, nn.Parameter] = dict(model.named_parameters())
    written = written_parameters(trace)
    return RunResults(
        model,
        {output_name(path): leaf for path, leaf in zip(structure.paths(), leaves, strict=True)},
        {name: parameter.grad for name, parameter in parameters.items()},
        {name: parameters[name].detach() for name in written if name in parameters},
        tuple(name for name, p in parameters.items() if p._version and name not in written),
        dict(model.named_buffers()),
        RandomState.now(device).parts(),
        {name: parameter.requires_grad for name, parameter in parameters.items()},
    )
