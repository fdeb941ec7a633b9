"""Return values of a step function: joined over microbatches, and sent from the last rank to all.

    returned in microbatches 0, 1     {"loss": tensor, "n": 3, "extra": None}, {"loss": tensor, "n": 4, "extra": None}
    returned by the step              {"loss": StepOutput of both, "n": [3, 4], "extra": [None, None]}

A function that returns nothing, None itself, makes a step that returns None.

    >>> output = StepOutput([torch.tensor(1.0), torch.tensor(3.0)])
    >>> output.reduce_mean()
    tensor(2.)

A microbatch's result is flattened at once, and its tensors lose their history: the history of a loss would keep the stage's input and
its gradient, for every microbatch, until the step ends. For the same reason a small part of a large tensor (`logits[:, -1]`) is copied.

Terms
    returned  what one microbatch has returned, taken apart
    form      structure of the return value, specs of its tensors in every microbatch, pickles of its other leaves: all but the tensors.
              Equal forms stand for equal values: an object that the step function has changed since has another pickle
    payload   the tensors' bytes one after another, larger elements first, so that each begins where its dtype allows

Source: public SMP v1 API (`StepOutput`).

Losses that are NaN or infinite: all ranks learn of them at the end of the step, and react alike.

Terms
    loss      a tensor of one element that was given to `model.backward` without a gradient
    verdict   a number that is 0 where all losses are finite, and else says which one is not: 1 + 3 * (replica * microbatches +
              microbatch) + kind. The greatest counts where replicas differ: gradients are averaged over replicas, so a NaN in one
              is in all. It is 0, too, where the loss may owe it to a loss scale in use, which the optimizer's step will lower

The key `nan_policy` decides: `raise` NonFiniteLossError on all ranks, `skip` the step, or `ignore` it. The first two drop the gradients
that have accumulated, so that the optimizer changes nothing; training can go on after either.

Losses stay on their device until the step ends: they are read once, not for every microbatch.

The message that brings the verdict to all ranks also says which step function each tensor-parallel group runs: ranks of a group that run
different functions of equal shapes would mix their values, and sum gradients of different losses.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
import pickle
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from smpc.errors import StepError, UsageError
from smpc.mesh import Axis
from smpc.tracer.ir import TensorSpec
from smpc.tracer.structure import LEAF, Structure, flatten
from smpc.v1.session.object_messages import gather_objects
from smpc.v1.session.precision import Precision
from smpc.v1.session.process_state import Session
from smpc.v1.steps.arguments import StepBody

_SETS = ("set", "frozenset")
Place = tuple[int, int, torch.dtype, tuple[int, ...]]  # of a tensor in a payload: begin and end in bytes, dtype, shape


class StepOutput:
    """One tensor for each microbatch, in order: `outputs`. On every rank.

    The tensors have the shapes that the step function returned. `reduce_mean` and `reduce_sum` combine them, `concat` joins them along
    axis 0, `stack` along a new axis 0.

    Source: public SMP v1 API (`StepOutput`).
    """

    def __init__(self, outputs: Sequence[Tensor]) -> None:
        self.outputs = list(outputs)

    def reduce_mean(self) -> Tensor:
        """The mean over the microbatches, of the shape of one of them."""
        return self.reduce_sum() / len(self.outputs)

    def average(self) -> Tensor:
        """The same as `reduce_mean`."""
        return self.reduce_mean()

    def reduce_sum(self) -> Tensor:
        """The sum over the microbatches, of the shape of one of them."""
        return functools.reduce(operator.add, self.outputs)

    def concat(self) -> Tensor:
        """The tensors joined along axis 0; each must have one."""
        if any(not output.dim() for output in self.outputs):
            raise StepError("concat: expected tensors with at least one axis, found scalars; use stack()")
        return torch.cat(self.outputs)

    def stack(self) -> Tensor:
        """The tensors along a new axis 0, whose size is the number of microbatches."""
        return torch.stack(self.outputs)

    def item(self) -> float:
        """The mean over the microbatches as a number of Python. Raises StepError unless each has one element."""
        wrong = [list(output.shape) for output in self.outputs if output.numel() != 1]
        if wrong:
            raise StepError(f"item: expected tensors of one element, found shape {wrong[0]}; use concat() or stack()")
        return float(self.reduce_mean().item())

    def detach(self) -> StepOutput:
        """The same tensors without their history."""
        return StepOutput([output.detach() for output in self.outputs])

    def __len__(self) -> int:
        return len(self.outputs)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.outputs)

    def __getitem__(self, microbatch: int) -> Tensor:
        return self.outputs[microbatch]

    def __repr__(self) -> str:
        return f"StepOutput({self.outputs!r})"


@dataclass(frozen=True, slots=True)
class Returned:
    """The step function's result in one microbatch."""

    leaves: list[Any]
    structure: Structure


def take(value: Any, detach: bool) -> Returned:
    """What the step function has just returned; `detach`: its tensors lose their history, and hold no memory but their own."""
    leaves, structure = flatten(value)
    return Returned(
        [_detached_result(leaf) if detach and isinstance(leaf, Tensor) else leaf for leaf in leaves], structure
    )


def _detached_result(tensor: Tensor) -> Tensor:
    """A result of a step that does not keep much larger memory alive."""
    found = tensor.detach()
    if found.layout is not torch.strided:
        return found
    is_small_part = 2 * found.numel() * found.element_size() <= found.untyped_storage().nbytes()
    return found.clone() if is_small_part else found


@dataclass(frozen=True)
class ResultForm:
    """Everything about a step's results but the tensors. `leaves[i]`: specs or pickles of leaf i in every microbatch."""

    structure: Structure
    leaves: tuple[tuple[TensorSpec | bytes, ...], ...]

    def build(self, payload: Tensor) -> Any:
        """The step's return value out of the tensors' bytes."""
        tensors = _read(payload, self._places)
        columns: list[list[Any]] = []
        for column in self.leaves:
            if isinstance(column[0], TensorSpec):  # in all microbatches, or in none
                columns.append(list(itertools.islice(tensors, len(column))))
            else:
                columns.append(list(map(pickle.loads, column)))  # type: ignore[arg-type]
        return _join_microbatches(self.structure, columns)

    @functools.cached_property
    def specs(self) -> list[TensorSpec]:
        """Specs of all tensors, in order of leaves, then microbatches."""
        return [leaf for column in self.leaves for leaf in column if isinstance(leaf, TensorSpec)]

    @functools.cached_property
    def num_bytes(self) -> int:
        """Size of the payload."""
        return sum(spec.num_bytes for spec in self.specs)

    @functools.cached_property
    def _places(self) -> list[Place]:
        return _places(self.specs)


@dataclass(frozen=True)
class StepResults:
    """The results of the microbatches. `columns[i]`: leaf i in every microbatch, tensors in all of them or in none."""

    step_name: str
    structure: Structure
    columns: list[tuple[Any, ...]]

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors, in order of leaves, then microbatches."""
        return [leaf for column in self.columns for leaf in column if isinstance(leaf, Tensor)]

    def join(self) -> Any:
        """The step's return value. Raises StepError for a class that does not allow it."""
        try:
            return _join_microbatches(self.structure, self.columns)
        except Exception as error:  # of the user's classes
            classes = [
                f"{_place(path)} {part.class_text}" for path, part in self.structure.containers() if part.class_name
            ]
            raise StepError(
                f"step function {self.step_name} returned what cannot be put together again from its microbatches, among "
                f"[{', '.join(classes)}] ({type(error).__name__}: {error}); return tensors and values in lists, tuples and dicts, or in "
                "named tuples and dataclasses that a module defines outside of functions, under their own names"
            ) from error

    def form(self) -> ResultForm:
        """The form from which other ranks build the return value. Raises StepError for leaves that cannot be sent."""
        wrong: list[str] = []
        leaves = [
            tuple(_describe(leaf, path, wrong) for leaf in column)
            for column, path in zip(self.columns, self.structure.paths(), strict=True)
        ]
        if wrong:
            raise StepError(
                f"step function {self.step_name} returned what cannot be sent to the other pipeline ranks, "
                f"{'; '.join(dict.fromkeys(wrong))}; return tensors and plain values"
            )
        return ResultForm(self.structure, tuple(leaves))


def read_results(values: Sequence[Returned], step_name: str) -> StepResults:
    """The results of the microbatches, leaf by leaf.

    Raises StepError unless all of them returned the same structure, without sets: their members have no position.
    """
    structure = values[0].structure
    sets = [f"{_place(path)} a {part.kind}" for path, part in structure.containers() if part.kind in _SETS]
    if sets:
        raise StepError(
            f"step function {step_name}: expected tensors and values in containers with an order, found {', '.join(sets)}; members of a "
            "set in one microbatch cannot be told from those in another: return a list, a tuple or a dict in its place"
        )
    kinds = [[isinstance(leaf, Tensor) for leaf in value.leaves] for value in values]
    for index, other in enumerate(value.structure for value in values):
        if other != structure or kinds[index] != kinds[0]:
            raise StepError(
                f"step function {step_name} must return the same structure in every microbatch, found "
                f"{_tensor_paths(structure, kinds[0])} in microbatch 0 and {_tensor_paths(other, kinds[index])} in {index}"
            )
    return StepResults(step_name, structure, list(zip(*(value.leaves for value in values), strict=True)))


def pack(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """The payload of tensors: flat uint8."""
    order = _order([tensor.dtype for tensor in tensors])
    parts = [_bytes_of(tensors[i], device) for i in order if tensors[i].numel()]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8, device=device)


def _bytes_of(tensor: Tensor, device: torch.device) -> Tensor:
    flat = tensor.detach().reshape(-1).to(device).contiguous()
    # One element is contiguous whatever its stride, which must be 1 for a view of another size.
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)


def unpack(payload: Tensor, specs: Sequence[TensorSpec]) -> list[Tensor]:
    """The tensors in a payload, contiguous."""
    return list(_read(payload, _places(specs)))


def _read(payload: Tensor, places: Sequence[Place]) -> Iterator[Tensor]:
    for begin, end, dtype, shape in places:
        yield payload[begin:end].view(dtype).view(shape)


def _places(specs: Sequence[TensorSpec]) -> list[Place]:
    """Where the tensors are in a payload, in the order of `specs`."""
    found: dict[int, Place] = {}
    begin = 0
    for i in _order([spec.torch_dtype for spec in specs]):
        spec = specs[i]
        found[i] = begin, begin + spec.num_bytes, spec.torch_dtype, spec.shape
        begin += spec.num_bytes
    return [found[i] for i in range(len(found))]


def _order(dtypes: Sequence[torch.dtype]) -> list[int]:
    return sorted(range(len(dtypes)), key=lambda i: -dtypes[i].itemsize)


def _join_microbatches(structure: Structure, columns: Sequence[Sequence[Any]]) -> Any:
    """The step's return value out of its leaves in every microbatch."""
    if structure.kind == LEAF and columns[0][0] is None and all(value is None for value in columns[0]):
        return None
    leaves: list[StepOutput | list[Any]] = []
    for column in columns:
        leaves.append(StepOutput(column) if isinstance(column[0], Tensor) else list(column))
    return structure.unflatten(leaves)


def _describe(leaf: Any, path: str, wrong: list[str]) -> TensorSpec | bytes:
    """A leaf as stored in a form; a reason why it cannot be sent is added to `wrong`."""
    if isinstance(leaf, Tensor):
        return TensorSpec.of(leaf.detach())
    try:
        return pickle.dumps(leaf)
    except Exception as error:  # of the user's classes
        wrong.append(f"{_place(path)} a {type(leaf).__qualname__} ({type(error).__name__}: {error})")
        return b""


def _place(path: str) -> str:
    return f"as {path}" if path else "as the whole value"


def _tensor_paths(structure: Structure, kinds: Sequence[bool]) -> str:
    paths = [
        f"{'tensor' if is_tensor else 'value'} {path or 'itself'}"
        for path, is_tensor in zip(structure.paths(), kinds, strict=True)
    ]
    return f"{structure.kind} of [{', '.join(paths)}]"


def loss_to_bits(mean: float | None) -> int:
    """A mean loss as an integer, to send among others; None if there is none."""
    return int.from_bytes(struct.pack("<d", math.nan if mean is None else mean), "little", signed=True)


def loss_from_bits(bits: int) -> float | None:
    """The mean loss that another rank has sent; None if there is none, or it is not a number."""
    (mean,) = struct.unpack("<d", bits.to_bytes(8, "little", signed=True))
    return None if math.isnan(mean) else float(mean)


_KINDS = ("nan", "inf", "-inf")
_NO_FUNCTION = -(1 << 33)  # less than the number of any step function, and than its negative


class Losses:
    """The losses of one step on the rank that computes them; constructed before the step function runs."""

    def __init__(self, precision: Precision) -> None:
        self._precision = precision
        self._values: list[Tensor] = []
        self._microbatches: list[int] = []
        self._num_scaled = precision.num_scaled
        self.mean: float | None = None  # over the microbatches, once there is a verdict

    def add(self, microbatch: int, losses: Sequence[Tensor]) -> None:
        """Notes the losses of one microbatch."""
        for loss in losses:
            self._values.append(loss.detach().reshape(()).to(torch.float32))
            self._microbatches.append(microbatch)

    def verdict(self, session: Session) -> int:
        """This replica's verdict."""
        if not self._values or session.config.nan_policy == "ignore":
            return 0
        values = torch.stack(self._values).tolist()
        self.mean = sum(values) / len(set(self._microbatches))
        if self._precision.overflow_is_curable(self._num_scaled):
            return 0
        for microbatch, value in zip(self._microbatches, values, strict=True):
            if not math.isfinite(value):
                kind = 0 if math.isnan(value) else 1 if value > 0 else 2
                replica = session.mesh.rdp_rank(session.rank)
                return 1 + 3 * (replica * session.config.microbatches + microbatch) + kind
        return 0


def agree(verdict: int, body: StepBody | None, session: Session) -> int:
    """The verdict of all ranks whose gradients are averaged. Collective over the ranks that run the same stage, in steps that train.

    `body` is None on a rank that takes part in others' steps. Raises UsageError on all ranks if a tensor-parallel group runs several
    functions.
    """
    mesh = session.mesh
    if mesh.dp_size == 1 or session.config.nan_policy == "ignore":
        return verdict
    numbers = [verdict]
    if mesh.tp_size > 1:  # two numbers for each group: the largest one's, and the smallest one's negative
        numbers += [_NO_FUNCTION] * 2 * mesh.rdp_size
        if body is not None:
            place = 1 + 2 * mesh.rdp_rank(session.rank)
            numbers[place : place + 2] = [body.number, -body.number]
    message = torch.tensor(numbers, dtype=torch.int64, device=session.message_device)
    dist.all_reduce(message, dist.ReduceOp.MAX, group=session.groups[Axis.DP])
    verdict, *found = message.tolist()
    if any(largest + negative for largest, negative in zip(found[::2], found[1::2], strict=True) if largest >= 0):
        raise _different_functions(body, session)
    return verdict


def _different_functions(body: StepBody | None, session: Session) -> UsageError:
    """The error that all ranks raise. Collective over them."""
    names = gather_objects(
        "none" if body is None else body.name, session.groups[Axis.DP], session.message_device, session.device
    )
    members = session.mesh.group(Axis.DP, session.rank)
    found = ", ".join(f"{name} on rank {rank}" for name, rank in zip(names, members, strict=True))
    return UsageError(
        f"expected all ranks of a tensor-parallel group to run the same step function, found {found}; run the same step functions in the "
        "same order on all of them"
    )


def describe_verdict(verdict: int, step_name: str, session: Session) -> str:
    """The message for a verdict other than 0."""
    place, kind = divmod(verdict - 1, 3)
    replica, microbatch = divmod(place, session.config.microbatches)
    where = f"microbatch {microbatch}" + (f" of replica {replica}" if session.mesh.rdp_size > 1 else "")
    return (
        f"step function {step_name}: expected a finite loss, found {_KINDS[kind]} in {where}; the gradients were dropped, so the "
        "parameters stay as they are. Look for its cause (learning rate, data, precision); nan_policy: skip goes on without such "
        "steps, nan_policy: ignore does not look"
    )
