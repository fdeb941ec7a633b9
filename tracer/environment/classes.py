"""What code of the model sees as the class of a tensor: `type(x) is torch.Tensor` says of a fake what it says of a tensor.

Python's `type` is another object in the globals of the code that runs, for the time of the recording. Code of torch and of Python's
standard library finds the fakes' own class.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

_NAME, _CLASS = "type", "__class__"


class _SeenAsType(type):
    """Calls, `isinstance` and `issubclass` are those of `type`, but for the class of a fake."""

    originals: ClassVar[Mapping[int, torch.Tensor]] = {}

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs:
            return type(*args, **kwargs)
        return class_seen(args[0], cls.originals)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, type)

    def __subclasscheck__(cls, other: Any) -> bool:
        return issubclass(other, type)


def class_seen(value: Any, originals: Mapping[int, torch.Tensor]) -> type:
    """The class of a value; of a fake, that of what it stands for. `originals`: by the id of their fake."""
    if type(value) is not FakeTensor:
        return type(value)
    original = originals.get(id(value))
    if original is not None:
        return type(original)
    return nn.Parameter if vars(value).get("_is_param") else torch.Tensor


class TensorClasses:
    """For one recording. `originals`: parameters and buffers by the id of the fake that stands for each."""

    def __init__(self, originals: Mapping[int, torch.Tensor]) -> None:
        self._originals = originals
        self._type = _SeenAsType(_NAME, (type,), {"originals": originals})
        self._namespaces: list[dict[str, Any]] = []

    def is_shown(self, value: Any) -> bool:
        """Whether a value is what stands for Python's `type`."""
        return value is self._type

    def show_in(self, namespace: dict[str, Any]) -> None:
        """Code with these globals is about to ask for types."""
        if _NAME not in namespace:
            namespace[_NAME] = self._type
            self._namespaces.append(namespace)

    def end(self) -> None:
        """Code finds Python's `type` again."""
        while self._namespaces:
            del self._namespaces.pop()[_NAME]

    @contextmanager
    def active(self) -> Iterator[None]:
        """While the model runs, `x.__class__` says it, too."""
        originals = self._originals
        (table,) = gc.get_referents(vars(FakeTensor))  # an assignment would set the class of FakeTensor itself
        table[_CLASS] = property(lambda fake: class_seen(fake, originals))
        _forget_lookups(FakeTensor)
        try:
            yield
        finally:
            del table[_CLASS]
            _forget_lookups(FakeTensor)
            self.end()


def _forget_lookups(cls: type) -> None:
    """Python remembers what it has found in a class; who writes into the table of one tells it."""
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(cls))
