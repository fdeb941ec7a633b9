"""Which object a tensor is. A fake is another one than the parameter or buffer that it stands for.

    seen = {model.head.weight: 2}       held outside of modules, where no fake takes its place
    seen.get(self.weight, 1)            finds nothing while the model is recorded

Code of the model that looks a fake up, or compares what it is (`is`) while such tensors are within its reach, has its module called whole,
and so has code that gives parameters attributes. `id` is among what `smpc.tracer.environment.process.outside` notes.
"""

from __future__ import annotations

import builtins
import dis
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import CodeType
from typing import Any, Protocol

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from smpc.tracer.environment.reached import Called, is_trusted
from smpc.tracer.environment.state_changes import common_module
from smpc.tracer.recording.untraceable import UntraceableError
from smpc.tracer.state.fakes import FakeState

_CONSTANTS = ("LOAD_CONST", "LOAD_GLOBAL")  # `is None`, `is missing`


class Run(Protocol):
    """What Reads asks of a recording."""

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
    """Of the parameters and buffers of one recording. `lacks` is told of those that are asked for an attribute which they have not."""

    def __init__(self, state: FakeState, run: Run, lacks: Callable[[torch.Tensor], None]) -> None:
        self._state, self._run, self._lacks = state, run, lacks
        self._raw = ""  # one that is within reach of the code, beside the fake that stands for it

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
        """After the run. Raises the error of the module whose code tells a fake from what it stands for, or writes on it."""
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
