"""Tensors that modules hold as plain attributes: a recording finds them as they are, with their values, and leaves them so.

A program reads an attribute's values in every step, and writes none. So a module whose forward writes into one (`self.seen.add_(1)`, or by
a view of it, or `.numpy()`) is called whole. What the recording has written by then is taken back.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from smpc.tracer.state.attribute_memory import Extent
from smpc.tracer.state.fakes import FakeState

_OTHERS = "a tensor that no module holds"
_NO_BUFFER = ", a tensor that is no buffer"


class AttributeValues:
    """The attribute values of one recording."""

    def __init__(self, state: FakeState) -> None:
        self._state = state
        self._found: dict[int, tuple[Tensor, Tensor, int]] = {}  # with its values, and its version then
        self._given: dict[int, Tensor] = {}  # of which Python has the memory
        self._names: dict[int, str] = {}  # by the storage of the fake that stands for it in operations
        self._texts: dict[int, str] = {}  # by the same, and by storages of other memory that was there before
        self._extents: dict[int, Extent] = {}  # by the same
        self._fakes: list[Tensor] = []  # kept, as others would get the address of a storage that is let go of

    def note(self, tensors: Iterable[Tensor]) -> None:
        """A call is about to use these."""
        for tensor in tensors:
            if not isinstance(tensor, FakeTensor) and id(tensor) in self._state.names and id(tensor) not in self._found:
                self._keep(tensor)

    def _keep(self, tensor: Tensor) -> None:
        if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_inference():
            return
        mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
        with torch._C.DisableTorchFunction(), torch.no_grad():
            if isinstance(mode, FakeTensorMode):
                fake = mode.from_tensor(tensor)
                self._note_memory(fake, f"{self._state.names[id(tensor)]}{_NO_BUFFER}")
                self._names[fake.untyped_storage()._cdata] = self._state.names[id(tensor)]
                self._extents[fake.untyped_storage()._cdata] = Extent.of(tensor)
            with unset_fake_temporarily():
                self._found[id(tensor)] = tensor, tensor.detach().clone(), tensor._version

    def written(self, tensors: Iterable[Tensor]) -> str:
        """For people, the attribute that one of these is, or is a view of, or other memory of before; "" if there is none."""
        for tensor in tensors:
            if id(tensor) in self._found:
                return f"{self._state.names[id(tensor)]}{_NO_BUFFER}"
            if self._texts and tensor.layout is torch.strided:
                text = self._texts.get(tensor.untyped_storage()._cdata, "")
                if text:
                    return text
        return ""

    def note_outside(self, tensors: Iterable[Tensor]) -> None:
        """A call uses these: aliases of real ones that no module holds are found by the memory of the fakes that stand for them."""
        mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
        for tensor in tensors:
            is_real = not isinstance(tensor, FakeTensor) and id(tensor) not in self._state.names
            if not (is_real and isinstance(mode, FakeTensorMode)) or is_functorch_wrapped_tensor(tensor):
                continue
            with torch._C.DisableTorchFunction(), torch.no_grad():
                if tensor.layout is torch.strided and not tensor.is_meta and tensor.is_leaf:
                    self._note_memory(mode.from_tensor(tensor), _OTHERS)

    def _note_memory(self, fake: Tensor, text: str) -> None:
        self._fakes.append(fake)
        self._texts[fake.untyped_storage()._cdata] = text

    def extent(self, tensor: Tensor) -> tuple[Extent, str] | None:
        """The memory and the name of the attribute that a tensor is, or that a fake stands for; of other real ones the memory, too."""
        with torch._C.DisableTorchFunction():
            if is_functorch_wrapped_tensor(tensor) or tensor.layout is not torch.strided:
                return None
            if tensor.is_meta or not tensor.numel():
                return None
            if not isinstance(tensor, FakeTensor):
                return Extent.of(tensor), self._state.names.get(id(tensor), _OTHERS)
            storage = tensor.untyped_storage()._cdata
            return (self._extents[storage], self._names[storage]) if storage in self._extents else None

    def give(self, tensor: Tensor) -> None:
        """Python gets the memory of this one."""
        self.note([tensor])
        if id(tensor) in self._found:
            self._given[id(tensor)] = tensor

    def written_by_python(self) -> str:
        """The attribute into whose memory Python has written; "" if there is none."""
        found = (
            f"{self._state.names[key]}{_NO_BUFFER}" for key, tensor in self._given.items() if self._differs(tensor)
        )
        return next(found, "") if self._given else ""

    def _differs(self, tensor: Tensor) -> bool:
        with torch._C.DisableTorchFunction(), unset_fake_temporarily():
            now, before = (each.detach().reshape(-1).view(torch.uint8) for each in (tensor, self._found[id(tensor)][1]))
            return not torch.equal(now, before)

    def restore(self) -> None:
        """Take back what the recording has written."""
        with torch._C.DisableTorchFunction(), torch.no_grad(), unset_fake_temporarily():
            for key, (tensor, values, version) in self._found.items():
                if tensor._version != version or (key in self._given and self._differs(tensor)):
                    with _unsafe_preserve_version_counter(tensor):  # by which guards would take it for written
                        tensor.copy_(values)
