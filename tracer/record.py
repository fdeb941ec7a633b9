"""The recorder: one run of the model's own Python over fake tensors, written down as a `Trace`.

`record(model, args, kwargs)` replaces parameters, buffers and inputs by FakeTensors (no memory, no arithmetic), runs the model once
in its present mode, and notes every torch call that returns a tensor or writes into one. Tensors are known by identity and kept
alive until the end, so that identities stay unique. Python values are baked in: a trace belongs to one input signature.

In-place writes of a call are found by comparing tensors' version counters around it; batch normalisation, which updates its running
statistics without autograd's knowledge, is the one operation known by name.

    >>> trace = record(nn.Linear(3, 2), (torch.zeros(4, 3),))
    >>> [node.target for node in trace.nodes]
    ['args[0]', 'weight', 'bias', 'torch.nn.functional.linear']
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from smpc.errors import TraceError
from smpc.tracer.attempt import Attempt, LookCloselyError, RecordingRequest, Subject, record_once
from smpc.tracer.environment.environment_guards import Environment, TableLike, tables_of
from smpc.tracer.environment.memory_words import DictVersions
from smpc.tracer.environment.object_identity import Aliases, read_tensors
from smpc.tracer.environment.outside_reads import ahead
from smpc.tracer.environment.reachable_values import guards_of_torch
from smpc.tracer.environment.state_changes import Survivors, common_module, is_same, settled
from smpc.tracer.environment.weakly_held import check_proxies
from smpc.tracer.input_guards import Answers
from smpc.tracer.ir import Autocast, Trace
from smpc.tracer.operations.opaque import shape_rule
from smpc.tracer.operations.value_queries import DataSized, SizeAskedError
from smpc.tracer.recording.untraceable import UntraceableError, check_hooks, hook_of

_LEAF_MARK = "_smpc_leaf"


def mark_leaf(module: nn.Module) -> nn.Module:
    """Marks a module to be called whole by every trace, with nothing recorded inside; returns it.

    For modules whose Python depends on the values of tensors. The shapes of such a module's outputs must not depend on values. In the
    Python that runs inside it, fake tensors stand for the real ones.
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
    buffers: Mapping[str, torch.Tensor] | None = None,
) -> Trace:
    """Records one forward run of `model(*args, **kwargs)`, for the present state that the model's Python reads: see `record_guarded`.

    Tensors in the inputs may be real, on the meta device, or fake: only their shapes, dtypes and strides count. `leaf_modules` are
    FQNs of modules to be called whole, with nothing recorded inside. `device` is the device that the run pretends to be on.

    Where the model's Python asks for a value that depends on inputs and buffers alone, real inputs are needed; the answer becomes a
    guard of the trace (see `smpc.tracer.input_guards`). `answers`, from the guards of a trace of the same model, replace real inputs.
    `autocast`: what the model runs under, as if it entered that itself. `shown`: paths of inputs (`Structure.paths`) at whose values
    libraries may look that would take another way when traced (see `smpc.tracer.patches`). `buffers`: the real ones, by name,
    where the model has stand-ins.

    A module whose forward cannot be recorded becomes a leaf by itself (see `smpc.tracer.operations.opaque` and
    `smpc.tracer.effects.side_effects`), and so do all others of its class. A module with hooks is a leaf.
    Raises TraceError if what cannot be recorded is the model's own forward; the message says where.
    """
    place, inputs = torch.device(device), (tuple(args), dict(kwargs or {}))
    request = RecordingRequest(*inputs, place, answers, autocast, tuple(shown), buffers)
    return _recorded(model, request, leaf_modules).trace


@dataclass(frozen=True)
class Recording:
    """A trace, and the values that its Python read besides its inputs: the trace is valid while these are the same."""

    trace: Trace
    environment: Environment


def record_guarded(
    model: nn.Module, request: RecordingRequest, leaf_modules: Sequence[str] = (), versions: DictVersions | None = None
) -> Recording:
    """Records one forward run, and the guards under which the trace is valid. `versions`: see `Environment`.

    State that the run reads and changes is settled, left to a module that is called whole, or refused:
    `smpc.tracer.environment.state_changes`.
    """
    run = _recorded(model, request, leaf_modules)
    tables: list[TableLike] = [*tables_of(model, run.listed, run.used, run.converted), *run.names]
    tables.append(Aliases(model.named_modules(), read_tensors(run.trace), run.guards))
    # Elsewhere than on the CPU, tensors that have been evaluated are on the wrong device: there every call computes them anew.
    is_left = run.leftovers is not None and (request.device.type == "cpu" or not run.leftovers.cached)
    leave = run.leftovers.leave if run.leftovers is not None and is_left else None
    values = (guard.place.read() for guard in run.guards)
    layers = [*model.modules(), *(value for value in values if isinstance(value, nn.Module))]
    guards = (*run.guards, *guards_of_torch(layers, run.of_torch, run.named))
    return Recording(run.trace, Environment(guards, tables, versions, leave))


def _recorded(model: nn.Module, request: RecordingRequest, leaf_modules: Sequence[str]) -> Attempt:
    """The run that is right."""
    names = {id(module): name for name, module in reversed(list(model.named_modules(remove_duplicate=False)))}
    unknown = [name for name in leaf_modules if name not in names.values()]
    if unknown:
        raise TraceError(f"leaf_modules: the model has no module called {', '.join(map(repr, unknown))}")
    check_hooks(model)
    check_proxies(model)
    leaves = dict.fromkeys((*leaf_modules, *(name for name, module in model.named_modules() if _is_leaf(module))))
    if "" in leaves:
        raise TraceError(
            "cannot trace the model itself: it is to be called whole (leaf_modules, smpc.mark_leaf, smpc.register_shape_rule), and a "
            "program calls parts of a model; what to do: mark those of its modules that need it"
        )
    attempts = _Attempts(model, names, request)
    try:
        return attempts.run(leaves)
    except UntraceableError as error:
        raise TraceError(str(error)) from error.__cause__


@dataclass(frozen=True)
class _Attempts:
    """One attempt after another, with ever more modules called whole, and ever more sizes asked for."""

    model: nn.Module
    names: dict[int, str]
    request: RecordingRequest

    def run(self, leaves: Mapping[str, None]) -> Attempt:
        """The run that is right. Raises the first UntraceableError."""
        answers = self.request.answers
        if answers is not None:  # from the last attempt of another rank
            whole = {**leaves, **dict.fromkeys(answers.leaves)}
            return self._attempt(whole, DataSized(frozenset(answers.sizes), everywhere=True))
        try:
            return self._repeat(leaves, everywhere=False)
        except UntraceableError:
            with suppress(TraceError):
                return self._repeat(leaves, everywhere=True)
            raise

    def _repeat(self, leaves: Mapping[str, None], *, everywhere: bool) -> Attempt:
        asked: frozenset[str] = frozenset()
        first_error: UntraceableError | None = None
        while True:
            try:
                return self._attempt(leaves, DataSized(asked, everywhere))
            except SizeAskedError as error:
                more_sizes = asked | error.keys
                assert more_sizes != asked, "a size that was asked for is known"
                asked = more_sizes
            except UntraceableError as error:
                first_error = first_error or error
                more = _to_call_whole(self.model, error.module, leaves)
                if not more:
                    text = _both(str(first_error), str(error))
                    raise UntraceableError(text, first_error.module) from first_error.__cause__
                leaves = {**leaves, **more}

    def _attempt(self, leaves: Mapping[str, None], sizes: DataSized) -> Attempt:
        subject = Subject(self.model, self.names, self.request, frozenset(leaves), sizes, Survivors())
        with subject.survivors:
            run = _settled(subject, _run_looking(subject))
        subject.survivors.check()
        return run


def _run_looking(subject: Subject) -> Attempt:
    """A run, made once more where somebody has used a generator of random numbers, to see who it was."""
    try:
        return record_once(subject)
    except LookCloselyError:
        return record_once(dataclasses.replace(subject, sizes=subject.sizes.again(), closely=True))


def _settled(subject: Subject, run: Attempt) -> Attempt:
    """The run, if what it has changed changes nothing about the trace; else UntraceableError."""
    if not run.changed:
        return _undisturbed(subject, run)
    if subject.request.answers is not None:  # the rank that gave the answers has looked
        for guard, after in zip(run.changed, run.after, strict=True):
            guard.expected.append(after)
        return run
    if run.leftovers is not None:
        before = [(guard, guard.place.read()) for guard in run.changed]
        try:
            run.leftovers.apply()
            with ahead([read.namespace for read in run.outside]):
                again = _run_looking(dataclasses.replace(subject, sizes=subject.sizes.again(), is_again=True))
        except (TraceError, SizeAskedError):
            again = None
        finally:
            run.leftovers.restore()
            for guard, value in before:
                guard.place.write(value)
        is_settled = again is not None and not again.changed and not any(read.is_of_files for read in again.outside)
        if again is not None and is_settled and is_same(run.trace, again.trace, run.leftovers.cached):
            return dataclasses.replace(run, guards=settled(run.guards, run.changed, again.guards))
    owner = common_module(run.contexts[0])
    raise UntraceableError(run.refusal, subject.model.get_submodule(owner) if owner else None)


def _undisturbed(subject: Subject, run: Attempt) -> Attempt:
    """The run, if what it has read from outside the process changes nothing about the trace; else UntraceableError."""
    if not run.outside or subject.request.answers is not None:
        return run
    read = next((read for read in run.outside if read.is_of_files), None)
    if read is None:
        with suppress(TraceError, SizeAskedError), ahead([read.namespace for read in run.outside]):
            again = _run_looking(dataclasses.replace(subject, sizes=subject.sizes.again(), is_again=True))
            if is_same(run.trace, again.trace, ()):
                return run
        read = run.outside[0]
    module = subject.model.get_submodule(read.fqn)
    raise UntraceableError.inside(module, read.fqn, read.line, f"forward {read.what}, which every step has to do anew")


def _both(first: str, last: str) -> str:
    """The error that stopped a recording first, and why it did not help to call that module whole."""
    return first if first == last else f"{first}; and then: {last}"


def _is_leaf(module: nn.Module) -> bool:
    """Whether nothing is to be recorded inside: it is marked so, a rule gives its shapes, it has hooks, or is no Python (TorchScript)."""
    return (
        isinstance(module, torch.jit.ScriptModule)
        or bool(hook_of(module))
        or bool(vars(module).get(_LEAF_MARK))
        or shape_rule(module) is not None
    )


def _to_call_whole(model: nn.Module, failed: nn.Module | None, leaves: Mapping[str, None]) -> dict[str, None]:
    """The module that cannot be recorded, and with it all of its class: what stopped one will stop the others."""
    if failed is None or failed is model:
        return {}
    alike = (name for name, module in model.named_modules() if type(module) is type(failed) and name not in leaves)
    return dict.fromkeys(alike)
