"""The forward of a model that runs in place: finds the program of a call, makes it where there is none yet, and runs it.

All ranks that share the model must be called alike: they make and choose programs by themselves, and alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from smpc.codegen.program import StageCode
from smpc.codegen.split import split
from smpc.codegen.stage import stage_class
from smpc.compile.passes import plan_trace
from smpc.compile.result import Traced
from smpc.errors import CodegenError, TraceError
from smpc.in_place.skeleton import Whole, skeleton, trained_parameters
from smpc.in_place.view import InstalledView, Root, install
from smpc.in_place.wrappers import is_wrapped, own_modules
from smpc.recorded_module import OPTIONS, outputs_of
from smpc.tracer.attempt import Request
from smpc.tracer.environment.environment_guards import Environment
from smpc.tracer.environment.memory_words import DictVersions
from smpc.tracer.environment.object_identity import moved
from smpc.tracer.input_guards import broken_guard
from smpc.tracer.ir import Trace
from smpc.tracer.record import record_guarded
from smpc.tracer.recording.untraceable import hook_of
from smpc.tracer.replay import input_values

Rewrite = Callable[[Trace], Traced]
_LIMIT = 64  # programs of one state of the model


@dataclass(frozen=True)
class _Program:
    trace: Trace  # of the whole model
    traced: Traced
    code: StageCode
    run: Callable[..., Any]
    environment: Environment


class InPlace(InstalledView):
    """See the module's docstring. `parameters`: as they were before anybody divided them."""

    def __init__(self, model: nn.Module, parameters: tuple[Whole, ...], rewrite: Rewrite) -> None:
        super().__init__(model)
        self._model, self._parameters, self._rewrite = model, parameters, rewrite
        self._programs: dict[Any, list[_Program]] = {}
        self._versions = DictVersions()  # of all that their Python has read

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's result. torch.compile around it leaves it as it is: it records by itself."""
        return super().__call__(*args, **kwargs)

    def otherwise(self, *args: Any, **kwargs: Any) -> Any:
        """The model's result."""
        program, values = self.program_of(args, kwargs)
        device = next((value.device for value in values.values()), torch.device("cpu"))
        self.begin(program.traced, device)
        found = program.run(Root(self._model, device), *(values[name] for name in program.code.inputs))
        trace = program.traced.trace
        named = dict(zip(trace.output_names, found, strict=True))
        return outputs_of(trace, named, device, lambda position, value: self.finish(program.traced, position, value))

    def begin(self, traced: Traced, device: torch.device) -> None:
        """Called before a program runs."""

    def finish(self, traced: Traced, position: int, value: Any) -> Any:
        """The result for a leaf of the program's output."""
        return value

    def program_of(self, args: Any, kwargs: Mapping[str, Any]) -> tuple[_Program, dict[str, Tensor]]:
        """The program for inputs, and its inputs by name."""
        programs = self._programs.setdefault(self._state(), [])
        self._versions.poll()
        for program in programs:
            values = _inputs_fitting_forward(program.trace, self._model, args, kwargs)
            if values is not None and program.environment.difference() is None:
                return program, values
        if len(programs) == _LIMIT:
            del programs[0]
        program = self._made(args, dict(kwargs))
        programs.append(program)
        return program, input_values(program.trace, args, kwargs)

    def _state(self) -> Any:
        """The key of a program beside its inputs and the values that Python reads.

        The modules, which of them are in training, wrapped, or have hooks, and which parameters are trained.
        """
        modules = tuple(
            (inner, inner.training, is_wrapped(outer, inner), hook_of(inner), trained_parameters(inner))
            for _, outer, inner in own_modules(self._model)
        )
        return modules, tuple((kind, *_autocast_in_forward(kind)) for kind in ("cpu", "cuda"))

    def _made(self, args: Any, kwargs: dict[str, Any]) -> _Program:
        found = skeleton(self._model, self._parameters)
        with torch.enable_grad():
            recording = record_guarded(found.model, Request(tuple(args), dict(kwargs), differentiates=True))
        trace = recording.trace
        traced = self._rewrite(trace)
        modules = list(own_modules(self._model))
        own = [(name, inner) for name, _, inner in modules]
        environment = moved(recording.environment, trace, own, found.original, self._versions)
        wrapped = {name: inner for name, outer, inner in modules if name and is_wrapped(outer, inner)}
        planned = plan_trace(traced, OPTIONS, prove=False)
        (code,) = split(planned.trace, planned.plan, wrapped)
        _check_names(code)
        for module in wrapped.values():
            install(module)
        return _Program(trace, traced, code, stage_class(code).forward, environment)


def _inputs_fitting_forward(
    trace: Trace, model: nn.Module, args: Any, kwargs: Mapping[str, Any]
) -> dict[str, Tensor] | None:
    """The inputs of a trace by name, if it is one of such inputs."""
    try:
        values = input_values(trace, args, kwargs)
    except TraceError:
        return None
    specs = {name: trace.node(name).spec for name in values}
    if any(spec is None or values[name].requires_grad != spec.requires_grad for name, spec in specs.items()):
        return None  # ranks sum the gradients of inputs that require grad alone
    return None if trace.guards and broken_guard(trace, model, values) is not None else values


def _autocast_in_forward(kind: str) -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)


def _check_names(code: StageCode) -> None:
    """CodegenError if the model calls something what a program calls something of its own."""
    taken = [path for path in (*code.modules, *code.attributes) if path.split(".")[0] in ("checkpoint", "inside")]
    if taken:
        raise CodegenError(
            f"{taken[0]!r} of the model: a program calls something of its own so; give the attribute another name"
        )
