"""The recorder: one run of the model's own Python over fake tensors, written down as a `Trace`.

`record(model, args, kwargs)` replaces parameters, buffers and inputs by FakeTensors (no memory, no arithmetic), runs the model once
in its present mode, and notes every torch call that returns a tensor or writes into one. Tensors are known by identity and kept
alive until the end, so that identities stay unique. Python values are baked in: a trace belongs to one input signature.

What a call writes in place is found by comparing tensors' version counters around it; batch normalisation, which updates its running
statistics without telling autograd, is the one operation that has to be known by name.

    >>> trace = record(nn.Linear(3, 2), (torch.zeros(4, 3),))
    >>> [node.target for node in trace.nodes]
    ['args[0]', 'weight', 'bias', 'torch.nn.functional.linear']
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import graph
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import checkpoint

from smpc.errors import SmpcError, TraceError
from smpc.tracer.effects import tensors_in
from smpc.tracer.fakes import installed, make_fakes
from smpc.tracer.functions import Functions
from smpc.tracer.ir import Autocast, Trace
from smpc.tracer.libraries import looking
from smpc.tracer.opaque import shape_rule
from smpc.tracer.places import innermost_line
from smpc.tracer.questions import Answers
from smpc.tracer.recorder import Recorder, UntraceableError, current_recorder
from smpc.tracer.scripts import call_script

_CUSTOM_OPS = "torch._library.autograd"  # where torch defines the autograd functions of custom ops
_CHECK_INPUTS = "what to do: check that the model runs by itself on inputs of these shapes and dtypes"


_LEAF_MARK = "_smpc_leaf"
_MAX_CACHED_FAKES = 4096  # FakeTensorMode remembers operations on shapes, for the whole process and without a bound


def mark_leaf(module: nn.Module) -> nn.Module:
    """Marks a module to be called whole by every trace, with nothing recorded inside; returns it.

    For modules whose Python depends on the values of tensors. What such a module returns must have shapes that do not depend on values.
    In the Python that runs inside it, fake tensors stand for the real ones.
    """
    vars(module)[_LEAF_MARK] = True
    return module


def record(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    leaf_modules: Sequence[str] = (),
    device: torch.device | str = "cpu",
    answers: Answers | None = None,
    autocast: Autocast | None = None,
    shown: Collection[str] = (),
) -> Trace:
    """Records one forward run of `model(*args, **kwargs)`.

    Tensors in the inputs may be real, on the meta device, or fake: only their shapes, dtypes and strides count. `leaf_modules` are
    FQNs of modules to be called whole, with nothing recorded inside. `device` is the device that the run pretends to be on.

    Where the model's Python asks for a value that depends on inputs and buffers alone, real inputs are needed; the answer becomes a
    guard of the trace (see `smpc.tracer.guards`). `answers`, from the guards of a trace of the same model, replace real inputs.
    `autocast`: what the model runs under, as if it entered that itself. `shown`: paths of inputs (`Structure.paths`) at whose values
    libraries may look that would take another way when traced (see `smpc.tracer.libraries`).

    A module whose forward cannot be recorded becomes a leaf by itself (see `smpc.tracer.opaque`), and so do all others of its class.
    Raises TraceError if what cannot be recorded is the model's own forward; the message says where.
    """
    names = {id(module): name for name, module in reversed(list(model.named_modules(remove_duplicate=False)))}
    unknown = [name for name in leaf_modules if name not in names.values()]
    if unknown:
        raise TraceError(f"leaf_modules: the model has no module called {', '.join(map(repr, unknown))}")
    marked = (name for name, module in model.named_modules() if _is_leaf(module))
    leaves = dict.fromkeys((*leaf_modules, *marked))
    first_error: UntraceableError | None = None
    while True:
        try:
            return _record_once(
                model,
                tuple(args),
                dict(kwargs or {}),
                names,
                frozenset(leaves),
                torch.device(device),
                answers,
                autocast,
                shown,
            )
        except UntraceableError as error:
            first_error = first_error or error
            more = _to_call_whole(model, error.module, leaves)
            if not more:
                raise TraceError(str(first_error)) from first_error.__cause__
            leaves.update(more)


def _is_leaf(module: nn.Module) -> bool:
    """Whether nothing is to be recorded inside: so it is marked, a rule gives its shapes, or it is no Python (TorchScript)."""
    return (
        isinstance(module, torch.jit.ScriptModule)
        or bool(vars(module).get(_LEAF_MARK))
        or shape_rule(module) is not None
    )


def _to_call_whole(model: nn.Module, failed: nn.Module | None, leaves: Mapping[str, None]) -> dict[str, None]:
    """The module that cannot be recorded, and with it all of its class: what stopped one will stop the others."""
    if failed is None or failed is model:
        return {}
    alike = (name for name, module in model.named_modules() if type(module) is type(failed) and name not in leaves)
    return dict.fromkeys(alike)


def _record_once(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    names: dict[int, str],
    leaves: frozenset[str],
    device: torch.device,
    answers: Answers | None,
    autocast: Autocast | None,
    shown: Collection[str],
) -> Trace:
    """One attempt, with these modules called whole."""
    if len(FakeTensorMode.cache) > _MAX_CACHED_FAKES:
        FakeTensorMode.cache_clear()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    state = make_fakes(model, mode, device)
    with ExitStack() as stack:
        # Ours, not the caller's, decides what is recorded: autograd on or off is part of the signature.
        stack.enter_context(installed(model, state))
        stack.enter_context(mode)
        recorder = Recorder(state, names, leaves, device, answers, shown)
        fake_args, fake_kwargs = recorder.bind_inputs(args, kwargs)
        stack.enter_context(recorder.meter)
        stack.enter_context(_saved_tensors(recorder))
        stack.enter_context(_python_calls(recorder))
        stack.enter_context(looking(recorder.is_shown))
        stack.enter_context(_quiet())
        stack.enter_context(recorder)
        if autocast is not None:
            dtype = getattr(torch, autocast.dtype)
            stack.enter_context(torch.autocast(autocast.device_type, dtype, autocast.enabled))
        try:
            output = model(*fake_args, **fake_kwargs)
        except SmpcError:
            raise
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            raise recorder.error(what, line=innermost_line(error), way_out=_CHECK_INPUTS) from error
        with torch._C.DisableTorchFunction():
            return recorder.finish(model, output)


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
    """Routes every call of a module, and of a custom autograd function, through the recorder.

    Activation checkpointing, one of these functions, has the backward of what it runs: it becomes a region. An op of
    `torch.library.custom_op` has its backward with it wherever it is called: the call of the op is recorded.
    """
    original, apply = nn.Module.__call__, torch.autograd.Function.__dict__["apply"]
    script, set_attribute = torch.jit.ScriptFunction.__call__, nn.Module.__setattr__
    without_reentrant = checkpoint._checkpoint_without_reentrant_generator
    functions = Functions(recorder)

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return recorder.module_call(module, lambda: original(module, *args, **kwargs), args, kwargs)

    def guarded(cls: type, *args: Any, **kwargs: Any) -> Any:
        if cls is checkpoint.CheckpointFunction and not recorder.muted:
            run, preserve_rng_state, *rest = args
            grad_enabled = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors_in(rest))
            with torch.set_grad_enabled(grad_enabled), recorder.region(preserve_rng_state, own=True):
                return run(*rest)
        is_inside = recorder.muted or current_recorder() is None  # the latter in a torch call
        if is_inside or cls.__module__ in (checkpoint.__name__, _CUSTOM_OPS):
            return apply.__func__(cls, *args, **kwargs)
        return functions.call(cls, lambda: apply.__func__(cls, *args, **kwargs), args, kwargs)

    def around(run: Any, preserve_rng_state: bool = True, *args: Any, **kwargs: Any) -> Iterator[None]:
        if recorder.muted:
            yield from without_reentrant(run, preserve_rng_state, *args, **kwargs)
            return
        with recorder.region(preserve_rng_state, own=True):
            yield

    def noting(module: nn.Module, name: str, value: Any) -> None:
        recorder.note_write(module, name)
        set_attribute(module, name, value)

    def scripted(function: Any, *args: Any, **kwargs: Any) -> Any:
        if recorder.muted or current_recorder() is None:
            return script(function, *args, **kwargs)
        return call_script(recorder, function, lambda: script(function, *args, **kwargs), args, kwargs)

    nn.Module.__call__ = call  # type: ignore[method-assign]
    nn.Module.__setattr__ = noting  # type: ignore[method-assign, assignment]
    torch.jit.ScriptFunction.__call__ = scripted  # type: ignore[method-assign, assignment]
    checkpoint._checkpoint_without_reentrant_generator = around  # type: ignore[assignment]
    torch.autograd.Function.apply = classmethod(guarded)  # type: ignore[assignment]
    try:
        yield
    finally:
        nn.Module.__call__ = original  # type: ignore[method-assign]
        nn.Module.__setattr__ = set_attribute  # type: ignore[method-assign]
        torch.jit.ScriptFunction.__call__ = script  # type: ignore[method-assign]
        checkpoint._checkpoint_without_reentrant_generator = without_reentrant
        torch.autograd.Function.apply = apply  # type: ignore[method-assign]
        functions.restore()


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
