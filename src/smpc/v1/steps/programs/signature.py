"""The signature that a compiled program depends on, the table of programs, and the check of the first program (key `verify`).

A signature is of the model's inputs for one microbatch, and of its modes.

Terms
    modes       `training` of every module and `requires_grad` of every parameter, as bytes; and whether autograd is on
    environment number of the recording: what else the model's Python read when it was recorded
                (see `smpc.tracer.environment.environment_guards`)
    answers     what the model's Python asked of the inputs' values when it was recorded (see `smpc.tracer.input_guards`), as JSON
    ones        the masks among the inputs that hold nothing but ones, in all microbatches: Hugging Face leaves them out of its kernels
    signature   structure, tensor specs and constants of the inputs, the modes, the ones, the answers and the environment. Equal
                signatures run the same program

Pipeline rank 0 captures signatures; the others get them, with everything needed to record the model: tensors become meta tensors. On rank
0 a signature is complete only once the questions of the model's Python about the inputs' values are known: `ProgramTable.lookup` finds a
program whose recording asked the same questions and got the same answers.

A model that keeps getting new shapes would keep compiling new programs, so a table holds at most `program_cache_size`. Beyond that a new
program takes the number of the least recently used one, which is compiled again if its inputs return. The first program, number 0,
stays: replicas average the gradients of its stages. All ranks of a replica run the same programs in the same order, so they replace the
same ones without communication.

    bound 3, steps with signatures a b c b d     numbers 0 1 2 1 2: d replaces c

`verify_first` obeys the key `verify`: pipeline rank 0 runs the first microbatch in plain PyTorch and as compiled, and all ranks learn
whether the results agree.

It happens in the first step, after its programs are made and before the model is divided among the ranks: the one moment at which a rank
has the whole model and its programs. Nothing of the model, of the script's data or of the random generators is changed by it.

    rank 0                                              others
    -----------------------------------------------------------------
    eager, loopback, comparison                         wait
    result                                      <->     result          VerificationError on all of them, or the step goes on

The step function is not called: its code around the model is not compiled. Backward starts from the model's outputs
(`smpc.verification.paired_runs`).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pickle
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from smpc.compile.result import Compilation
from smpc.errors import StepError
from smpc.executor.failure.start import StartPhase
from smpc.nn.init.delayed import is_delayed
from smpc.sample_inputs import Inputs
from smpc.tracer.constants import decode, encode, is_constant, normalise
from smpc.tracer.environment.memory_words import DictVersions, trained_reader
from smpc.tracer.input_guards import Answers, broken_guard
from smpc.tracer.ir import Autocast, Guard, TensorSpec, Trace, spec_of
from smpc.tracer.record import Recording
from smpc.tracer.replay import input_values
from smpc.tracer.structure import Structure, flatten
from smpc.v1.session.process_state import Session
from smpc.v1.session.step_errors import describe, raise_first_step_error
from smpc.v1.session.step_messages import Control
from smpc.v1.session.wait_limits import enter
from smpc.verification import Conditions, verify_compilation


@dataclass(frozen=True, slots=True)
class Constant:
    """An input that is not a tensor: compared by `key`."""

    key: str | bytes
    value: Any = field(compare=False)


@dataclass(frozen=True, slots=True)
class Signature:
    """The key of a program."""

    structure: Structure
    leaves: tuple[TensorSpec | Constant, ...]
    modes: bytes
    grad_enabled: bool
    answers: str = ""
    autocast: Autocast | None = None  # the step function's autocast around the model
    ones: tuple[str, ...] = ()  # paths of inputs
    environment: int = 0

    def with_ones(self, microbatches: Sequence[Inputs]) -> Signature:
        """This signature, for the masks of these microbatches."""
        masks = _masks(self.structure)
        if not masks:
            return self
        leaves = [flatten(inputs)[0] for inputs in microbatches]
        ones = (
            path
            for position, path in masks
            if isinstance(self.leaves[position], TensorSpec)
            and bool(torch.stack([(tensors[position] == 1).all() for tensors in leaves]).all())
        )
        return dataclasses.replace(self, ones=tuple(ones))

    def with_answers(self, trace: Trace) -> Signature:
        """This signature, for the values that the trace was recorded on."""
        return dataclasses.replace(self, answers=json.dumps(encode(Answers.of(trace))))

    def decoded_answers(self) -> Answers:
        """The answers as `smpc.tracer.record` takes them."""
        answers: Answers = decode(json.loads(self.answers))
        return answers

    def sample(self) -> Inputs:
        """Inputs of this signature, their tensors on the meta device."""
        leaves = [
            torch.empty_strided(leaf.shape, leaf.stride, dtype=leaf.torch_dtype, device="meta")
            if isinstance(leaf, TensorSpec)
            else leaf.value
            for leaf in self.leaves
        ]
        args, kwargs = self.structure.unflatten(leaves)
        return args, kwargs


class ModeReader:
    """Reads the modes of a model. Modules may be added and removed between steps; parameters may not, since ranks hold them by name.

    `versions` says which modules have been written to; the caller of a step polls it.
    """

    def __init__(self, model: nn.Module, versions: DictVersions | None = None) -> None:
        self._model = model
        self._versions, self._polls = versions or DictVersions(), versions is None
        self._modules: list[tuple[str, nn.Module]] = []
        self._parameters: list[tuple[str, nn.Parameter]] = []
        self._training = b""
        self._read_trained: Callable[[], bytes] = bytes
        self.rebase()

    def rebase(self) -> None:
        """From now on the model must keep its present parameters."""
        self._parameters = list(self._model.named_parameters())
        self._read_trained = trained_reader([parameter for _, parameter in self._parameters])
        self._read_modules()

    def _read_modules(self) -> None:
        self._modules = list(self._model.named_modules())
        self._training = bytes([module.training for _, module in self._modules])
        watched = [
            table
            for _, module in self._modules
            for table in (vars(module), module._modules, module._parameters)
            if table
        ]
        self._positions = [self._versions.watch(table) for table in watched]
        self._seen = self._versions.generation

    def read(self) -> bytes:
        """The modes now. Raises StepError if the model's parameters have changed."""
        if self._polls:
            self._versions.poll()
        changed, seen = self._versions.changed_in, self._seen
        if self._versions.generation != seen and any(changed[position] > seen for position in self._positions):
            self._check_parameters()
            self._read_modules()
        return self._training + self._read_trained()

    def _check_parameters(self) -> None:
        before, now = dict(self._parameters), dict(self._model.named_parameters())
        for name in dict.fromkeys((*before, *now)):
            if before.get(name) is now.get(name):
                continue
            what = (
                "was added"
                if name not in before
                else "was removed"
                if name not in now
                else "was replaced by another one"
            )
            raise StepError(
                f"parameter {name!r} {what} after the first step, which has placed the parameters on the ranks and given them to the "
                "optimizer; build the model whole before smp.DistributedModel, and write new values into parameters in place: "
                "`with torch.no_grad(): parameter.copy_(value)`"
            )

    def check_none_unfrozen(self, before: bytes, now: bytes) -> None:
        """Raise StepError if a parameter requires grad that did not before: replicas would not average its gradient."""
        offset = len(self._modules)
        thawed = [name for i, (name, _) in enumerate(self._parameters, offset) if now[i] and not before[i]]
        if thawed:
            raise StepError(
                f"parameter {thawed[0]!r} requires grad now, but did not in the first step; with data-parallel replicas, set "
                "requires_grad before the first step"
            )

    def check(self, expected: bytes) -> None:
        """Raise StepError, naming the first difference, if the modes differ from pipeline rank 0's."""
        found = self.read()
        if found == expected:
            return
        names = [f"module {name!r}: training" for name, _ in self._modules]
        names += [f"parameter {name!r}: requires_grad" for name, _ in self._parameters]
        if len(expected) != len(found):
            raise StepError(
                f"the model has {len(expected) - len(self._parameters)} modules on pipeline rank 0, {len(self._modules)} here; make the "
                "same model on every rank, and all of its modules before smp.DistributedModel: a forward that makes some in its first call "
                "has to run once before"
            )
        name, there, here = next(row for row in zip(names, expected, found, strict=True) if row[1] != row[2])
        raise StepError(
            f"the model is not in the same mode on all ranks: {name} = {bool(there)} on pipeline rank 0, {bool(here)} here; call "
            "train(), eval() and requires_grad_() on every rank"
        )


def read_signature(inputs: Inputs, modes: bytes, grad_enabled: bool, autocast: Autocast | None = None) -> Signature:
    """The signature of one microbatch's model inputs.

    Raises StepError for tensors that require gradients, and for objects that cannot be sent to other ranks.
    """
    leaves, structure = flatten(inputs)
    described: list[TensorSpec | Constant] = []
    for position, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor):
            described.append(_constant_input(leaf, structure, position))
            continue
        if grad_enabled and leaf.requires_grad:
            raise StepError(
                f"model input {_argument(structure, position)} requires grad, but gradients do not flow out of the pipeline; detach it, "
                "or compute it inside the model"
            )
        described.append(spec_of(leaf.shape, leaf.dtype, leaf.stride() if leaf.layout is torch.strided else ()))
    return Signature(structure, tuple(described), modes, grad_enabled, autocast=autocast)


@functools.lru_cache(maxsize=64)
def _masks(structure: Structure) -> tuple[tuple[int, str], ...]:
    """Position and path of the inputs that the caller names a mask."""
    return tuple((position, path) for position, path in enumerate(structure.paths()) if "mask" in path)


def check_equal(signatures: Sequence[Signature], step_name: str) -> None:
    """Raise StepError unless all microbatches have one signature."""
    first = signatures[0]
    for index, other in enumerate(signatures):
        if other == first:
            continue
        if other.structure != first.structure:
            what = f"the form {first.structure.paths()}, then {other.structure.paths()}"
        elif other.grad_enabled != first.grad_enabled:
            what = "autograd on in one and off in the other"
        elif other.autocast != first.autocast:
            what = f"under autocast {first.autocast}, then {other.autocast}"
        else:
            pairs = enumerate(zip(first.leaves, other.leaves, strict=True))
            position, (a, b) = next((position, pair) for position, pair in pairs if pair[0] != pair[1])
            what = f"{_argument(first.structure, position)} = {_text(a)}, then {_text(b)}"
        raise StepError(
            f"step function {step_name} calls the model differently in microbatches 0 and {index}: {what}; all microbatches "
            "of a step run the same program, so give the model inputs of one shape"
        )


def _constant_input(leaf: Any, structure: Structure, position: int) -> Constant:
    """An input that is no tensor; StepError if it cannot be sent."""
    leaf = normalise(leaf)
    if is_constant(leaf):
        return Constant(f"{type(leaf).__qualname__}:{leaf!r}", leaf)
    try:
        return Constant(pickle.dumps(leaf), leaf)
    except Exception as error:
        raise StepError(
            f"model input {_argument(structure, position)} is a {type(leaf).__qualname__}, which cannot be sent to the other pipeline "
            f"ranks ({type(error).__name__}: {error}); pass tensors and plain values to the model"
        ) from error


def _argument(structure: Structure, position: int) -> str:
    """How a leaf is reached: "[0][1]" of (args, kwargs) as "args[1]", "[1]['x']" as "kwargs['x']"."""
    path = structure.paths()[position]
    return f"{'args' if path.startswith('[0]') else 'kwargs'}{path[3:]}"


def _text(leaf: TensorSpec | Constant) -> str:
    return str(leaf) if isinstance(leaf, TensorSpec) else repr(leaf.value)


class ProgramTable:
    """The programs of one replica: `entries` has the signature and the recording of each, by number. `bound`: how many, 2 at least."""

    def __init__(self, bound: int) -> None:
        assert bound >= 2, "the first program and the one that runs"
        self._bound = bound
        self.entries: list[tuple[Signature, Recording]] = []
        self._last_use: list[int] = []
        self._num_uses = 0

    def lookup(self, signature: Signature, inputs: Sequence[Inputs], model: nn.Module) -> int | None:
        """The number of a program for these inputs: its guards hold on all microbatches, in the present environment."""
        for number, (known, recording) in enumerate(self.entries):
            if dataclasses.replace(known, answers=signature.answers, environment=signature.environment) != signature:
                continue
            if recording.environment.difference() is not None:
                continue
            trace = recording.trace
            if not trace.guards or all(broken(trace, model, microbatch) is None for microbatch in inputs):
                return number
        return None

    def use(self, number: int) -> None:
        """Note that a program runs now."""
        self._num_uses += 1
        self._last_use[number] = self._num_uses

    def next_number(self) -> int:
        """The number that the next new program gets: a free one, or the number of the replaced program."""
        if len(self.entries) < self._bound:
            return len(self.entries)
        return min(range(1, self._bound), key=self._last_use.__getitem__)

    def put(self, number: int, signature: Signature, recording: Recording) -> None:
        """Enter a program under its `next_number`."""
        if number == len(self.entries):
            self.entries.append((signature, recording))
            self._last_use.append(0)
        else:
            self.entries[number] = signature, recording
        self.use(number)


def broken(trace: Trace, model: nn.Module, inputs: Inputs) -> tuple[Guard, Any] | None:
    """A guard that does not hold on the inputs of one microbatch."""
    return broken_guard(trace, model, input_values(trace, *inputs)) if trace.guards else None


_ELSEWHERE = "smpc compile --verify checks the same model in a smaller configuration"


def verify_first(
    module: nn.Module,
    session: Session,
    control: Control,
    signature: Signature,
    compiled: tuple[Compilation, Recording],
    inputs: Inputs | None,
) -> None:
    """Compare the first program with the model, on pipeline rank 0's first microbatch; None elsewhere, and without data. Collective.

    Raises VerificationError on all ranks of the pipeline. If it cannot be done, rank 0 warns, and training continues.
    """
    enter(StartPhase.STEP, "verifying the programs on pipeline rank 0")
    failure: Exception | None = None
    if inputs is not None:
        try:
            skipped = _why_not(module) or _verified(module, session, signature, compiled, inputs)
            if skipped:
                warnings.warn(f"verify: the programs have not been compared with the model: {skipped}", stacklevel=2)
        except Exception as error:
            failure = error
    raise_first_step_error(control.gather(describe(failure)), failure)


def _why_not(module: nn.Module) -> str:
    """Why the whole model cannot be run here; "" if it can."""
    if is_delayed(module):
        return f"its initialization is delayed, so that no rank ever has all of it; {_ELSEWHERE}"
    return ""


def _verified(
    module: nn.Module,
    session: Session,
    signature: Signature,
    compiled: tuple[Compilation, Recording],
    inputs: Inputs,
) -> str:
    """Compare; why that could not be done, "" if it was."""
    compilation, recording = compiled
    conditions = Conditions(session.device, signature.grad_enabled, signature.autocast)
    try:
        verify_compilation(
            module, compilation, inputs, conditions, environment=recording.environment, shown=signature.ones
        )
    except torch.OutOfMemoryError:
        return f"the whole model does not fit on {session.device}, with two sets of gradients; {_ELSEWHERE}"
    return ""
