"""Classes that parameters have between steps, so that what scripts do with them is noticed.

    between_steps(parameter, CountedParameter)      in place, from now on
    with plain_parameters(model): ...               what runs, records or updates the model: ordinary parameters

Recordings, torch.compile and optimizers see ordinary parameters, and steps take no longer. A class of several goes before its bases.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import nn


class NoticedParameter(nn.Parameter):
    """The base of such classes."""


_Classes = list[tuple[nn.Parameter, type[NoticedParameter]]]
_late: ContextVar[_Classes | None] = ContextVar("smpc_late_classes", default=None)


def between_steps(parameter: nn.Parameter, kind: type[NoticedParameter]) -> None:
    """Have a parameter be of a class outside of `plain_parameters`. One that others hold, or that is in parts, stays what it is."""
    late = _late.get()
    if late is not None:
        late.append((parameter, kind))
    elif type(parameter) is nn.Parameter or (
        isinstance(parameter, NoticedParameter) and issubclass(kind, type(parameter))
    ):
        parameter.__class__ = kind


@contextmanager
def plain_parameters(model: nn.Module) -> Iterator[None]:
    """In this context the model's parameters are ordinary ones. What is noticed in it begins after it."""
    if _late.get() is not None:
        yield
        return
    found: _Classes = [(each, type(each)) for each in model.parameters() if isinstance(each, NoticedParameter)]
    for each, _ in found:
        each.__class__ = nn.Parameter
    token = _late.set([])
    try:
        yield
    finally:
        found += _late.get() or []
        _late.reset(token)
        for parameter, kind in found:
            between_steps(parameter, kind)
