"""torch.nn.init on parameters of which this rank has a part, or nothing: what one process would draw is drawn, and cut.

    model.head.reset_parameters()       between steps, on every rank; torch.nn.init.xavier_uniform_(model.head.weight), too

    this rank has                       then
    a slice of the parameter            the whole is filled, its sizes decide how widely, and the slice is taken of it
    all of it, as others of a group     it is filled, as by the first of them
    nothing of it                       the whole is filled and let go of, so that what comes next is drawn as in one process

By themselves, ranks would draw slices like whole parameters, as wide as the sizes of slices say, and in other orders than one process, and
no rank would say so. The ranks of a group must call it alike; they draw as their first rank does. Numbers for rows of a slice
(`init.normal_(weight.data[:3])`) are a UsageError.

torch is changed when the first finder is noted, and stays so: other tensors are left to it. Its functions themselves are changed, so that
also names that were imported earlier come to this. Tensors' own methods that draw (`weight.data.normal_()`) are left alone, as recordings
and overrides know them by their identity; `smpc.nn.script_writes` has classes of tensors for it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import init

from smpc.nn.changed_functions import change_function
from smpc.nn.script_writes.slice_numbers import decided, known_number

_FILLS = (
    "uniform_", "normal_", "trunc_normal_", "xavier_uniform_", "xavier_normal_", "kaiming_uniform_", "kaiming_normal_",
    "orthogonal_", "sparse_", "eye_", "dirac_", "_no_grad_uniform_", "_no_grad_normal_", "_no_grad_trunc_normal_",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class WholeTensor:
    """A parameter as one process has it. `cut`: this rank's part of a whole tensor, None if it has nothing of it. `begin`: called before a
    fill, so that ranks draw alike."""

    shape: torch.Size
    cut: Callable[[Tensor], Tensor] | None
    begin: Callable[[], None] = lambda: None


Finder = Callable[[Tensor], WholeTensor | None]
_finders: list[Finder] = []
_is_off: ContextVar[bool] = ContextVar("smpc_fills_as_they_are", default=False)


def fill_whole(find: Finder, *, comes_last: bool = False) -> Callable[[], None]:
    """Have parameters for which `find` gives a whole tensor filled as such; None: it knows nothing of them. Later finders come first, but
    for one that `comes_last`.

    Returns what takes it back.
    """
    _patch_init()
    _finders.insert(0 if comes_last else len(_finders), find)
    return functools.partial(_finders.remove, find)


@contextmanager
def filled_as_they_are() -> Iterator[None]:
    """In this context, torch.nn.init fills what it is given: somebody else cuts what is drawn."""
    token = _is_off.set(True)
    try:
        yield
    finally:
        _is_off.reset(token)


def _found(tensor: Any) -> WholeTensor | None:
    if not isinstance(tensor, Tensor) or tensor.is_meta or torch.compiler.is_compiling() or _is_off.get():
        return None
    return next(filter(None, (find(tensor) for find in reversed(_finders))), None)


@functools.cache
def _patch_init() -> None:
    for name in _FILLS:
        change_function(vars(init)[name], _filling)
    change_function(init._calculate_fan_in_and_fan_out, _of_whole)
    change_function(init._calculate_correct_fan, _of_whole)
    change_function(nn.Embedding._fill_padding_idx_with_zero, _padding)


def _filling(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(original)
    def fill(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        is_filled = filled_as_whole(original, tensor, *args, **kwargs)
        return tensor if is_filled else original(tensor, *args, **kwargs)

    return fill


def filled_as_whole(
    original: Callable[..., Any], tensor: Tensor, *args: Any, known_as: Tensor | None = None, **kwargs: Any
) -> bool:
    """Have a function fill a parameter, or what is cut as `known_as`, as one process has it. False: nothing is known of it, and nothing
    was done."""
    whole = _found(tensor if known_as is None else known_as)
    if whole is None:
        return False
    for number in (*args, *kwargs.values()):
        if known_number(number) is not None:
            raise decided(original.__name__, known_number(number))
    whole.begin()
    values = torch.empty(whole.shape, dtype=tensor.dtype, device=tensor.device)
    original(values, *args, **kwargs)
    _keep(tensor, whole, values)
    return True


def whole_shape(tensor: Tensor) -> torch.Size | None:
    """The shape of the whole parameter; None: nothing is known of it."""
    whole = _found(tensor)
    return None if whole is None else whole.shape


def drawn_as_whole(original: Callable[..., Tensor], tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor | None:
    """What a function that draws like a tensor gives one process for the whole parameter, cut. None: nothing is known of it."""
    whole = _found(tensor)
    if whole is None or whole.cut is None:
        return None
    whole.begin()
    values = original(torch.empty(whole.shape, dtype=tensor.dtype, device=tensor.device), *args, **kwargs)
    return whole.cut(values).clone()


@torch.no_grad()
def _keep(tensor: Tensor, whole: WholeTensor, values: Tensor) -> None:
    if whole.cut is not None:
        tensor.copy_(whole.cut(values))


def _of_whole(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def calculate(tensor: Tensor, *args: Any) -> Any:
        whole = _found(tensor)
        return original(tensor if whole is None else torch.empty(whole.shape, device="meta"), *args)

    return calculate


def _padding(original: Callable[[nn.Embedding], None]) -> Callable[[nn.Embedding], None]:
    @functools.wraps(original)
    def fill(self: nn.Embedding) -> None:
        whole = None if self.padding_idx is None else _found(self.weight)
        if whole is None:
            return original(self)
        kept = torch.ones(whole.shape, dtype=self.weight.dtype, device=self.weight.device)
        kept[self.padding_idx] = 0
        if whole.cut is not None:
            with torch.no_grad():
                self.weight.masked_fill_(whole.cut(kept) == 0, 0)
        return None

    return fill
