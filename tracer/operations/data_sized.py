"""Tensors whose sizes depend on values, such as `losses[mask]`, `labels.masked_select(mask)` and `mask.nonzero()`.

A recording has no values, so it invents a size: the largest one, as if all of the mask were true. Whatever is called with such a tensor
runs at two sizes. What comes out alike at both does not depend on the size (a mean, a loss), and has a spec like all others. What does
not is data-sized in turn: its node has no spec, so it stays on the stage that makes it, and microbatches may differ in it.

Python that asks for such a size (`chosen.shape[0]`, `for row in chosen`) needs the true one. The recording then starts again, and the call
that made the tensor is a question about values (see `smpc.tracer.guards`), known by its key.

What depends on parameters is rather left to a module that is called whole (see `smpc.tracer.operations.opaque`), whose costs are
measured: of each expert of a mixture the largest size is all tokens. Only the model's own forward has such sizes, and modules that cannot
be called whole.

    key     where the size was made: the module's name, and how many the module had made before in this run; "encoder.layers.0#1"

Example: in `(prediction - target)[mask].pow(2).mean()` of shapes [4, 3], the values of the index and of `pow` are data-sized, that
of `mean` is a scalar.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from smpc.tracer.effects.torch_calls import tensors_in
from smpc.tracer.operations.measure import Meter
from smpc.tracer.structure import flatten

Call = Callable[..., Any]
_PLAIN = (bool, int, float, str, torch.Size)


class SizeAskedError(Exception):
    """Python needs sizes that depend on values: those made under these keys."""

    def __init__(self, keys: frozenset[str]) -> None:
        super().__init__(f"the size of what {', '.join(sorted(keys))} made is needed")
        self.keys = keys


class DataSized:
    """The data-sized tensors of one recording.

    `asked`: keys of the sizes that are questions. `everywhere`: whether there are such sizes in modules that might be called whole.
    """

    def __init__(self, asked: frozenset[str] = frozenset(), everywhere: bool = False) -> None:
        self.asked, self.everywhere = asked, everywhere
        self._made: Counter[str] = Counter()
        self._others: dict[int, torch.Tensor] = {}  # by id of a data-sized tensor: the same at another size
        self._keys: dict[int, frozenset[str]] = {}
        self._alive: list[torch.Tensor] = []

    def forget(self) -> None:
        """The recording is over."""
        self._others.clear()
        self._keys.clear()
        self._alive.clear()

    def again(self) -> DataSized:
        """For another run that asks for the same sizes."""
        return DataSized(self.asked, self.everywhere)

    def keys(self, tree: Any) -> frozenset[str]:
        """On which sizes the tensors in some arguments depend; none if none of them is data-sized."""
        found: frozenset[str] = frozenset()
        if self._keys:
            for tensor in tensors_in(tree):
                found |= self._keys.get(id(tensor), frozenset())
        return found

    def refuse(self, tree: Any) -> None:
        """For calls that must know the sizes of their arguments: SizeAskedError if one of them is data-sized."""
        keys = self.keys(tree)
        if keys:
            raise SizeAskedError(keys)

    def run(
        self, keys: frozenset[str], meter: Meter, func: Call, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """What a call with arguments of these keys returns. Raises SizeAskedError if it needs their sizes."""
        out = func(*args, **kwargs)
        cost = meter.flops, meter.random
        try:
            with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):  # nobody counts what it saves
                other = func(*self._other(args), **self._other(dict(kwargs)))
        except Exception as error:
            raise SizeAskedError(keys) from error
        meter.flops, meter.random = cost
        self._compare(out, other, keys)
        return out

    def next_key(self, place: str) -> str:
        """The key of a size that is made now, in the module of that name."""
        self._made[place] += 1
        return f"{place}#{self._made[place] - 1}"

    def make(self, key: str, func: Call, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """What a call returns whose result's size depends on values, at an invented size; None if that has to be asked for."""
        rule = _RULES.get(getattr(func, "__name__", ""))
        if rule is None or key in self.asked:
            return None
        try:
            out = rule(0, *args, **kwargs)
            other = rule(1, *self._other(args), **self._other(dict(kwargs)))
        except (IndexError, RuntimeError, TypeError, ValueError):
            return None
        self._compare(out, other, self.keys((args, kwargs)) | {key})
        return out

    def _other(self, tree: Any) -> Any:
        """Arguments with data-sized tensors at their other size."""
        if isinstance(tree, torch.Tensor):
            return self._others.get(id(tree), tree)
        if type(tree) in (tuple, list):
            return type(tree)(self._other(item) for item in tree)
        if isinstance(tree, dict):
            return {key: self._other(item) for key, item in tree.items()}
        if isinstance(tree, slice):
            return slice(*(self._other(item) for item in (tree.start, tree.stop, tree.step)))
        return tree

    def _compare(self, out: Any, other: Any, keys: frozenset[str]) -> None:
        """Takes note of what has come out at two sizes."""
        (leaves, structure), (others, its_structure) = flatten(out), flatten(other)
        if structure != its_structure:
            raise SizeAskedError(keys)
        for leaf, its_other in zip(leaves, others, strict=True):
            if isinstance(leaf, torch.Tensor):
                if leaf.layout is torch.strided and (leaf.shape, leaf.stride()) != (
                    its_other.shape,
                    its_other.stride(),
                ):
                    self._others[id(leaf)], self._keys[id(leaf)] = its_other, keys
                    self._alive.append(leaf)
            elif isinstance(leaf, _PLAIN) and leaf != its_other:
                raise SizeAskedError(keys)


def _indices(mask: torch.Tensor, more: int) -> torch.Tensor:
    """Positions along one dimension of a mask's elements, as if all were true (and `more`)."""
    return torch.empty(max(mask.numel(), 2) + more, dtype=torch.int64, device=mask.device)


def _nonzero(more: int, mask: torch.Tensor, *, as_tuple: bool = False) -> Any:
    rows = [_indices(mask, more) for _ in range(mask.dim())]
    return tuple(rows) if as_tuple else torch.stack(rows, 1)


def _where(more: int, mask: torch.Tensor) -> Any:
    return _nonzero(more, mask, as_tuple=True)


def _masked_select(more: int, source: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    source, mask = torch.broadcast_tensors(source, mask)  # type: ignore[no-untyped-call]
    return source.reshape(-1)[_indices(mask, more)]


def _getitem(more: int, source: torch.Tensor, index: Any) -> torch.Tensor:
    parts: list[Any] = []
    for part in index if isinstance(index, tuple) else (index,):
        is_mask = isinstance(part, torch.Tensor) and part.dtype in (torch.bool, torch.uint8)
        if is_mask and not part.dim():
            raise ValueError("a mask without dimensions adds one")
        parts += [_indices(part, more)] * part.dim() if is_mask else [part]
    return source[tuple(parts)]


_RULES: dict[str, Call] = {
    "nonzero": _nonzero,
    "argwhere": _nonzero,
    "nonzero_numpy": _where,
    "where": _where,
    "masked_select": _masked_select,
    "__getitem__": _getitem,
}
