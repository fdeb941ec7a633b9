"""What ranks compare when a model runs, is updated or gathered: what their scripts have written into slices, and into what all have whole.

    rank 0                         rank 1
    p.mul_(0.9)                    p.mul_(0.9)             alike
    p.mul_(float(p.norm()))        ...                     other numbers: UsageError on all ranks, with the line
    if rank == 0: p.zero_()                                no such write on rank 1: UsageError, too
    p.add_(torch.randn(p.shape))   ...                     the same values for other rows: UsageError (`used`, beside)
    bias.mul_(p.norm())            ...                     a parameter that all have whole has become another one: UsageError

A number that has left its tensor (`float`, `math`, NumPy, a branch) is known to nobody. Values of one process are the same on all ranks,
so ranks that write by other ones write what one process does not. One small message each time, more only where something is amiss, or
where tensors that all have whole have been written.
"""

from __future__ import annotations

import sys
import weakref
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from smpc.errors import UsageError
from smpc.executor.collectives import TensorGroup, gathered
from smpc.nn.script_writes.data_aliases import data_version, watch_data
from smpc.nn.script_writes.used import Used
from smpc.sharding.tensors import digest

_MOST = 4096  # writes that are kept one by one
_NEAR = 1e-3
_OWN = ("torch", "smpc")


@dataclass(frozen=True, slots=True)
class Write:
    """A write of a script into a slice."""

    what: str
    where: str
    used: Used


@dataclass(frozen=True, slots=True)
class _Read:
    """A write whose tensors have been read. `alike`: a number. `apart`: one of each tensor whose rows differ."""

    what: str
    where: str
    alike: int
    apart: tuple[int, ...]


class _Place:
    """Where a module has a parameter or a buffer."""

    def __init__(self, name: str, module: nn.Module, own: str) -> None:
        self.name, self._module, self._own = name, weakref.ref(module), own

    @classmethod
    def of(cls, model: nn.Module, name: str) -> _Place:
        path, _, own = name.rpartition(".")
        return cls(name, model.get_submodule(path), own)

    def __call__(self) -> Tensor | None:
        module = self._module()
        if module is None:
            return None
        found = module._parameters.get(self._own)
        return module._buffers.get(self._own) if found is None else found


class Writes:
    """See above. `whole`: names of what all ranks of the group have whole, of parameters and buffers of `model`."""

    def __init__(self, model: nn.Module, group: TensorGroup, whole: Iterable[str]) -> None:
        self._group = group
        self._places = [_Place.of(model, name) for name in whole]
        self._writes: list[Write] = []
        self._versions: dict[str, tuple[int, ...]] = {}
        self.settle()
        for place in self._places:
            if isinstance(found := place(), nn.Parameter):
                watch_data(found)

    def note(self, name: str, function: str, used: Used) -> None:
        """This rank's script writes into the slice of a name."""
        if len(self._writes) < _MOST:
            self._writes.append(Write(f"{function} of {name!r}", _line(), used))
        else:
            last = self._writes[-1]
            self._writes[-1] = Write(last.what, last.where, last.used.and_also(used))

    def settle(self, *, buffers_alone: bool = False) -> None:
        """What has been written into whole tensors until now is not the script's."""
        for name, each in self._tensors().items():
            if name not in self._versions or not buffers_alone or not isinstance(each, nn.Parameter):
                self._versions[name] = _version(each)

    def compare(self) -> None:
        """UsageError on all ranks for what is above. Collective."""
        read, self._writes = _read(self._writes), []
        whole = self._tensors()
        changed = [name for name, each in whole.items() if self._versions.get(name, ()) not in ((), _version(each))]
        apart = [each for write in read for each in write.apart]
        own = [len(read), _number([each.alike for each in read]), len(apart), _number(changed), len(changed)]
        told = self._gathered(own)
        if len({tuple(each[:3]) for each in told}) > 1:
            raise self._other_writes(read, [each[0] for each in told])
        if apart:
            self._check_apart(read, self._gathered(apart))
        if any(each[4] for each in told):
            if len({each[3] for each in told}) > 1:
                marks = self._gathered([int(name in changed) for name in whole])
                changed = [name for name, *ranks in zip(whole, *marks, strict=True) if any(ranks)]
            self._check_whole({name: whole[name] for name in changed})
        self.settle()

    def _tensors(self) -> dict[str, Tensor]:
        found = {place.name: each for place in self._places if (each := place()) is not None}
        return {name: each for name, each in found.items() if each.numel() and not each.is_meta}

    def _gathered(self, values: list[int] | Tensor) -> list[list[Any]]:
        own = torch.as_tensor(values, device=self._device())
        found: list[list[Any]] = gathered(own[None], 0, self._group).tolist()
        return found

    def _device(self) -> torch.device:
        backend = None if self._group.process_group is None else self._group.process_group.name()
        return torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")

    def _other_writes(self, read: list[_Read], counts: list[int]) -> UsageError:
        most = max(counts)
        rows = self._gathered([*(each.alike for each in read), *[-1] * (most - len(read))])
        place = next((at for at, each in enumerate(zip(*rows, strict=True)) if len({*each}) > 1), 0)
        mine = f"{read[place].what} in {read[place].where}" if place < len(read) else "no write"
        return UsageError(
            "expected scripts to write the same into the slices that ranks have of parameters and gradients, as one process does it to the "
            f"whole, found other numbers, other tensors or another write on other ranks; here it is {mine}: what was computed of a slice "
            "alone (float(weight.norm()), a threshold, a branch by one) is another value on each rank, and so is what one rank draws; sum "
            "up what all ranks have with torch.distributed.all_reduce first, and write on every rank"
        )

    def _check_apart(self, read: list[_Read], told: list[list[int]]) -> None:
        own = [write for write in read for _ in write.apart]
        for place, (write, *values) in enumerate(zip(own, *told, strict=True)):
            if len({*values}) < len(values):
                raise UsageError(
                    f"{write.what} in {write.where}: expected a tensor that does the same to all rows, or has this rank's, other ones on "
                    f"each rank, found tensor {place} with different rows, the same on several ranks: one process has others for other "
                    "rows; draw like the parameter (torch.randn_like(weight), weight.normal_()), cut a whole tensor, or change the "
                    "whole parameter of model.state_dict(), and load it with model.load_state_dict"
                )

    def _check_whole(self, tensors: dict[str, Tensor]) -> None:
        """On a GPU ranks may differ in last bits, where gradients are summed up in any order."""
        own = [_local(each) for each in tensors.values()]
        if all(each.device.type == "cpu" for each in own):
            told = self._gathered(torch.stack([digest(each) for each in own]))
            are_other = [min(values) != max(values) for values in zip(*told, strict=True)]
        else:
            told = self._gathered(torch.stack([each.double().abs().sum().to(own[0].device) for each in own]))
            are_other = [max(values) - min(values) > _NEAR * max(values) for values in zip(*told, strict=True)]
        wrong = [name for name, is_other in zip(tensors, are_other, strict=True) if is_other]
        if wrong:
            raise UsageError(
                f"expected the same values of {', '.join(map(repr, wrong[:5]))}{' ...' if len(wrong) > 5 else ''} on all ranks that have "
                "slices of other parameters, as all of them have these whole, found other ones after what the script, or its optimizer, "
                "has written: it was computed of one rank's slices or drawn by one rank; sum it up with torch.distributed.all_reduce first"
            )


def _read(writes: list[Write]) -> list[_Read]:
    tensors = [each for write in writes for each in write.used.tensors]
    rows = iter(torch.stack([each.to(tensors[0].device) for each in tensors]).tolist() if tensors else ())
    found = []
    for write in writes:
        own = [next(rows) for _ in write.used.tensors]
        alike = [first if same else 0 for same, first, _ in own]
        apart = tuple(whole for same, _, whole in own if not same)
        found.append(_Read(write.what, write.where, _number([write.what, write.used.numbers, *alike]), apart))
    return found


def _local(tensor: Tensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).detach()


def _version(tensor: Tensor) -> tuple[int, ...]:
    written = data_version(tensor) if isinstance(tensor, nn.Parameter) else -1
    return id(tensor), tensor._version, _local(tensor).data_ptr(), written


def _number(values: list[str] | list[int] | list[str | int]) -> int:
    return zlib.crc32(repr(values).encode())


def _line() -> str:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _OWN:
        frame = frame.f_back
    return "the script" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
