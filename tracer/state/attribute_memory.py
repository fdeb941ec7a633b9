"""What a module that is called whole does with the memory of its attributes: tensors that are no parameters and no buffers, numpy arrays.

    memory = AttributeMemory(module)
    ...                                 # it runs, for real
    memory.written()                    # paths of attributes that have other bytes, by whatever way (`.data`, `.numpy()`, ctypes)
    memory.at(tensor)                   # the path of one whose memory a tensor is in, `torch.from_numpy(self.table)` too

A pipeline goes on with the next microbatch before the backward of the first. So what autograd keeps of an attribute's memory must not be
written into: plain PyTorch would have used it before. `Keeping` finds attributes for which both happen, in one module or in two that share
the memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

_TABLES = ("_parameters", "_buffers", "_modules")


@dataclass(frozen=True, slots=True)
class Extent:
    """Addresses, from the first byte to the one after the last."""

    first: int
    end: int

    @classmethod
    def of(cls, value: Tensor | numpy.ndarray[Any, Any]) -> Extent:
        """Of a tensor, or an array."""
        if isinstance(value, Tensor):
            first, size = value.data_ptr(), value.element_size()
            steps = [step * size for step in value.stride()]
        else:
            first, size, steps = value.ctypes.data, value.itemsize, list(value.strides)
        spans = [(extent - 1) * step for extent, step in zip(value.shape, steps, strict=True)]
        return cls(first + sum(min(span, 0) for span in spans), first + sum(max(span, 0) for span in spans) + size)

    def overlaps(self, other: Extent) -> bool:
        """Whether they have a byte in common."""
        return self.first < other.end and other.first < self.end


def share_elements(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have an element in common: not two columns of a matrix, though each reaches over the other."""
    if not one.numel() or not other.numel() or one.layout is not torch.strided or other.layout is not torch.strided:
        return False
    extents = Extent.of(one), Extent.of(other)
    if one.device != other.device or not extents[0].overlaps(extents[1]):
        return False
    size, first = one.element_size(), min(each.first for each in extents)
    if other.element_size() != size:
        return True
    seen = torch.zeros((max(each.end for each in extents) - first) // size, dtype=torch.bool)
    views = [seen.as_strided(each.shape, each.stride(), (each.data_ptr() - first) // size) for each in (one, other)]
    views[0].fill_(True)
    return bool(views[1].any())


class AttributeMemory:
    """Of a module and the modules in it, as it is now. Attributes in lists, tuples and dicts count, too."""

    def __init__(self, module: nn.Module) -> None:
        self._values = dict(_values_in(module))
        self._before = {path: _copied(value) for path, value in self._values.items()}
        self.extents: Mapping[str, Extent] = {path: Extent.of(value) for path, value in self._values.items()}

    def written(self) -> list[str]:
        """The paths of attributes that have been written into."""
        return [path for path, value in self._values.items() if not _is_same(value, self._before[path])]

    def at(self, tensor: Tensor) -> str:
        """The path of an attribute of whose memory a real tensor has a part; "" if there is none."""
        if not self.extents or not _is_real(tensor):
            return ""
        own = Extent.of(tensor)
        return next((path for path, extent in self.extents.items() if extent.overlaps(own)), "")

    def restore(self) -> None:
        """Take back what has been written."""
        for path in self.written():
            value, before = self._values[path], self._before[path]
            if isinstance(value, Tensor):
                with (
                    torch.no_grad(),
                    _unsafe_preserve_version_counter(value),
                ):  # by which guards would take it for written
                    value.copy_(before)
            else:
                value[...] = before


class Keeping:
    """Attributes that autograd keeps, and attributes that are written into, of one recording."""

    def __init__(self) -> None:
        self._kept: list[tuple[Extent, str, str, str]] = []  # with a name, the node that needs it, and where that is
        self._written: list[tuple[Extent, str]] = []  # with where
        self._keeping: list[tuple[Extent, str]] = []  # for the node that is being recorded

    def keep(self, extent: Extent, name: str) -> None:
        """Autograd keeps memory of that attribute for the call that is being recorded."""
        self._keeping.append((extent, name))

    def node_added(self, node: str, where: str) -> None:
        """The call has been recorded."""
        self._kept += [(extent, name, node, where) for extent, name in self._keeping]
        self._keeping.clear()

    def write(self, extents: Iterable[Extent], where: str) -> None:
        """A call writes into these."""
        self._written += [(extent, where) for extent in extents]

    def overwritten(self, reached: Iterable[str]) -> Iterator[tuple[str, str, str]]:
        """Name, where it is read, where it is written, of what a backward of the nodes `reached` needs and forward writes into."""
        nodes, found = set(reached), set[str]()
        for extent, name, node, where in self._kept:
            written = next((at for other, at in self._written if other.overlaps(extent)), None)
            if written is not None and node in nodes and name not in found:
                found.add(name)
                yield name, where, written

    def __bool__(self) -> bool:
        return bool(self._kept and self._written)


def _values_in(module: nn.Module) -> Iterator[tuple[str, Any]]:
    seen = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    for prefix, inner in module.named_modules():
        for key, value in vars(inner).items():
            if key in _TABLES:
                continue
            is_list = isinstance(value, (list, tuple))
            items = enumerate(value) if is_list else value.items() if isinstance(value, dict) else ((None, value),)
            for item, each in items:
                if id(each) not in seen and (_is_real(each) or _is_array(each)):
                    seen.add(id(each))
                    path = f"{prefix}.{key}" if prefix else key
                    yield path if item is None else f"{path}[{item!r}]", each


def _is_real(value: Any) -> bool:
    """Whether it is a tensor with bytes of its own."""
    is_plain = isinstance(value, Tensor) and not isinstance(value, FakeTensor) and value.layout is torch.strided
    return is_plain and not (value.is_meta or value.is_inference()) and value.numel() > 0


def _is_array(value: Any) -> bool:
    return isinstance(value, numpy.ndarray) and not value.dtype.hasobject and value.size > 0


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value.copy()


def _is_same(value: Any, before: Any) -> bool:
    """By their bytes."""
    if isinstance(value, Tensor):
        pair = (each.detach().contiguous().reshape(-1).view(torch.uint8) for each in (value, before))
        return torch.equal(*pair)
    return bool(value.tobytes() == before.tobytes())
