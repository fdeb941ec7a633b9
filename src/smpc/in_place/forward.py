"""The forward of a model that runs in place: finds the program of a call, makes it where there is none yet, and runs it.

All ranks that share the model must be called alike: they make and choose programs by themselves, and alike.

The `self` of a program for a whole model: the present model, by its names without wrappers.

self.layers[0].mlp.up.weight       the parameter there is at this moment: a slice that FSDP has just gathered, say
self.layers[0](h)                  calls the module with all that is around it
self.inside("layers.0", f, h)      calls it, too, but has it run `f(h)` in place of its own forward
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from smpc.codegen.program import StageCode
from smpc.codegen.recompute import buffer_owners, run_checkpointed
from smpc.codegen.split import split
from smpc.codegen.stage import stage_class
from smpc.compile.passes import plan_trace
from smpc.compile.result import Traced
from smpc.containers import map_tensors
from smpc.errors import CodegenError, ConfigUnsupportedError, TraceError, UsageError
from smpc.in_place.model_copy import (
    INSTALLED,
    WholeParameter,
    is_wrapped,
    own_modules,
    skeleton,
    trained_parameters,
    unwrapped,
)
from smpc.output_gradients import copied_outputs
from smpc.recorded_module import OPTIONS, outputs_of
from smpc.sharding.dtensors import local
from smpc.tracer.attempt import RecordingRequest
from smpc.tracer.environment.environment_guards import Environment
from smpc.tracer.environment.memory_words import DictVersions
from smpc.tracer.environment.object_identity import moved
from smpc.tracer.input_guards import broken_guard
from smpc.tracer.ir import Trace
from smpc.tracer.record import record_guarded
from smpc.tracer.recording.untraceable import hook_of
from smpc.tracer.replay import input_values


class View:
    """A module of the model."""

    def __init__(self, module: nn.Module) -> None:
        object.__setattr__(self, "_smpc_module", module)

    def __getattr__(self, name: str) -> Any:
        return _seen_through_view(getattr(self._smpc_module, name))

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(unwrapped(self._smpc_module), name, value)

    def __getitem__(self, key: Any) -> Any:
        module = self._smpc_module
        return _seen_through_view(getattr(module, str(key)))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module with all that is around it."""
        return self._smpc_module(*args, **kwargs)

    def get_parameter(self, target: str) -> Tensor:
        """What the module has as a parameter of this name: FSDP1 puts tensors in their place."""
        owner, _, own = target.rpartition(".")
        found: Tensor = getattr(self._smpc_module.get_submodule(owner), own)
        return found

    def around_and_inside(self) -> tuple[nn.Module, nn.Module]:
        """What is called, and the script's own module inside of what is around it."""
        return self._smpc_module, unwrapped(self._smpc_module)

    def called_with(self, tensors: dict[str, Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The same, with other tensors in place of parameters. ConfigUnsupportedError where something around it puts in its own."""
        module = self._smpc_module
        if is_wrapped(module, unwrapped(module)):
            raise ConfigUnsupportedError(
                f"{type(unwrapped(module)).__name__}: expected nothing around a module whose {', '.join(tensors)} ranks add once, "
                "found FSDP, or a wrapper for checkpoints or offloading; put that around the layer which has the module"
            )
        return functional_call(module, tensors, args, kwargs)


class RootView(View):
    """The model itself. `_device` replaces the device of the trace."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        super().__init__(module)
        object.__setattr__(self, "_device", device)

    def inside(self, name: str, function: Callable[..., Any], *values: Any) -> Any:
        """Has a module run `function(*values)`."""
        module = functools.reduce(getattr, name.split("."), self._smpc_module)
        return module(RunInstead(function), *values)

    def checkpoint(
        self,
        region: Callable[..., Any],
        *values: Any,
        preserve_rng_state: bool = True,
        buffers: tuple[str, ...] = (),
    ) -> Any:
        """`region(*values)`, computed again for the backward pass; `buffers` names those that it uses and that change."""
        owners = buffer_owners(self._smpc_module, buffers) if buffers else ()
        return run_checkpointed(region, *values, preserve_rng_state=preserve_rng_state, buffers=owners)


def _seen_through_view(value: Any) -> Any:
    if isinstance(value, nn.Module):
        return View(value)
    return local(value) if isinstance(value, Tensor) else value


class RunInstead:
    """The argument of a module call that runs a function in place of the module's forward."""

    __slots__ = ("function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function


class InstalledView:
    """The replacement of a module's forward. It belongs to this module, and cannot be copied."""

    def __init__(self, module: nn.Module) -> None:
        self.own = module.forward
        setattr(self, INSTALLED, True)
        functools.update_wrapper(self, self.own, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the function that it is called with, or does what a call does otherwise."""
        if args and isinstance(args[0], RunInstead):
            return map_tensors(_without_view, args[0].function(*args[1:]))
        return self.otherwise(*args, **kwargs)

    def otherwise(self, *args: Any, **kwargs: Any) -> Any:
        """The original call, which runs no function."""
        return self.own(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError(
            "a transformed model cannot be copied or pickled: its forward belongs to the ranks that share it; copy its state_dict"
        )


def install(module: nn.Module) -> None:
    """Let a module run functions that it is called with."""
    if not hasattr(vars(module).get("forward"), INSTALLED):
        vars(module)["forward"] = InstalledView(module)


def _without_view(value: Tensor) -> Tensor:
    """Outputs that are views come as copies: an in-place operation on a view would drop the hooks that wrappers put on it."""
    return value.clone() if value._is_view() and value.requires_grad else value


Rewrite = Callable[[Trace], Traced]
_LIMIT = 64  # programs of one state of the model


@dataclass(frozen=True)
class _ForwardProgram:
    trace: Trace  # of the whole model
    traced: Traced
    code: StageCode
    run: Callable[..., Any]
    environment: Environment
    copied: frozenset[str]  # outputs that may not have hooks


class InPlace(InstalledView):
    """See the module's docstring. `parameters`: as they were before anybody divided them."""

    def __init__(self, model: nn.Module, parameters: tuple[WholeParameter, ...], rewrite: Rewrite) -> None:
        super().__init__(model)
        self._model, self._parameters, self._rewrite = model, parameters, rewrite
        self._programs: dict[Any, list[_ForwardProgram]] = {}
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
        found = program.run(RootView(self._model, device), *(values[name] for name in program.code.inputs))
        trace = program.traced.trace
        named = dict(zip(trace.output_names, found, strict=True))
        traced = program.traced
        finish = functools.partial(self.finish, traced)
        return outputs_of(trace, named, device, (args, kwargs), finish, program.copied)

    def begin(self, traced: Traced, device: torch.device) -> None:
        """Called before a program runs."""

    def finish(self, traced: Traced, position: int, value: Any) -> Any:
        """The result for a leaf of the program's output."""
        return value

    def program_of(self, args: Any, kwargs: Mapping[str, Any]) -> tuple[_ForwardProgram, dict[str, Tensor]]:
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

    def _made(self, args: Any, kwargs: dict[str, Any]) -> _ForwardProgram:
        found = skeleton(self._model, self._parameters)
        with torch.enable_grad():
            recording = record_guarded(found.model, RecordingRequest(tuple(args), dict(kwargs), differentiates=True))
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
        copied = copied_outputs(traced.trace)
        return _ForwardProgram(trace, traced, code, stage_class(code).forward, environment, copied)


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
