"""What a compiled program depends on: the model's inputs for one microbatch, and the modes that the model is in.

Terms
    modes       `training` of every module and `requires_grad` of every parameter, as bytes; and whether autograd is on
    answers     what the model's Python asked of the inputs' values when it was recorded (see `smpc.tracer.guards`), as JSON
    ones        the masks among the inputs that hold nothing but ones, in all microbatches: Hugging Face leaves them out of its kernels
    signature   structure, tensor specs and constants of the inputs, the modes, the ones, and the answers. Equal signatures run the same
                program

Pipeline rank 0 captures signatures; the others get them, with everything that is needed to record the model: tensors become meta tensors.
"""

from __future__ import annotations

import dataclasses
import json
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from smpc.errors import StepError
from smpc.sample_inputs import Inputs
from smpc.tracer.ir import Autocast, TensorSpec, Trace
from smpc.tracer.literals import decode, encode, is_constant, normalise
from smpc.tracer.questions import Answers
from smpc.tracer.structure import Structure, flatten


@dataclass(frozen=True, slots=True)
class Constant:
    """An input that is not a tensor: compared by `key`."""

    key: str | bytes
    value: Any = field(compare=False)


@dataclass(frozen=True, slots=True)
class Signature:
    """What a program is compiled for."""

    structure: Structure
    leaves: tuple[TensorSpec | Constant, ...]
    modes: bytes
    grad_enabled: bool
    answers: str = "[]"
    autocast: Autocast | None = None  # that of the step function, around the model
    ones: tuple[str, ...] = ()  # paths of inputs

    def with_ones(self, microbatches: Sequence[Inputs]) -> Signature:
        """This signature, for the masks of these microbatches."""
        leaves = [flatten(inputs)[0] for inputs in microbatches]
        masks = [
            (position, path)
            for position, path in enumerate(self.structure.paths())
            if "mask" in path and isinstance(self.leaves[position], TensorSpec)
        ]
        ones = (
            path
            for position, path in masks
            if bool(torch.stack([(tensors[position] == 1).all() for tensors in leaves]).all())
        )
        return dataclasses.replace(self, ones=tuple(ones))

    def with_answers(self, trace: Trace) -> Signature:
        """This signature, for the values that the trace was recorded on."""
        answers = [(guard.expected, guard.dtypes) for guard in trace.guards]
        return dataclasses.replace(self, answers=json.dumps(encode(answers)))

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
    """Reads the modes of a model; the lists of its modules and parameters are made once."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = list(model.named_modules())
        self._parameters = list(model.named_parameters())

    def read(self) -> bytes:
        """The modes now."""
        return bytes([module.training for _, module in self._modules]) + bytes(
            [parameter.requires_grad for _, parameter in self._parameters]
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
        """Raise StepError, naming the first difference, if the modes are not those of pipeline rank 0."""
        found = self.read()
        if found == expected:
            return
        names = [f"module {name!r}: training" for name, _ in self._modules]
        names += [f"parameter {name!r}: requires_grad" for name, _ in self._parameters]
        name, there, here = next(row for row in zip(names, expected, found, strict=True) if row[1] != row[2])
        raise StepError(
            f"the model is not in the same mode on all ranks: {name} = {bool(there)} on pipeline rank 0, {bool(here)} here; call "
            "train(), eval() and requires_grad_() on every rank"
        )


def read_signature(inputs: Inputs, modes: bytes, grad_enabled: bool, autocast: Autocast | None = None) -> Signature:
    """The signature of one microbatch's model inputs.

    Raises StepError for tensors that want gradients, and for objects that other ranks cannot be sent.
    """
    leaves, structure = flatten(inputs)
    paths = structure.paths()
    wanting = [
        path for leaf, path in zip(leaves, paths, strict=True) if isinstance(leaf, Tensor) and leaf.requires_grad
    ]
    if wanting and grad_enabled:
        raise StepError(
            f"model input {_argument(wanting[0])} requires grad, but gradients do not flow out of the pipeline; detach it, "
            "or compute it inside the model"
        )
    described = tuple(_describe(leaf, path) for leaf, path in zip(leaves, paths, strict=True))
    return Signature(structure, described, modes, grad_enabled, autocast=autocast)


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
            pairs = zip(first.structure.paths(), first.leaves, other.leaves, strict=True)
            path, a, b = next((path, a, b) for path, a, b in pairs if a != b)
            what = f"{_argument(path)} = {_text(a)}, then {_text(b)}"
        raise StepError(
            f"step function {step_name} calls the model differently in microbatches 0 and {index}: {what}; all microbatches "
            "of a step run the same program, so give the model inputs of one shape"
        )


def _describe(leaf: Any, path: str) -> TensorSpec | Constant:
    if isinstance(leaf, Tensor):
        return TensorSpec.of(leaf.detach())
    leaf = normalise(leaf)
    if is_constant(leaf):
        return Constant(f"{type(leaf).__qualname__}:{leaf!r}", leaf)
    try:
        return Constant(pickle.dumps(leaf), leaf)
    except Exception as error:
        raise StepError(
            f"model input {_argument(path)} is a {type(leaf).__qualname__}, which cannot be sent to the other pipeline "
            f"ranks ({type(error).__name__}: {error}); pass tensors and plain values to the model"
        ) from error


def _argument(path: str) -> str:
    """ "[0][1]" of (args, kwargs) as "args[1]", "[1]['x']" as "kwargs['x']"."""
    return f"{'args' if path.startswith('[0]') else 'kwargs'}{path[3:]}"


def _text(leaf: TensorSpec | Constant) -> str:
    return str(leaf) if isinstance(leaf, TensorSpec) else repr(leaf.value)
