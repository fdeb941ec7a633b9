"""Parameters that are in parts where code uses them without calling their block: `F.linear(x, model.blocks[0].up.weight)`.

Only while a block runs are its parameters whole. Elsewhere torch refuses them beside ordinary tensors, by an error that names neither. Here
they are gathered for the use, and their gradients averaged like others:

    forward     part --all-gather--> whole, for this operation
    backward    gradient --average over all ranks, of each its part--> .grad

    uses = OutsideUses(parameters, num_ranks, note, order)
    with uses.looking(): loss = model(batch)         every torch call is looked at

Looking costs time in every call, so it ends after a first step without such uses. Later ones are a StepError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint as torch_checkpoint
from torch.utils._pytree import tree_map_only

from smpc.errors import ConfigUnsupportedError, StepError
from smpc.sharding.backwards import is_in_backward
from smpc.sharding.dtensors import local
from smpc.sharding.same_blocks import CallEnd, SameBlocks, Use, no_part_in_what_was_made

_MIXED = "mixed torch.Tensor and DTensor"  # in torch's error
_SET_DATA = cast(Any, Tensor).data.__set__
_AS_THEY_ARE = ("__get__", "__set__", "__delete__")


class OutsideUses:
    """See above. `parameters`: by name. `num_ranks`: that all of them are on; `note`: called with each that gets a gradient so; `order`:
    learns of each before it is gathered, as all ranks must gather the same."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        num_ranks: int,
        note: Callable[[nn.Parameter], None],
        order: SameBlocks,
    ) -> None:
        self._parameters, self._num_ranks, self._note, self._order = parameters, num_ranks, note, order
        self.divisor = num_ranks  # of gradients
        self.is_found = False
        order.backwards.take_part_again = self._take_part_again
        self._known: set[tuple[bool, bool]] = set()

    def is_looking(self, *, trains: bool) -> bool:
        """Whether the next call of the model is looked at: there were uses, or none of this kind was. `trains`: in a training step."""
        return self.is_found or (trains, torch.is_grad_enabled()) not in self._known

    @contextmanager
    def looking(self, *, trains: bool) -> Iterator[None]:
        """Around a call of the model."""
        kind = trains, torch.is_grad_enabled()
        if not self.is_looking(trains=trains):
            try:
                yield
            except RuntimeError as error:
                if _MIXED not in str(error):
                    raise
                raise StepError(
                    "sharded parameters: expected parameters to be used by their blocks alone, as in the first step, found a use outside "
                    "of a block that does not run; use them so in the first step, too, or call the block"
                ) from error
            return
        with _Look(self), self._looking_again():
            yield
        self._known.add(kind)

    def take_part(self, use: Use) -> None:
        """On a rank without a batch: take part in a use of the others. Collective."""
        if not use.name:
            raise no_part_in_what_was_made()
        self.begin()
        part = cast(DTensor, self._parameters[use.name])
        with torch.no_grad():
            part.full_tensor()
        if use.is_kept:
            self._order.backwards.note_use([], partial(self._without_gradient, part))

    def end_following(self, end: CallEnd, *, trains: bool) -> None:
        """The same at the end of a call of the others. Collective."""
        if end.looks and self._order.any_rank(self.is_found):
            self.begin()
        self._known.add((trains, end.has_gradients))

    def whole(self, part: DTensor, func: Any) -> Tensor:
        """A whole tensor for an operation. Collective."""
        if part.device_mesh.size() != self._num_ranks:
            raise self.refusal(
                part, f"{_name_of(func)} uses it outside of its block, and only some ranks hold it; call its block"
            )
        self.begin()
        name = self._name(part)
        number = 2 * list(self._parameters).index(name) if name else None
        is_again, is_kept = is_in_backward(), part.requires_grad and torch.is_grad_enabled()
        if is_again:
            self._order.backwards.come_to_again(number)
        else:
            self._order.tell_use(Use(name, is_kept))
        if not is_kept:
            return part.full_tensor()
        come_to: list[Callable[[], None]] = []  # what it is called with is known by its gradient alone
        found: Tensor = _Gathered.apply(part, self.divisor, come_to)  # type: ignore[no-untyped-call]
        if is_again:
            come_to.append(partial(self._order.backwards.come_to_again, None if number is None else number + 1))
        else:
            come_to.append(self._order.note_use(found, partial(self._without_gradient, part)))
        return found

    def _take_part_again(self, number: int) -> None:
        """In a gather or a reduction of a use that another rank's backward computes again."""
        part = cast(DTensor, list(self._parameters.values())[number // 2])
        if number % 2:
            self._without_gradient(part)
        else:
            with torch.no_grad():
                part.full_tensor()

    @contextmanager
    def _looking_again(self) -> Iterator[None]:
        """What `torch.utils.checkpoint` computes again in a backward is looked at, too."""
        own = torch_checkpoint.CheckpointFunction, torch_checkpoint._checkpoint_without_reentrant_generator
        torch_checkpoint.CheckpointFunction = _Recomputing(self, own[0].apply)  # type: ignore[assignment,misc]
        torch_checkpoint._checkpoint_without_reentrant_generator = _Recomputing(self, own[1])  # type: ignore[assignment]
        try:
            yield
        finally:
            torch_checkpoint.CheckpointFunction, torch_checkpoint._checkpoint_without_reentrant_generator = own  # type: ignore[misc]

    @torch.no_grad()
    def write(self, part: DTensor, value: Tensor) -> None:
        """`part.data = value`, of which torch would keep nothing."""
        if not isinstance(value, DTensor) or value.placements != part.placements:
            raise self.refusal(
                part, f"expected data in parts, found {type(value).__name__}; write it in its block's forward"
            )
        self.begin()
        local(part).copy_(local(value))

    def begin(self) -> None:
        """There is a use, on some rank: the parameters take gradients of this way from now on, and every call is looked at."""
        if not self.is_found:
            self.is_found = True
            for parameter in self._parameters.values():
                if parameter.requires_grad:
                    parameter.register_hook(partial(self._settle, parameter))  # type: ignore[no-untyped-call]

    def _settle(self, parameter: nn.Parameter, grad: Tensor) -> Tensor:
        """A gradient of this way, in the parts that the parameter has."""
        self._note(parameter)
        placements = cast(DTensor, parameter).placements
        return cast(DTensor, grad).redistribute(placements=placements)

    def _without_gradient(self, part: DTensor) -> None:
        """Reduces a use's gradient where this rank's backward does not reach it: it adds zeros, and gets its part of the others' sum."""
        nothing = torch.zeros(part.shape, dtype=part.dtype, device=part.device)
        torch.autograd.backward([part], [_reduced(nothing, part)], retain_graph=True)

    def refusal(self, part: DTensor, why: str) -> ConfigUnsupportedError:
        """An error about a parameter, or what was made of parts of some."""
        return ConfigUnsupportedError(f"sharded parameters: {self._name(part) or 'parts of parameters'}: {why}")

    def _name(self, part: DTensor) -> str:
        """The name of a parameter; "" for what was made of some."""
        return next((name for name, own in self._parameters.items() if id(own) == id(part)), "")


class _Look(TorchFunctionMode):
    def __init__(self, uses: OutsideUses) -> None:
        super().__init__()
        self._uses = uses

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called by torch for every function."""
        kwargs = kwargs or {}
        given = [*_tensors((*args, *kwargs.values()))]
        parts = [tensor for tensor in given if isinstance(tensor, DTensor)]
        if parts and func == _SET_DATA and given[0] is parts[0]:
            return self._uses.write(parts[0], args[1])
        if not parts or len(parts) == len(given) or _name_of(func) in _AS_THEY_ARE:
            return func(*args, **kwargs)
        if _writes(func) and isinstance(given[0], DTensor):
            raise self._uses.refusal(
                given[0],
                f"expected its block to write into it, found {_name_of(func)} outside of it; do that in the block's forward",
            )
        args, kwargs = tree_map_only(DTensor, lambda part: self._uses.whole(part, func), (args, kwargs))
        return func(*args, **kwargs)


class _Recomputing:
    """In place of what `torch.utils.checkpoint` calls with a function."""

    def __init__(self, uses: OutsideUses, original: Callable[..., Any]) -> None:
        self._uses, self._original = uses, original

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The same, with the function looked at when it is called in a backward."""

        def looked_at(*inputs: Any, **options: Any) -> Any:
            with _Look(self._uses) if is_in_backward() else nullcontext():
                return function(*inputs, **options)

        return self._original(looked_at, *args, **kwargs)

    apply = __call__


class _Gathered(torch.autograd.Function):
    """A whole tensor. Ranks' gradients are added up, divided: by their number, that is the average of their losses'."""

    @staticmethod
    def forward(ctx: Any, part: DTensor, divisor: int, come_to: list[Callable[[], None]]) -> Tensor:
        """All of it."""
        ctx.part, ctx.divisor, ctx.come_to = part.detach(), divisor, come_to
        return part.full_tensor()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """This rank's part of the gradient."""
        for come_to in ctx.come_to:
            come_to()
        return _reduced(grads[0] / ctx.divisor, ctx.part), None, None


def _reduced(grad: Tensor, part: DTensor) -> DTensor:
    """The sum of all ranks' gradients, in parts. Collective."""
    mesh = part.device_mesh
    placements = [Replicate() if each.is_partial() else each for each in part.placements]
    summands = DTensor.from_local(grad, mesh, [Partial()] * mesh.ndim, run_check=False)
    return summands.redistribute(placements=placements)


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _name_of(func: Any) -> str:
    return str(getattr(func, "__name__", func))


def _writes(func: Any) -> bool:
    name = _name_of(func)
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")
