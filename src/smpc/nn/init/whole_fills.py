"""torch.nn.init on parameters of which this rank has a part, or nothing: what one process would draw is drawn, and cut.

    model.head.reset_parameters()       between steps, on every rank; torch.nn.init.xavier_uniform_(model.head.weight), too

    this rank has                       then
    a slice of the parameter            the whole is filled, its sizes decide how widely, and the slice is taken of it
    all of it, as others of a group     it is filled, as by the first of them
    nothing of it                       the whole is filled and let go of, so that what comes next is drawn as in one process

By themselves, ranks would draw slices like whole parameters, as wide as the sizes of slices say, and in other orders than one process, and
no rank would say so. The ranks of a group must call it alike; they draw as their first rank does.

torch is changed when the first finder is noted, and stays so: other tensors are left to it. Also names that were imported earlier come to
this, by what torch's functions call, but for `kaiming_uniform_` and `kaiming_normal_`, which are refused then. What a script draws by other
ways (`weight.data.normal_()`) is drawn for what this rank has.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import init

from smpc.errors import UsageError

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


def fill_whole(find: Finder) -> Callable[[], None]:
    """Have parameters for which `find` gives a whole tensor filled as such; None: it knows nothing of them. Later finders come first.

    Returns what takes it back.
    """
    _patch_init()
    _finders.append(find)
    return functools.partial(_finders.remove, find)


def _found(tensor: Any) -> WholeTensor | None:
    if not isinstance(tensor, nn.Parameter) or tensor.is_meta or torch.compiler.is_compiling():
        return None
    return next(filter(None, (find(tensor) for find in reversed(_finders))), None)


@functools.cache
def _patch_init() -> None:
    makers: tuple[tuple[Any, str, Callable[[Any], Any]], ...] = (
        *((init, name, _filling) for name in _FILLS),
        (init, "_calculate_fan_in_and_fan_out", _of_whole),
        (init, "_calculate_correct_fan", _refusing),
        (nn.Embedding, "_fill_padding_idx_with_zero", _padding),
    )
    for owner, name, make in makers:
        setattr(owner, name, make(getattr(owner, name)))


def _filling(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(original)
    def fill(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        whole = _found(tensor)
        if whole is None:
            return original(tensor, *args, **kwargs)
        whole.begin()
        values = torch.empty(whole.shape, dtype=tensor.dtype, device=tensor.device)
        original(values, *args, **kwargs)
        _keep(tensor, whole, values)
        return tensor

    return fill


@torch.no_grad()
def _keep(tensor: Tensor, whole: WholeTensor, values: Tensor) -> None:
    if whole.cut is not None:
        tensor.copy_(whole.cut(values))


def _of_whole(original: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    @functools.wraps(original)
    def calculate(tensor: Tensor) -> Any:
        whole = _found(tensor)
        return original(tensor if whole is None else torch.empty(whole.shape, device="meta"))

    return calculate


def _refusing(original: Callable[..., int]) -> Callable[..., int]:
    @functools.wraps(original)
    def calculate(tensor: Tensor, *args: Any, **kwargs: Any) -> int:
        if _found(tensor) is not None:
            raise UsageError(
                "kaiming_uniform_ and kaiming_normal_: expected to be called as torch.nn.init has them now, found functions that were "
                f"imported before the model was divided, for a parameter of which this rank has {list(tensor.shape)}; call "
                "torch.nn.init.kaiming_uniform_ by its module's name"
            )
        return original(tensor, *args, **kwargs)

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
