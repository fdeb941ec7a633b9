"""Torch calls on the recording's tensors in threads that forward hands work to.

What watches torch calls belongs to one thread: others run past the recorder. Fakes themselves are the same in all threads, and so is the
class that runs operations on them. A module whose code hands work over is called whole (`smpc.tracer.environment.process.outside`); here
is noticed what its threads use, write and draw, as a stage finds no other tensors than its arguments and its own.

Autograd's engine has threads of its own, which run no code of the model.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from smpc.tracer.effects.torch_calls import tensors_in

Note = Callable[[Any, tuple[Any, ...], Mapping[str, Any], Any], None]  # operation, arguments, keyword arguments, result


@contextmanager
def watching_others(mode: FakeTensorMode, note: Note) -> Iterator[None]:
    """In this context `note` is called after every operation on fakes of that mode that other threads run."""
    own, original = threading.get_ident(), FakeTensor.__dict__["__torch_dispatch__"]

    def dispatch(
        cls: type[FakeTensor],
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        out = original.__get__(None, cls)(func, types, args, kwargs)
        is_others = threading.get_ident() != own and sys._getframe().f_back is not None
        if is_others and any(tensor.fake_mode is mode for tensor in tensors_in((args, kwargs)) if type(tensor) is cls):
            note(func, args, kwargs, out)
        return out

    FakeTensor.__torch_dispatch__ = classmethod(dispatch)  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        FakeTensor.__torch_dispatch__ = original  # type: ignore[method-assign]


def written_by(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The arguments of an operation that it writes into, as its schema says."""
    parameters = func._schema.arguments
    values = [*zip(parameters, args, strict=False), *((p, kwargs[p.name]) for p in parameters if p.name in kwargs)]
    return [t for p, value in values if p.alias_info is not None and p.alias_info.is_write for t in tensors_in(value)]
