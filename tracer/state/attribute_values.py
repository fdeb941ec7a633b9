"""Tensors that modules hold as plain attributes: a recording finds them as they are, with their values, and leaves them so.

A program reads an attribute's values in every step, and writes none. So a module whose forward writes into one (`self.seen.add_(1)`, or by
a view of it, or `.numpy()`) is called whole. What the recording has written by then is taken back.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from smpc.tracer.state.fakes import FakeState


class AttributeValues:
    """Of one recording."""

    def __init__(self, state: FakeState) -> None:
        self._state = state
        self._found: dict[int, tuple[Tensor, Tensor, int]] = {}  # with its values, and its version then
        self._given: dict[int, Tensor] = {}  # of which Python has the memory
        self._names: dict[int, str] = {}  # by the storage of the fake that stands for it in operations
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
                self._fakes.append(fake)
                self._names[fake.untyped_storage()._cdata] = self._state.names[id(tensor)]
            with unset_fake_temporarily():
                self._found[id(tensor)] = tensor, tensor.detach().clone(), tensor._version

    def written(self, tensors: Iterable[Tensor]) -> str:
        """The attribute that one of these is, or is a view of; "" if there is none."""
        for tensor in tensors:
            if id(tensor) in self._found:
                return self._state.names[id(tensor)]
            if self._names and tensor.layout is torch.strided:
                name = self._names.get(tensor.untyped_storage()._cdata, "")
                if name:
                    return name
        return ""

    def give(self, tensor: Tensor) -> None:
        """Python gets the memory of this one."""
        self.note([tensor])
        if id(tensor) in self._found:
            self._given[id(tensor)] = tensor

    def written_by_python(self) -> str:
        """The attribute into whose memory Python has written; "" if there is none."""
        found = (self._state.names[key] for key, tensor in self._given.items() if self._differs(tensor))
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
