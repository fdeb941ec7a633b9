"""Makes fakes look like the tensors that they stand for: the same object identity, and the same class, for the model's code.

`Identity`: which object a tensor is. A fake is another object than the parameter or buffer that it stands for.

    seen = {model.head.weight: 2}       held outside of modules, where no fake takes its place
    seen.get(self.weight, 1)            finds nothing while the model is recorded

Code of the model that looks a fake up, or compares what it is (`is`) while such tensors are within its reach, has its module called
whole, and so has code that gives parameters attributes. `id` is among what `smpc.tracer.environment.outside_reads` notes.

`TensorClasses`: which class it is of. `type(x) is torch.Tensor` says of a fake what it says of a tensor. Python's `type` is another
object in the globals of the code that runs, for the time of the recording. Code of torch and of Python's standard library finds the
fakes' own class.
"""

from __future__ import annotations

import builtins
import ctypes
import dis
import functools
import gc
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import CodeType
from typing import Any, ClassVar, Protocol

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from smpc.tracer.environment.reachable_values import Called, is_trusted
from smpc.tracer.environment.state_changes import common_module
from smpc.tracer.recording.untraceable import UntraceableError
from smpc.tracer.state.fakes import FakeState

_CONSTANTS = ("LOAD_CONST", "LOAD_GLOBAL")  # `is None`, `is missing`


class Run(Protocol):
    """The recording's interface for Reads."""

    @property
    def is_unseen(self) -> bool:
        """Whether what happens is part of one call that runs again as it is."""

    def context(self) -> str:
        """The FQN of the module whose code runs."""

    def error(self, what: str) -> UntraceableError:
        """An error of the module whose code runs."""

    def error_in(self, fqn: str, what: str) -> UntraceableError:
        """An error of that module."""


class Identity:
    """The identities of one recording's parameters and buffers. `lacks` is called when one lacks an attribute that is read."""

    def __init__(self, state: FakeState, run: Run, lacks: Callable[[torch.Tensor], None]) -> None:
        self._state, self._run, self._lacks = state, run, lacks
        self._raw = ""  # an original that the code can reach, beside its fake

    def reached(self, tensor: torch.Tensor) -> None:
        """Code can get hold of a parameter or buffer, or of its fake, otherwise than through its module."""
        if not isinstance(tensor, FakeTensor):
            self._raw = self._raw or self._state.names[id(tensor)]

    @contextmanager
    def watched(self) -> Iterator[None]:
        """While the model runs."""

        def hashed(fake: FakeTensor) -> int:
            if id(fake) in self._state.originals and not self._run.is_unseen:
                module = str(sys._getframe(1).f_globals.get("__name__", ""))
                if not is_trusted(module):
                    raise self._run.error(f"forward looks {self._state.names[id(fake)]} up in a dict or a set")
            return builtins.id(fake)

        def lacking(fake: FakeTensor, name: str) -> Any:
            if vars(fake).get("_is_param") and name in vars(nn.Parameter):
                return vars(nn.Parameter)[name]
            if id(fake) in self._state.originals and not self._run.is_unseen:
                self._lacks(self._state.originals[id(fake)])
            raise AttributeError(f"{type(fake).__name__!r} object has no attribute {name!r}", name=name, obj=fake)

        FakeTensor.__hash__, FakeTensor.__getattr__ = hashed, lacking  # type: ignore[method-assign, assignment, attr-defined]
        try:
            yield
        finally:
            del FakeTensor.__hash__, FakeTensor.__getattr__  # type: ignore[attr-defined]

    def check(self, codes: Mapping[CodeType, Called]) -> None:
        """After the run. Raises the error of the module whose code tells a fake from its original, or writes on it."""
        for fake in self._state.fakes:
            attributes, of_original = vars(fake), vars(self._state.originals[id(fake)])
            for name in (name for name in attributes if attributes[name] is not of_original.get(name)):
                writers = {
                    context for code, called in codes.items() if name in code.co_names for context in called.contexts
                }
                if writers:
                    what = f"forward sets attribute {name!r} of {self._state.names[id(fake)]}"
                    raise self._run.error_in(common_module(writers), what)
        given = [name for name in vars(nn.Parameter) if not name.startswith("__")]
        for code, called in codes.items():
            read = [name for name in given if name in code.co_names]
            if read:
                what = f"forward reads {read[0]!r}, which a script has given nn.Parameter"
                raise self._run.error_in(common_module(called.contexts), what)
            if self._raw and compares_identity(code):
                what = f"forward asks which tensor is which, and finds {self._raw} outside of modules, too"
                raise self._run.error_in(common_module(called.contexts), what)


@functools.lru_cache(maxsize=4096)
def compares_identity(code: CodeType) -> bool:
    """Whether code asks if two objects are one, beside None and other constants."""
    before: Any = None
    for step in dis.get_instructions(code):
        if step.opname == "IS_OP" and before is not None and before.opname not in _CONSTANTS:
            return True
        before = step
    return False


_NAME, _CLASS = "type", "__class__"


class _SeenAsType(type):
    """Calls, `isinstance` and `issubclass` as in `type`, but right for the class of a fake."""

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
    """The class of a value; for a fake, the class of its original. `originals`: by the id of their fake."""
    if type(value) is not FakeTensor:
        return type(value)
    original = originals.get(id(value))
    if original is not None:
        return type(original)
    return nn.Parameter if vars(value).get("_is_param") else torch.Tensor


class TensorClasses:
    """For one recording. `originals`: parameters and buffers by the id of their fakes."""

    def __init__(self, originals: Mapping[int, torch.Tensor]) -> None:
        self._originals = originals
        self._type = _SeenAsType(_NAME, (type,), {"originals": originals})
        self._namespaces: list[dict[str, Any]] = []

    def is_shown(self, value: Any) -> bool:
        """Whether a value is the stand-in for Python's `type`."""
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
