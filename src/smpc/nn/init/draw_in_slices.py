"""Running initializers on parameters of which a rank keeps slices, without ever having one whole.

    targets = {name: Target(name, parameter, shard, part)}     parameter: on the meta device, of the whole shape; part: its memory here
    with Drawing(targets, seed):
        module.reset_parameters()                              # fills the parts

An initializer sees parameters of the whole shape, and its in-place operations apply to the parts:

    random numbers      drawn for the whole, in blocks of about a million elements, of which the part is kept; seeded by the parameter's
                        name, so that the values depend neither on the degree nor on what else is drawn
    elementwise         on the part (fill, zero, scale, clamp, ...), also on rows and ranges of rows
    copies              of a value that the initializer made: the part of it

Parameters that a rank keeps whole have their memory already (`part` is the parameter, `shard` None); their random numbers are drawn by the
same blocks. Anything else that looks at values raises NotByBlocks: that initializer needs a whole tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
import torch.nn.init
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from smpc.executor.shared_draws import seed_of
from smpc.nn.init.nn_init_on_slices import filled_as_they_are
from smpc.nn.parallel import ParameterSlice, fill_slice, own_part_of

_ATEN = torch.ops.aten
_RANDOM = (_ATEN.normal_, _ATEN.uniform_, _ATEN.log_normal_, _ATEN.exponential_, _ATEN.cauchy_)
_FILLS = (_ATEN.fill_, _ATEN.zero_)
_TRUNCATED = "_no_grad_trunc_normal_"  # in torch.nn.init: tries again until all values fit, and skips the meta device


class NotByBlocks(Exception):
    """An initializer needs the whole tensor."""


@dataclass(frozen=True, slots=True)
class SlicedTarget:
    """A parameter that is drawn: as initializers see it, and the memory for this rank's part."""

    name: str
    parameter: nn.Parameter
    shard: ParameterSlice | None
    part: Tensor

    def rows(self, first: int, last: int) -> list[Tensor]:
        """The rows of the part within these rows of the whole, as views."""
        if self.shard is None or self.shard.dim != 0:
            return [self.part[first:last]]
        found = []
        for own, start, length in self.shard.runs_of(self.part.shape[0]):
            low, high = max(first, start), min(last, start + length)
            if low < high:
                found.append(self.part[own + low - start : own + high - start])
        return found


class SlicedDrawing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Does to the parts what is done to the parameters. `seed`: of all that is drawn here."""

    def __init__(self, targets: Iterable[SlicedTarget], seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._targets = {_storage(target.parameter): target for target in targets}
        self._seed = seed
        self._stack = ExitStack()

    def __enter__(self) -> SlicedDrawing:
        self._stack.enter_context(filled_as_they_are())
        truncated = vars(torch.nn.init).get(_TRUNCATED)
        if truncated is not None:
            self._stack.callback(setattr, torch.nn.init, _TRUNCATED, truncated)
            setattr(torch.nn.init, _TRUNCATED, self._by_blocks(truncated))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        super().__exit__(exc_type, exc_val, exc_tb)  # type: ignore[no-untyped-call]
        self._stack.close()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        found = self._found(args[0]) if args and isinstance(args[0], Tensor) else None
        if found is not None and func.overloadpacket in _RANDOM and _is_whole(args[0], found):
            self._draw(found, lambda block: func(block, *args[1:], **given))
            return args[0]
        if not any(t.part is not t.parameter for t in self._touched((args, given))):
            return func(*args, **given)
        if _is_view(func):
            return func(*args, **given)
        if found is None or self._touched((args[1:], given)):
            raise NotByBlocks(f"{func} on a whole tensor")
        if func.overloadpacket is _ATEN.copy_ and _is_whole(args[0], found):
            found.part.copy_(own_part_of(args[1].expand(found.parameter.shape), found.shard, found.part.shape))
        elif func.overloadpacket in _FILLS or _is_elementwise(func, args[1:]):
            for part in _selected_in_slice(args[0], found):
                func(part, *args[1:], **given)
        else:
            raise NotByBlocks(f"{func} on a whole tensor")
        return args[0]

    def _draw(self, target: SlicedTarget, fill: Callable[[Tensor], object]) -> None:
        torch.manual_seed(seed_of(self._seed, target.name))
        fill_slice(target.part.data, target.shard, fill)

    def _by_blocks(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """An initializer of independent elements, block by block."""

        def draw(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            target = self._found(tensor)
            if target is None or not _is_whole(tensor, target):
                return function(tensor, *args, **kwargs)
            with torch.no_grad():
                self._draw(target, lambda block: function(block, *args, **kwargs))
            return tensor

        return draw

    def _found(self, tensor: Tensor) -> SlicedTarget | None:
        return self._targets.get(_storage(tensor))

    def _touched(self, given: Any) -> list[SlicedTarget]:
        found = (self._found(leaf) for leaf in tree_leaves(given) if isinstance(leaf, Tensor))
        return [target for target in found if target is not None]


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _is_whole(tensor: Tensor, target: SlicedTarget) -> bool:
    whole = target.parameter
    return tensor.shape == whole.shape and tensor.stride() == whole.stride() and tensor.storage_offset() == 0


def _selected_in_slice(tensor: Tensor, target: SlicedTarget) -> list[Tensor]:
    """The region of the part that this view of the parameter covers: all, a row, or a range of rows."""
    whole = target.parameter
    if _is_whole(tensor, target):
        return [target.part]
    first, rest = divmod(int(tensor.storage_offset()), math.prod(whole.shape[1:]))
    if not rest and whole.is_contiguous() and tensor.is_contiguous():
        if tensor.shape == whole.shape[1:]:
            return target.rows(first, first + 1)
        if tensor.shape[1:] == whole.shape[1:]:
            return target.rows(first, first + tensor.shape[0])
    raise NotByBlocks(f"a view of shape {tuple(tensor.shape)} of {target.name}")


def _is_view(func: Any) -> bool:
    """Whether an operation returns a view of its argument, and changes nothing."""
    returned = func._schema.returns
    return bool(returned) and all(each.alias_info is not None and not each.alias_info.is_write for each in returned)


def _is_elementwise(func: Any, others: tuple[Any, ...]) -> bool:
    """Whether an operation changes its first argument element by element, and the others are numbers."""
    written = func._schema.arguments[0].alias_info
    if written is None or not written.is_write or torch.Tag.pointwise not in func.tags:
        return False
    return all(leaf.numel() == 1 for leaf in tree_leaves(others) if isinstance(leaf, Tensor))
