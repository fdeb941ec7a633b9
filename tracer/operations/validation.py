"""Checks of values that raise an error and have no other result, so that a program can make them where the values are.

    torch.distributions.Normal(mean, std)       raises ValueError for a standard deviation that is not positive
    torch._assert_async((x < 100).all(), ...)   raises RuntimeError
    F.gaussian_nll_loss(mean, target, var)      raises ValueError for a negative variance

torch.distributions asks `if not torch._is_all_true(valid)`. A recording has no values: it goes on as if all were valid, and notes a call of
`require`, which raises the error in the program otherwise. Nodes of checks count as writing into what they check: so they are never left
out.

A function of torch's that is written in Python is one node, whatever it asks. If all that it asks of values is whether to raise an error, a
recording runs it as if they were valid (`run_unchecked`); the program runs it with values, and it checks them.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

REQUIRE = f"{__name__}.require"
_CHECKED_IN = "torch.distributions.distribution"
_NUMBERS = frozenset({"item", "tolist", "float", "int", "complex", "len", "range"})
_VALUE_OF = torch.ops.aten._local_scalar_dense.default


def require(valid: torch.Tensor, message: str) -> None:
    """Raise ValueError with this message unless all of `valid` is true."""
    if not valid.all():
        raise ValueError(message)


def is_assertion(func: Callable[..., Any]) -> bool:
    """Whether a call checks its first argument and does nothing else."""
    return func is torch._assert_async


def refusal(func: Callable[..., Any], frame: FrameType) -> str:
    """What torch.distributions would say of invalid values, if that is what it asks for in this frame; else ""."""
    if getattr(func, "__name__", "") != "__bool__" or frame.f_globals.get("__name__") != _CHECKED_IN:
        return ""
    found = frame.f_locals
    what = f"parameter {found['param']}" if "param" in found else "the value"
    constraint = type(found.get("constraint", found.get("support"))).__name__.lstrip("_")
    return (
        f"expected {what} of the distribution {type(found['self']).__name__} to satisfy its constraint ({constraint}), found invalid "
        "values; validate_args=False turns this check off"
    )


def run_unchecked(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The result over fakes of a function that `has_checks`, as if none of them failed. Raises as torch does where it asks for more."""
    code = func.__code__
    with _Valid(_lines_of_checks(code), code), torch._C.DisableTorchFunction():
        return func(*args, **kwargs)


def has_checks(func: Callable[..., Any]) -> bool:
    """Whether this is a function of torch's whose Python raises errors on conditions."""
    is_of_torch = str(getattr(func, "__module__", "")).split(".")[0] == "torch"
    return is_of_torch and hasattr(func, "__code__") and bool(_lines_of_checks(func.__code__))


class _Valid(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers the questions for values that lines of a function ask. `lines`: the answers with which it goes on."""

    def __init__(self, lines: Mapping[int, bool], code: CodeType) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._lines, self._code = lines, code

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _VALUE_OF:
            answer = self._lines.get(next((frame.f_lineno for frame in _frames() if frame.f_code is self._code), 0))
            if answer is not None:
                return answer
        return func(*args, **(kwargs or {}))


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


@lru_cache(maxsize=64)
def _lines_of_checks(code: CodeType) -> dict[int, bool]:
    """By each line on which only a check is made, whether it asks for a true value: `if not x: raise`; else False: `if x: raise`."""
    try:
        lines, first = inspect.getsourcelines(code)
    except OSError:
        return {}
    found: dict[int, bool] = {}
    for node in ast.walk(ast.parse(textwrap.dedent("".join(lines)))):
        if isinstance(node, ast.If) and isinstance(node.body[0], ast.Raise) and _asks_for_truth(node.test):
            is_negated = isinstance(node.test, ast.UnaryOp) and isinstance(node.test.op, ast.Not)
            end = node.test.end_lineno or node.test.lineno
            found.update(dict.fromkeys(range(first + node.test.lineno - 1, first + end), is_negated))
    return found


def _asks_for_truth(test: ast.expr) -> bool:
    """Whether a condition can ask of values only whether one tensor is true: it takes no number out, and combines nothing in Python."""
    taken = {node.attr for node in ast.walk(test) if isinstance(node, ast.Attribute)}
    taken |= {node.id for node in ast.walk(test) if isinstance(node, ast.Name)}
    combined = any(isinstance(node, ast.BoolOp | ast.IfExp | ast.comprehension) for node in ast.walk(test))
    return not combined and taken.isdisjoint(_NUMBERS)
