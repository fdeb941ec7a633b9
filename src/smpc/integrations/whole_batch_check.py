"""A library's step on a whole batch, beside its microbatches: numbers that are no means over microbatches are found before an update.

A pipeline runs the code that follows the model once for every microbatch. Its losses and logged values then have to be put together, and
their mean is the batch's value only if they are means over equally many elements: a sum, a mean with weights of classes, a loss over pairs
of rows, a number of rows are none. So that code runs once more, on the rank of the last stage, with what the model has returned for all
microbatches, joined, and without gradients: that gives the batch's own value.

    microbatch 0    model(x0) -> y0    code(y0) = 0.5
    microbatch 1    model(x1) -> y1    code(y1) = 0.7     their mean: 0.6
    rehearsal                          code([y0, y1])     the batch's value

Terms
    own      what a microbatch's code has given: numbers, by name
    exact    the same numbers of the whole batch
    marks    of an object's attributes, which differ once one of them has changed
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

import smpc.v1 as smp
from smpc.checkpoint import capture_rng, restore_rng
from smpc.errors import StepError

_SMALL = 2**22  # elements of a batch's outputs, up to which every batch is rehearsed
_FIRST = 8  # batches with larger outputs that are
_LONG = 100  # elements of a container that are looked at one by one
_FULL, _HALF = 5e-5, 2e-2  # by which sums in another order may differ


class HeardModel:
    """Stands for the model where a library's code calls it: passes calls on, and keeps what they return; or gives an answer instead."""

    def __init__(self, model: Any, *answers: Any, divisor: tuple[str, Tensor] | None = None) -> None:
        self._model, self._answers = model, answers
        self._name = "" if divisor is None else divisor[0]
        self._divisor = None if divisor is None else divisor[1]
        self.returned: list[Any] = []
        self.has_divided = False  # the model has computed with the divisor of its loss, its argument of that name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's outputs, or the answer."""
        if self._answers:
            self.returned.append(self._answers[0])
            return self._answers[0]
        with _Uses(self._divisor) as uses:
            found = self._model(*args, **kwargs)
        by_program = self._model.computes_with(self._name) if isinstance(self._model, smp.DistributedModel) else None
        self.has_divided = uses.has_any if by_program is None else by_program and self._name in kwargs
        self.returned.append(found)
        return found

    def __getattr__(self, name: str) -> Any:
        """The model's."""
        return getattr(self._model, name)


class _Uses(TorchFunctionMode):
    """Whether torch computes with a tensor in this context."""

    def __init__(self, tensor: Tensor | None) -> None:
        super().__init__()
        self._tensor = tensor
        self.has_any = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The function's result."""
        is_attribute = getattr(func, "__name__", "") == "__get__"
        if self._tensor is not None and not is_attribute and not self.has_any:
            self.has_any = any(each is self._tensor for each in tree_leaves((args, kwargs)))
        return func(*args, **(kwargs or {}))


class Rehearsal:
    """Of one kind of step. `begin` before every batch, and `add` after every microbatch, on the rank that runs the code."""

    def __init__(self) -> None:
        self._num_compared = 0
        self._needs_all = False  # some numbers are no means: the batch's own are needed every time
        self.begin()

    def begin(self) -> None:
        """A batch begins."""
        self._pieces: list[Any] = []
        self._outputs: list[Any] = []
        self._numbers: list[Mapping[str, Tensor]] = []

    def is_due(self, returned: Sequence[Any]) -> bool:
        """Whether this batch is to be rehearsed. `returned`: what the model has returned to one microbatch's code."""
        microbatches = int(smp.state.cfg.microbatches)
        if microbatches == 1 or len(returned) != 1:
            return False
        size = sum(each.numel() for each in tree_leaves(returned[0]) if isinstance(each, Tensor)) * microbatches
        return self._needs_all or self._num_compared < _FIRST or size <= _SMALL

    def add(self, piece: Any, output: Any, numbers: Mapping[str, Tensor], weight: float) -> bool:
        """After a microbatch of a batch that is due; whether it was the last. `weight`: of its means in the batch's."""
        self._pieces.append(piece)
        self._outputs.append(_weighed_numbers(output, weight))
        self._numbers.append({name: value.detach() for name, value in numbers.items()})
        return len(self._numbers) == int(smp.state.cfg.microbatches)

    def run(self, code: Callable[[Any, Any], Mapping[str, Tensor]], rules: Mapping[str, str]) -> Rehearsed | None:
        """The numbers of `code(batch, output)`; None if it cannot run so, draws random numbers, or gives others.

        `rules`: how numbers of microbatches are put together, `sum`, `max` or `min`, and `mean` where it does not say.
        """
        pieces, outputs, numbers = self._pieces, self._outputs, self._numbers
        self.begin()
        exact = _rehearsed(code, _joined_pieces(pieces), _joined_outputs(outputs, _num_rows(pieces[0])))
        if exact is None or exact.keys() != numbers[0].keys():
            return None
        self._num_compared += 1
        found = {
            name: put_together([each[name].double() for each in numbers], rules.get(name, "mean")) for name in exact
        }
        other = {
            name: (float(found[name]), float(value)) for name, value in exact.items() if is_other(found[name], value)
        }
        self._needs_all = self._needs_all or bool(other)
        return Rehearsed({name: value.detach() for name, value in exact.items()}, other)


@dataclass(frozen=True, slots=True)
class Rehearsed:
    """`exact`: the numbers of a whole batch; `other`: those that are not what the microbatches' give together, with both values."""

    exact: Mapping[str, Tensor]
    other: Mapping[str, tuple[float, float]]


def check_loss_is_mean(rehearsed: Rehearsed | None, name: str, where: str, remedy: str) -> None:
    """Raise StepError if the microbatches' losses would train another loss than the batch's."""
    if rehearsed is None or name not in rehearsed.other:
        return
    found, exact = rehearsed.other[name]
    raise StepError(
        f"{where}: expected a loss that is the mean of its microbatches' losses, found {exact:.6g} for the whole batch and a mean of "
        f"{found:.6g}; a sum, a mean with weights or over other numbers of elements, and a loss over pairs of rows are none: {remedy}"
    )


def _rehearsed(
    code: Callable[[Any, Any], Mapping[str, Tensor]], batch: Any, output: Any
) -> Mapping[str, Tensor] | None:
    """See `Rehearsal.run`."""
    before = capture_rng()
    try:
        with torch.no_grad():
            found = code(batch, output)
    except Exception:  # of a script, whose code may expect other shapes: there is nothing to compare then
        found = None
    drew = any(
        not torch.equal(one, other) for one, other in zip(_generators(before), _generators(capture_rng()), strict=True)
    )
    restore_rng(before)
    return None if drew else found


def _generators(state: Any) -> list[Tensor]:
    return [each for each in tree_leaves(state) if isinstance(each, Tensor)]


def put_together(values: Sequence[Tensor], rule: str) -> Tensor:
    """Numbers of microbatches as the batch's."""
    stacked = torch.stack(list(values))
    if rule == "sum":
        return stacked.sum()
    if rule in ("max", "min"):
        return stacked.amax() if rule == "max" else stacked.amin()
    return stacked.mean() if stacked.is_floating_point() else stacked.double().mean()


def is_small(outputs: Any) -> bool:
    """Whether outputs are so small that they are looked at in every batch."""
    return sum(each.numel() for each in tree_leaves(outputs) if isinstance(each, Tensor)) <= _SMALL


def is_other(found: Tensor, exact: Tensor) -> bool:
    """Whether numbers differ by more than sums in another order do."""
    near = (
        _HALF
        if exact.dtype in (torch.float16, torch.bfloat16) or torch.is_autocast_enabled(exact.device.type)
        else _FULL
    )
    return not torch.isclose(found, exact.double(), rtol=near, atol=near * 1e-2, equal_nan=True)


def _num_rows(piece: Any) -> int:
    return next((each.shape[0] for each in tree_leaves(piece) if isinstance(each, Tensor) and each.dim()), 0)


def _joined_pieces(pieces: Sequence[Any]) -> Any:
    """The batch that was cut into these."""
    return _joined_leaves(pieces, lambda values: torch.cat(values) if values[0].dim() else values[0])


def _joined_outputs(outputs: Sequence[Any], rows: int) -> Any:
    """Outputs of microbatches of so many rows as the batch's: rows one after another, and the mean of anything else."""

    def join(values: list[Tensor]) -> Tensor:
        if values[0].dim() and rows and values[0].shape[0] % rows == 0:
            return torch.cat(values)
        alike = values[0].is_floating_point() and len({value.shape for value in values}) == 1
        return torch.stack(values).mean(0) if alike else values[0]

    return _joined_leaves(outputs, join)


def _joined_leaves(values: Sequence[Any], join: Callable[[list[Tensor]], Tensor]) -> Any:
    flat = [tree_flatten(value)[0] for value in values]
    columns = [
        join([each.detach() for each in column]) if all(isinstance(each, Tensor) for each in column) else column[0]
        for column in zip(*flat, strict=True)
    ]
    return tree_unflatten(columns, tree_flatten(values[0])[1])


def _weighed_numbers(output: Any, weight: float) -> Any:
    """Numbers among the outputs, such as a loss of the model's own, as parts of the batch's mean."""
    if weight == 1.0:
        return output
    return tree_map(lambda each: each * weight if isinstance(each, Tensor) and not each.dim() else each, output)


# -- effects ----------------------------------------------------------------------------------------------------------------


def _runs_apart() -> bool:
    """Whether a step's code runs on some ranks alone, or once for each of several microbatches."""
    return bool(smp.pp_size() > 1 or smp.state.cfg.microbatches > 1)


def marks(owner: object, without: Iterable[str], depth: int = 3) -> dict[str, Any]:
    """Of the attributes of an object, but for those; two results are equal if none has changed in between, so deep inside.

    Nothing, where the code runs as in one process.
    """
    if not _runs_apart():
        return {}
    left_out = set(without)
    own = {**vars(owner), **(vars(owner).get("_modules") or {}), **(vars(owner).get("_buffers") or {})}
    return {name: _mark(value, depth) for name, value in own.items() if name not in left_out}


def changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """The attributes whose marks differ."""
    return sorted(name for name in {**before, **after} if before.get(name, before) != after.get(name, after))


def _mark(value: Any, depth: int) -> Any:
    if isinstance(value, Tensor):
        return id(value), value._version
    if value is None or isinstance(value, (int, float, str, bytes, complex)):
        return type(value), value if value == value else "nan"
    if isinstance(value, (list, tuple, dict, set, deque)):
        inner = list(value.values()) if isinstance(value, dict) else list(value)
        return (
            id(value),
            len(inner),
            tuple(_mark(each, depth - 1) for each in inner) if depth and len(inner) <= _LONG else (),
        )
    if not depth or not hasattr(value, "__dict__") or isinstance(value, type):
        return id(value)
    return id(value), tuple((name, _mark(each, depth - 1)) for name, each in vars(value).items())
