"""One attempt at a recording: the model's Python runs once over fake tensors, with torch's entry points led through the recorder.

`record_once` restores everything that it replaces. `smpc.tracer.record` decides how many attempts there are.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import graph
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import checkpoint

from smpc.errors import SmpcError, TraceError
from smpc.tracer.effects.randomness import ModuleGenerators, kept
from smpc.tracer.effects.side_effects import watching_conversions
from smpc.tracer.effects.torch_calls import tensors_in, uncompiled
from smpc.tracer.environment.environment_guards import EnvironmentGuard, Names
from smpc.tracer.environment.outside_reads import PARALLEL, OutsideRead
from smpc.tracer.environment.reads import noting_reads
from smpc.tracer.environment.state_changes import (
    Leftovers,
    NewHooks,
    Survivors,
    UnsettledError,
    check_histories,
    refusal,
)
from smpc.tracer.environment.value_snapshots import AnyTensor, Frozen, freeze
from smpc.tracer.input_guards import Answers
from smpc.tracer.ir import Autocast, Trace
from smpc.tracer.operations.value_queries import DataSized, SizeAskedError
from smpc.tracer.patches import Functions, Transforms, call_script, looking, without_compiling
from smpc.tracer.recording.recorder import Recorder, current_recorder
from smpc.tracer.recording.untraceable import REGISTER_HOOK, UntraceableError, call_model, innermost_line
from smpc.tracer.replay import entered
from smpc.tracer.state.fakes import installed, make_fakes
from smpc.tracer.state.python_state import PythonState

_CUSTOM_OPS = "torch._library.autograd"  # where torch defines the autograd functions of custom ops
_CPU = torch.device("cpu")
_MAX_CACHED_FAKES = 4096  # FakeTensorMode remembers operations on shapes, for the whole process and without a bound
_CHECK_INPUTS = (
    "what to do: run the model by itself on inputs of these shapes and dtypes; if it fails there, too, the error is its own, "
    "otherwise smpc cannot record what this line does: have the module called whole (leaf_modules=[...], smpc.mark_leaf), "
    "or do it outside the model"
)


class LookCloselyError(Exception):
    """Some code has used other generators than torch's: who it was is seen by looking closely."""


@dataclass(frozen=True)
class RecordingRequest:
    """The recording to make: see `smpc.tracer.record.record`."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    device: torch.device = _CPU
    answers: Answers | None = None
    autocast: Autocast | None = None
    shown: tuple[str, ...] = ()
    buffers: Mapping[str, torch.Tensor] | None = None
    differentiates: bool = False  # inputs that require grad do so in the recording, too


@dataclass(frozen=True)
class Subject:
    """The model to run, and how. `names`: FQNs by id; `leaves`: modules to be called whole."""

    model: nn.Module
    names: dict[int, str]
    request: RecordingRequest
    leaves: frozenset[str]
    sizes: DataSized
    survivors: Survivors
    closely: bool = False  # see `smpc.tracer.effects.side_effects`
    is_again: bool = False  # see `smpc.tracer.environment.reads`


@dataclass(frozen=True)
class Attempt:
    """A trace, its guards, and the guards that do not hold after the run, with the state that the run has left there."""

    trace: Trace
    guards: tuple[EnvironmentGuard, ...]
    changed: tuple[EnvironmentGuard, ...]
    after: tuple[Frozen, ...]  # what each of them held after the run
    contexts: tuple[set[str], ...]  # of each change: see `Reads.contexts`
    refusal: str  # of the first change
    leftovers: Leftovers | None  # None: they depend on more than sizes
    listed: frozenset[int]
    converted: frozenset[int]
    names: tuple[Names, ...]  # of the attributes of the objects that were reached
    outside: tuple[OutsideRead, ...]
    of_torch: tuple[ModuleType, ...]  # whose functions the code that ran may name,
    named: frozenset[str]  # and the names in that code
    used: frozenset[str] | None  # of attributes that count; None: any may


def record_once(subject: Subject) -> Attempt:
    """Runs the model. Raises UntraceableError, SizeAskedError for a size that is to be asked for, and LookCloselyError."""
    model, request = subject.model, subject.request
    if len(FakeTensorMode.cache) > _MAX_CACHED_FAKES:
        FakeTensorMode.cache_clear()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    state, submodules = make_fakes(model, mode, request.device), _submodules(model, subject.leaves)
    hooks = NewHooks(model, subject.leaves)
    with ExitStack() as stack:
        python = PythonState(model)
        stack.callback(python.restore)
        stack.enter_context(kept(model))
        # Ours, not the caller's, decides what is recorded: autograd on or off is part of the signature.
        stack.enter_context(installed(model, state))
        stack.enter_context(mode)
        stack.enter_context(uncompiled())
        generators = ModuleGenerators(model)
        stack.callback(generators.restore)
        recorder = Recorder(
            model,
            state,
            subject.names,
            subject.leaves,
            request.device,
            generators,
            request.answers,
            request.shown,
            subject.sizes,
            request.buffers,
            subject.closely,
        )
        recorder.reads.is_again = subject.is_again
        stack.callback(recorder.attributes.restore)
        stack.callback(_forget, recorder)
        stack.callback(recorder.left.take_back)
        args, kwargs = recorder.bind_inputs(request.args, request.kwargs, differentiates=request.differentiates)
        stack.enter_context(recorder.meter)
        stack.enter_context(_saved_tensors(recorder))
        stack.enter_context(_python_calls(recorder))
        stack.enter_context(looking(recorder.is_shown))
        stack.enter_context(_quiet())
        stack.enter_context(noting_reads(recorder.reads, model))
        stack.enter_context(recorder)
        stack.enter_context(recorder.modes_of_calls.watching())
        if request.autocast is not None:
            stack.enter_context(entered(request.autocast))
        stack.enter_context(recorder.watch.active(mode))
        try:
            output = _called_model(recorder, subject, args, kwargs)
            _check_running(recorder.reads.running.found or python.begun())
            if recorder.watch.must_look_closely:
                raise LookCloselyError
            with torch._C.DisableTorchFunction():
                run = _finished(model, recorder, output, submodules, hooks)
        except UntraceableError as error:
            raise _cause_of_failure(recorder, model, error) from error.__cause__
    for guard in run.guards:
        guard.value = None
    subject.sizes.forget()
    return run


def _forget(recorder: Recorder) -> None:
    """It forms cycles with the objects that it patched: tensors, and objects of the script, would wait for the garbage collector."""
    for item in (recorder.watch.ownership, recorder.watch, recorder.reads, recorder):
        vars(item).clear()


def _called_model(recorder: Recorder, subject: Subject, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The model's output."""
    try:
        with recorder.reads.calls:
            return call_model(subject.model, args, kwargs)
    except (SmpcError, SizeAskedError):
        raise
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        raise recorder.error(what, line=innermost_line(error), way_out=_CHECK_INPUTS) from error
    finally:
        subject.survivors.watch(recorder.fakes())


def _check_running(found: str) -> None:
    if found:
        raise TraceError(
            f"cannot trace the model: forward goes on with {found}, which was there before, and which nobody can put back; "
            "what to do: keep what it gives in a list, and a position in it, or pass it to the model as an input"
        )


def _cause_of_failure(recorder: Recorder, model: nn.Module, error: UntraceableError) -> UntraceableError:
    """The error, or the error of the module whose work for other threads was not recorded."""
    handed = next((read for read in recorder.reads.outside if read.what == PARALLEL), None)
    if handed is None:
        return error
    return UntraceableError.inside(
        model.get_submodule(handed.fqn), handed.fqn, handed.line, f"forward {handed.what}, whose code is not recorded"
    )


_Submodules = list[tuple[str, nn.Module, dict[str, nn.Module | None]]]


def _submodules(model: nn.Module, leaves: frozenset[str]) -> _Submodules:
    """The modules that are not called whole."""
    whole = tuple(f"{name}." for name in leaves)
    plain = [(fqn, each) for fqn, each in model.named_modules() if not isinstance(each, torch.jit.ScriptModule)]
    return [(fqn, each, dict(each._modules)) for fqn, each in plain if not f"{fqn}.".startswith(whole)]


def _check_submodules(model: nn.Module, before: _Submodules) -> None:
    """Raises UntraceableError if the run has left other submodules than it found: the next call would use those."""
    for fqn, module, expected in before:
        found = module._modules
        if list(found) != list(expected) or any(found[name] is not expected[name] for name in found):
            raise UntraceableError.inside(
                module if module is not model else None,
                fqn,
                "",
                "forward exchanges submodules, so that every call finds others",
            )


def _finished(model: nn.Module, recorder: Recorder, output: Any, before: _Submodules, hooks: NewHooks) -> Attempt:
    """The result of a run."""
    _check_submodules(model, before)
    hooks.note()
    hooked = hooks.of_script()
    if hooked:
        registrar = recorder.registrars.get(hooked, "")
        raise recorder.error_in(
            registrar, f"forward registers a hook on module {hooked!r}, and leaves it for the next call", REGISTER_HOOK
        )
    trace, reads = recorder.finish(output), recorder.reads
    check_histories(model, trace, recorder.state.hanging)
    guards = tuple(reads.finish())
    changed = tuple(guard for guard in guards if not guard.holds())
    leftovers = Leftovers(changed, trace.nodes, recorder.known, hooks) if changed else None
    try:
        if leftovers is not None:
            leftovers.evaluate()
    except UnsettledError:
        leftovers = None
    contexts = tuple(reads.contexts(guard) for guard in changed)
    text = refusal(changed[0]) if changed else ""
    after = tuple(freeze(guard.place.read(), lambda tensor: AnyTensor()) for guard in changed)
    return Attempt(
        trace,
        guards,
        changed,
        after,
        contexts,
        text,
        leftovers,
        frozenset(reads.listed),
        frozenset(recorder.watch.converted),
        tuple(reads.names),
        tuple(reads.outside),
        tuple(reads.of_torch),
        frozenset(reads.named()),
        None if reads.used is None else frozenset(reads.used),
    )


@contextmanager
def _saved_tensors(recorder: Recorder) -> Iterator[None]:
    """Tells the recorder what autograd saves.

    The autograd graph keeps the hooks and what they return, out of the garbage collector's sight. Were the tensors among these, or the
    recorder, which has them all, then each would hold its own node of the graph, and the whole recording would stay for ever.
    """
    kept: list[torch.Tensor] = []
    note = weakref.WeakMethod(recorder.note_saved)

    def pack(tensor: torch.Tensor) -> int:
        noted = note()
        assert noted is not None, "the recording is under way"
        kept.append(noted(tensor))
        return len(kept) - 1

    unpack, without = kept.__getitem__, graph.disable_saved_tensors_hooks

    @contextmanager
    def stepping_aside(error_message: str) -> Iterator[None]:
        # torch.func refuses to run under such hooks: what it saves is not counted.
        torch._C._autograd._pop_saved_tensors_default_hooks()
        try:
            with without(error_message):
                yield
        finally:
            torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)

    with saved_tensors_hooks(pack, unpack):
        graph.disable_saved_tensors_hooks = stepping_aside
        try:
            yield
        finally:
            graph.disable_saved_tensors_hooks = without
            kept.clear()


@contextmanager
def _python_calls(recorder: Recorder) -> Iterator[None]:
    """Routes every call of a module, a custom autograd function and a script, and every attribute that is set, through the recorder."""
    transforms = Transforms(recorder)
    with (
        _recorded_module_calls(recorder),
        _registered_hooks(recorder),
        watching_conversions(recorder),
        _function_calls(recorder, transforms),
        _script_calls(recorder),
        transforms.recorded(),
        without_compiling(),
    ):
        yield


_FORWARD, _BACKWARD = (
    ("register_forward_hook", "register_forward_pre_hook"),
    ("register_full_backward_hook", "register_full_backward_pre_hook", "register_backward_hook"),
)


@contextmanager
def _registered_hooks(recorder: Recorder) -> Iterator[None]:
    """Hooks that forward registers on modules go to the recorder."""
    originals = {name: vars(nn.Module)[name] for name in (*_FORWARD, *_BACKWARD)}

    def watched(name: str) -> Callable[..., Any]:
        def register(module: nn.Module, hook: Any, *args: Any, **kwargs: Any) -> Any:
            recorder.note_hook(module, hook, is_forward=name in _FORWARD)
            return originals[name](module, hook, *args, **kwargs)

        return register

    for name in originals:
        setattr(nn.Module, name, watched(name))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(nn.Module, name, original)


@contextmanager
def _recorded_module_calls(recorder: Recorder) -> Iterator[None]:
    """Module calls and writes to attributes of modules go to the recorder."""
    original, set_attribute = nn.Module.__call__, nn.Module.__setattr__
    calls, thread = recorder.reads.calls, threading.get_ident()

    def run(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        calls.resume()
        try:
            return original(module, *args, **kwargs)
        finally:
            calls.pause()

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return original(module, *args, **kwargs)  # see `smpc.tracer.environment.outside_reads`
        calls.pause()
        try:  # no closure over tensors: the traceback of an error would hold them
            return recorder.module_call(module, partial(run, module, args, kwargs), args, kwargs)
        finally:
            calls.resume()

    def noting(module: nn.Module, name: str, value: Any) -> None:
        is_same = isinstance(value, nn.Module) and vars(module).get("_modules", {}).get(name) is value
        if threading.get_ident() == thread and not is_same:
            recorder.note_write(module, name, value)
        set_attribute(module, name, value)

    nn.Module.__call__ = call  # type: ignore[method-assign]
    nn.Module.__setattr__ = noting  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.__call__ = original  # type: ignore[method-assign]
        nn.Module.__setattr__ = set_attribute  # type: ignore[method-assign]


@contextmanager
def _function_calls(recorder: Recorder, transforms: Transforms) -> Iterator[None]:
    """Activation checkpointing, a custom autograd function, has the backward of the code that it runs: it becomes a region.

    An op of `torch.library.custom_op` has its backward with it wherever it is called: the call of the op is recorded.
    """
    apply = torch.autograd.Function.__dict__["apply"]
    without_reentrant = checkpoint._checkpoint_without_reentrant_generator
    functions = Functions(recorder)

    def guarded(cls: type, *args: Any, **kwargs: Any) -> Any:
        if cls is checkpoint.CheckpointFunction and not recorder.muted:
            run, preserve_rng_state, *rest = args
            grad_enabled = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors_in(rest))
            with torch.set_grad_enabled(grad_enabled), recorder.region(preserve_rng_state, own=True):
                return run(*rest)
        transforms.check_function(cls, (args, kwargs))
        is_inside = recorder.muted or current_recorder() is None  # the latter in a torch call
        if is_inside or cls.__module__ in (checkpoint.__name__, _CUSTOM_OPS):
            return apply.__get__(None, cls)(*args, **kwargs)
        return functions.call(cls, lambda: apply.__get__(None, cls)(*args, **kwargs), args, kwargs)

    def around(run: Any, preserve_rng_state: bool = True, *args: Any, **kwargs: Any) -> Iterator[None]:
        if recorder.muted:
            yield from without_reentrant(run, preserve_rng_state, *args, **kwargs)
            return
        with recorder.region(preserve_rng_state, own=True):
            yield

    checkpoint._checkpoint_without_reentrant_generator = around  # type: ignore[assignment]
    torch.autograd.Function.apply = classmethod(guarded)  # type: ignore[assignment]
    try:
        yield
    finally:
        checkpoint._checkpoint_without_reentrant_generator = without_reentrant
        torch.autograd.Function.apply = apply  # type: ignore[method-assign]
        functions.restore()


@contextmanager
def _script_calls(recorder: Recorder) -> Iterator[None]:
    script = torch.jit.ScriptFunction.__call__

    def scripted(function: Any, *args: Any, **kwargs: Any) -> Any:
        if recorder.muted or current_recorder() is None:
            return script(function, *args, **kwargs)
        return call_script(recorder, function, lambda: script(function, *args, **kwargs), args, kwargs)

    torch.jit.ScriptFunction.__call__ = scripted  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.jit.ScriptFunction.__call__ = script  # type: ignore[method-assign]


@contextmanager
def _quiet() -> Iterator[None]:
    """FakeTensor logs the errors that it raises; ours say the same, with the module and the line."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
