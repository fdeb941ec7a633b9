"""What ranks compare when a model runs or is gathered: what their scripts have written into slices, and into what all have whole.

    rank 0                         rank 1
    p.mul_(0.9)                    p.mul_(0.9)             alike
    p.mul_(float(p.norm()))        ...                     other numbers: UsageError on all ranks, with the line
    if rank == 0: p.zero_()                                no such write on rank 1: UsageError, too
    p.add_(torch.randn(p.shape))   ...                     the same values for other rows: UsageError (`write_operands`)
    bias.mul_(float(p.norm()))     ...                     other numbers

Nothing is known of a number that has left its tensor (`float`, `math`, NumPy, a branch). Values of one process are the same on all ranks,
so ranks that write by different values write what one process does not. One message of two numbers each time, more only where something is
amiss. Numbers that differ in last bits are alike: ranks may have summed up in another order.

For what one rank has, such as a stage of a pipeline, the others tell which number they would have written. It counts where the holder's
number is for others' parameters as well:

    for g in gradients: g.mul_(0.1 / total)           total of a stage: other numbers for each gradient, UsageError
    for g in gradients: g.mul_(1 / float(g.norm()))   the holder's is its own: what others would have written says nothing
    if total > 1: ...                                 a stage has not come to the line, and others have, for its gradients too: UsageError
"""

from __future__ import annotations

import math
import re
import struct
import weakref
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from smpc.errors import UsageError
from smpc.executor.collectives import TensorGroup, gathered
from smpc.nn.script_writes.callers import line_of_script
from smpc.nn.script_writes.write_operands import ANY, Used

_MOST = 4096  # writes that are kept one by one
_NEAR = 1e-5  # of numbers, relative
_NEAR_SUMS = 1e-3  # of tensors: what ranks keep of many steps (moments of gradients) may be further apart
_of_modules: weakref.WeakKeyDictionary[nn.Module, list[Writes]] = weakref.WeakKeyDictionary()
_in_models: weakref.WeakKeyDictionary[nn.Module, list[tuple[TensorGroup, list[Writes]]]] = (
    weakref.WeakKeyDictionary()
)  # until there are others


@dataclass(frozen=True, slots=True)
class Write:
    """A write of a script into a slice, or into what all ranks have whole."""

    what: str
    where: str
    used: Used
    is_of_one: bool = False  # into what one rank has; another may not write it, as it has no gradient of it
    is_here: bool = True  # of such a one: whether this rank has it
    holders: tuple[int, ...] = ()  # the ranks of the group that have it, if they are known

    @property
    def line(self) -> str:
        """The line of the script, without the folder, which may differ between hosts."""
        return re.split(r"[/\\]", self.where)[-1]

    def key(self, place: int) -> int:
        """A number of the line, the parameter, and a place among its numbers."""
        return _number([self.what, self.line, place])


@dataclass(frozen=True, slots=True)
class _Operand:
    """A tensor that was used, see `used.described`."""

    are_equal: bool
    first: int
    whole: int
    sum: float
    num_elements: int


@dataclass(frozen=True, slots=True)
class _Read:
    """A write whose tensors have been read."""

    write: Write
    operands: tuple[_Operand, ...]

    @property
    def kind(self) -> int:
        """A number of what must be the same."""
        used = self.write.used
        return _number([self.write.what, used.kinds, len(used.numbers), len(self.operands)])

    @property
    def digest(self) -> int:
        """A number of all."""
        return _number([self.kind, repr(self.write.used.numbers), *(each.first for each in self.operands)])


@dataclass(frozen=True, slots=True)
class _OfOne:
    """A number for what one rank has. `key`: of its line and parameter. `is_for_all`: the line has it for some that this rank has, and for
    some that others have. `holder`: -1 where it is not known."""

    key: int
    line: int
    is_here: bool
    is_for_all: bool
    holder: int
    value: float


class Writes:
    """What this rank's script has written into parameters since the ranks of `group` compared. `model`: whose writes `compare_scripts`
    compares; with None, the owner calls `compare`. `holders`: by name, the ranks of the group that have what others have not."""

    def __init__(
        self, model: nn.Module | None, group: TensorGroup, holders: Mapping[str, tuple[int, ...]] | None = None
    ) -> None:
        self.group = group
        self.must_see = model is not None  # all writes, as others have slices of the same
        self._holders = {} if holders is None else holders  # which may grow
        self._writes: list[Write] = []
        self._of_one: list[Write] = []
        self.is_empty = True
        if model is not None:
            _of_modules.setdefault(model, []).append(self)
            _in_models.clear()

    @property
    def num_for_all(self) -> int:
        """How many into what one rank has are for all, see above."""
        return len(_for_all(self._of_one)) if self._of_one else 0

    def compare(self) -> None:
        """`compare_scripts` of these. Collective over the group."""
        _Comparison(self.group).check(_read(self.take()))

    def note(self, name: str, function: str, used: Used) -> None:
        """This rank's script writes into the parameter of a name."""
        self.is_empty = False
        if len(self._writes) < _MOST:
            self._writes.append(Write(f"{function} of {name!r}", line_of_script(), used))
        else:
            last = self._writes[-1]
            self._writes[-1] = Write(last.what, last.where, last.used.and_also(used))

    def note_of_one(self, name: str, function: str, numbers: tuple[float, ...], *, is_here: bool) -> None:
        """The same, into what one rank of the group has; the others say which numbers they would have written."""
        if numbers and len(self._of_one) < _MOST:
            self.is_empty = False
            holders = self._holders.get(name, ())
            what = f"{function} of {name!r}"
            self._of_one.append(Write(what, line_of_script(), Used(numbers=numbers), True, is_here, holders))

    def take(self) -> list[Write]:
        """What it has; nothing afterwards."""
        found, self._writes, self._of_one, self.is_empty = [*self._writes, *self._of_one], [], [], True
        return found


def compare_scripts(model: nn.Module) -> None:
    """UsageError on all ranks if their scripts have written what one process would not. Collective, where ranks have slices.

    Ranks come here after what each of them checks alone, and where what watches for failures sees them wait.
    """
    for group, writes in _writes_in(model):
        _Comparison(group).check(_read([one for each in writes for one in each.take()]))


def are_compared(model: nn.Module) -> bool:
    """Whether `compare_scripts` does anything: this rank has slices."""
    return len(_writes_in(model)) > 0


def _writes_in(model: nn.Module) -> Sequence[tuple[TensorGroup, Sequence[Writes]]]:
    """By group, the writes of the model and of the modules in it."""
    if model not in _in_models:
        found: dict[int, tuple[TensorGroup, list[Writes]]] = {}
        for module in model.modules():
            for each in _of_modules.get(module, ()):
                found.setdefault(id(each.group.process_group), (each.group, []))[1].append(each)
        _in_models[model] = list(found.values())
    return _in_models[model]


class _Comparison:
    """What the ranks of a group tell each other."""

    def __init__(self, group: TensorGroup) -> None:
        self._group = group

    def check(self, read: Sequence[_Read]) -> None:
        """UsageError on all ranks for what is above. Collective."""
        of_one = [each.write for each in read if each.write.is_of_one]
        read = [each for each in read if not each.write.is_of_one]
        are_apart = any(not operand.are_equal for each in read for operand in each.operands)
        digests = [
            _number([each.digest for each in read]),
            _number([(each.what, each.used.numbers) for each in _for_all(of_one)]),
        ]
        told = self._gathered([*digests, int(are_apart)])
        if len({each[1] for each in told}) > 1:
            self._check_of_one(of_one)
        if len({each[0] for each in told}) == 1 and not any(each[2] for each in told):
            return
        self._check_kinds(read)
        self._check_numbers(read)
        self._check_operands(read)

    def _check_kinds(self, read: Sequence[_Read]) -> None:
        most = max(count for (count,) in self._gathered([len(read)]))
        kinds = self._gathered([*(each.kind for each in read), *[-1] * (most - len(read))])
        for at, values in enumerate(zip(*kinds, strict=True)):
            if len({*values}) > 1:
                raise _other_writes(read[at].write if at < len(read) else None)

    def _check_numbers(self, read: Sequence[_Read]) -> None:
        told = self._gathered([value for each in read for value in each.write.used.numbers], torch.float64)
        of = [each.write for each in read for _ in each.write.used.numbers]
        for write, values in zip(of, zip(*told, strict=True), strict=True):
            if not _are_near(values, _NEAR):
                raise _other_writes(write)

    def _check_of_one(self, writes: Sequence[Write]) -> None:
        """Numbers of one line and parameter, as often as ranks have come to it."""
        numbers = [(each, at, value) for each in writes for at, value in enumerate(each.used.numbers)]
        for_all = _numbers_for_all(writes)
        own = [
            _OfOne(
                each.key(at),
                _number([each.line]),
                each.is_here,
                (each.where, value) in for_all,
                each.holders[0] if each.holders else -1,
                value,
            )
            for each, at, value in numbers
        ]
        found: dict[int, list[list[_OfOne]]] = {}
        told = self._told_of_one(own)
        for rank, of_rank in enumerate(told):
            for one in of_rank:
                found.setdefault(one.key, [[] for _ in told])[rank].append(one)
        wrong = next((key for key, by_rank in found.items() if _is_apart(by_rank)), None)
        wrong = _not_come_to(told) if wrong is None else wrong
        if wrong is not None:
            raise _other_writes(next((each for each, at, _ in numbers if each.key(at) == wrong), None))

    def _told_of_one(self, own: Sequence[_OfOne]) -> list[list[_OfOne]]:
        """By rank, what `own` is there. Collective."""
        most = max(count for (count,) in self._gathered([len(own)]))
        told = self._gathered(
            [number for one in own for number in (one.key, one.line, int(one.is_here), int(one.is_for_all), one.holder)]
            + [-1] * (5 * (most - len(own)))
        )
        values = self._gathered([*(one.value for one in own), *[ANY] * (most - len(own))], torch.float64)
        return [
            [
                _OfOne(key, line, bool(is_here), bool(is_for_all), holder, value)
                for (key, line, is_here, is_for_all, holder), value in zip(
                    zip(*[iter(of_rank)] * 5, strict=True), values[rank], strict=True
                )
                if key >= 0
            ]
            for rank, of_rank in enumerate(told)
        ]

    def _check_operands(self, read: Sequence[_Read]) -> None:
        own = [(each.write, one) for each in read for one in each.operands]
        told = self._gathered([value for _, one in own for value in (one.are_equal, one.first, one.whole)])
        sums = self._gathered([one.sum for _, one in own], torch.float64)
        for place, (write, operand) in enumerate(own):
            are_equal, first, whole = zip(*(rank[3 * place : 3 * place + 3] for rank in told), strict=True)
            if all(are_equal):
                near = _NEAR if operand.num_elements == 1 else _NEAR_SUMS
                if len({*first}) > 1 and not _are_near([rank[place] for rank in sums], near):
                    raise _other_writes(write)
                continue
            rows = [value for value, is_one in zip(whole, are_equal, strict=True) if not is_one]
            if len({*rows}) < len(rows):
                raise _same_rows(write)

    def _gathered(self, values: Sequence[float], dtype: torch.dtype = torch.int64) -> list[list[Any]]:
        backend = None if self._group.process_group is None else self._group.process_group.name()
        device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
        own = torch.tensor([values], dtype=dtype, device=device)
        found: list[list[Any]] = gathered(own, 0, self._group).tolist()
        return found


def _read(writes: Sequence[Write]) -> list[_Read]:
    tensors = [each for write in writes for each in write.used.tensors]
    rows = iter(torch.stack([each.to(tensors[0].device) for each in tensors]).tolist() if tensors else ())
    return [_Read(write, tuple(_operand(*next(rows)) for _ in write.used.tensors)) for write in writes]


def _operand(are_equal: int, first: int, whole: int, bits: int, num_elements: int) -> _Operand:
    return _Operand(bool(are_equal), first, whole, struct.unpack("d", struct.pack("q", bits))[0], num_elements)


def _numbers_for_all(writes: Sequence[Write]) -> set[tuple[str, float]]:
    """The numbers, with their lines, that a line has both for what this rank has and for what others have."""
    here, elsewhere = (
        {(each.where, value) for each in writes if each.is_here == is_here for value in each.used.numbers}
        for is_here in (True, False)
    )
    return here & elsewhere


def _for_all(writes: Sequence[Write]) -> list[Write]:
    """The writes with a number that `_numbers_for_all` finds."""
    for_all = _numbers_for_all(writes)
    return [each for each in writes if any((each.where, value) in for_all for value in each.used.numbers)]


def _is_apart(by_rank: Sequence[Sequence[_OfOne]]) -> bool:
    """Whether ranks have other numbers for one parameter in one line, as often as each has come to it."""
    for together in zip(*filter(None, by_rank), strict=False):
        numbers = [one.value for one in together if one.value != ANY] or [ANY]
        is_for_all = any(one.is_for_all for one in together if one.is_here)
        if is_for_all and not _are_near(numbers, _NEAR):
            return True
    return False


def _not_come_to(told: Sequence[Sequence[_OfOne]]) -> int | None:
    """The key of what a rank would have written for all, for a holder that has not come to that line."""
    come_to = [{one.line for one in of_rank if one.is_here} for of_rank in told]
    return next(
        (
            one.key
            for of_rank in told
            for one in of_rank
            if not one.is_here and one.is_for_all and one.holder >= 0 and one.line not in come_to[one.holder]
        ),
        None,
    )


def _are_near(values: Sequence[float], near: float) -> bool:
    first, *others = values
    return all(math.isclose(first, each, rel_tol=near) or (first != first and each != each) for each in others)


def _number(values: Sequence[Any]) -> int:
    return zlib.crc32(repr(values).encode())


def _other_writes(write: Write | None) -> UsageError:
    mine = "no write" if write is None else f"{write.what} in {write.where}"
    return UsageError(
        "expected scripts to write the same into parameters and gradients of which ranks have slices or stages, and into others of the "
        "same model, as one process does it to the whole, found other numbers, other tensors or another write on other ranks; here it is "
        f"{mine}: what was computed of a slice or a stage alone (float(weight.norm()), a threshold, a branch by one) is another value on "
        "each rank, and so is what one rank draws; sum up what all ranks have with torch.distributed.all_reduce first, and write on every "
        "rank"
    )


def _same_rows(write: Write) -> UsageError:
    return UsageError(
        f"{write.what} in {write.where}: expected a tensor that does the same to all rows, or has this rank's, other ones on each rank, "
        "found one with different rows, the same on several ranks: one process has others for other rows; draw like the parameter "
        "(torch.randn_like(weight), weight.normal_()), cut a whole tensor, or change the whole parameter of model.state_dict(), and load "
        "it with model.load_state_dict"
    )
