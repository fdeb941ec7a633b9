"""The deferred part of a split backward: calls with parameters, which F records for W.

    Record      any call with a graph of its own: autograd's, on the parameters and detached arguments, where `grad` enters at `edge`
    Product     y = rows @ weight + bias, of F.linear and torch.addmm: no graph, but what the two gradients are computed from
    Alias       another leaf with the values of a parameter, which B gives a gradient of its own

B leaves each its `grad`, if one comes. `Pending` holds the records of one microbatch in the order of the calls, and accumulates the
gradients of parameters from the last call to the first, as an unsplit backward does: by `torch.autograd.backward` on the parameters, so
hooks run.

A Product is what a transformer consists of, so it does in few steps what autograd does: the same two kernels on operands of the same
layout, so the same bits.

    gradient of the weight      rows^T g, or (g^T rows)^T for a weight that is laid out by columns, as F.linear's transposed one is
    gradient of the bias        the sum of g over rows
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

_TOGETHER = 1 << 18  # elements of incoming gradients that W may hold at a time


class PendingRecord:
    """A call that autograd has recorded."""

    __slots__ = ("edge", "grad", "parameters")

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = parameters
        self.edge: GradientEdge | None = None
        self.grad: Tensor | None = None

    def root(self) -> GradientEdge:
        """Where `grad` enters."""
        assert self.edge is not None, "a gradient came to a call before it was made"
        return self.edge

    def compute(self) -> Sequence[Tensor | None]:
        """The gradients of the parameters."""
        return torch.autograd.grad((self.root(),), list(self.parameters), (self.grad,), allow_unused=True)


class PendingProduct:
    """A matrix product, with `weight` as the call has it: F.linear's is transposed first."""

    __slots__ = ("_is_linear", "_rows", "_version", "grad", "parameters")

    def __init__(self, rows: Tensor, parameters: Sequence[nn.Parameter], *, is_linear: bool) -> None:
        self.parameters = parameters  # the weight, and the bias if it is trained
        self.grad: Tensor | None = None
        self._rows = rows.detach()
        self._version = rows._version
        self._is_linear = is_linear

    def arrive(self, grads: tuple[Tensor, ...]) -> None:
        """In B: the gradient of the result."""
        (self.grad,) = grads

    def root(self) -> Tensor:
        """A node whose backward computes the gradients and gives them away, so that none is copied on its way into `.grad`."""
        result: Tensor = _ProductRoot.apply(self, *self.parameters)  # type: ignore[no-untyped-call]
        return result

    def compute(self) -> Sequence[Tensor]:
        """The gradients of the parameters."""
        assert self.grad is not None, "a product that was not differentiated"
        if self._rows._version != self._version:
            raise RuntimeError(
                "a variable that the gradient of a parameter needs has been changed in place: expected the argument of "
                f"{'linear' if self._is_linear else 'addmm'}, of shape {list(self._rows.shape)}, at version {self._version}, found "
                f"version {self._rows._version}; compute on a copy of it"
            )
        rows, grad = (x.reshape(-1, x.shape[-1]) if x.dim() > 2 else x for x in (self._rows, self.grad))
        weight = self.parameters[0]
        (num_rows, _), strides = weight.shape, weight.stride()
        if self._is_linear:
            num_rows, strides = weight.shape[1], strides[::-1]
        if strides[0] == 1 and strides[1] == num_rows:
            found = grad.t().mm(rows)
            found = found if self._is_linear else found.t()
        else:
            found = rows.t().mm(grad)
            found = found.t() if self._is_linear else found
        if len(self.parameters) == 1:
            return (found,)
        return found, grad.sum_to_size(self.parameters[1].shape)


class PendingAlias:
    """A parameter as an argument of any other call."""

    __slots__ = ("leaf", "parameters")

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameters = (parameter,)
        self.leaf = _other_leaf(parameter)

    @property
    def grad(self) -> Tensor | None:
        """The state after B."""
        return self.leaf.grad

    def root(self) -> Tensor:
        """The parameter."""
        return self.parameters[0]

    def compute(self) -> Sequence[Tensor | None]:
        """The gradient of the parameter."""
        return (self.leaf.grad,)


def _other_leaf(parameter: nn.Parameter) -> Tensor:
    """Another leaf with the values of a parameter."""
    if not torch._C._are_functorch_transforms_active():
        return parameter.detach().requires_grad_()
    with torch._C._DisableFuncTorch():  # in what torch.func transforms, `requires_grad_` is refused
        return Tensor._make_subclass(Tensor, parameter.detach(), True)


Entry: TypeAlias = PendingRecord | PendingProduct | PendingAlias


class Pending:
    """The deferred calls of a stage's F, in order.

    `token` represents the parameters in the stage's graph: it makes values computed from them require a gradient.
    """

    __slots__ = ("_entries", "add", "token")

    def __init__(self) -> None:
        self.token = torch.empty(0, requires_grad=True)
        self._entries: list[Entry] = []
        self.add = self._entries.append  # a call that is put off

    def __len__(self) -> int:
        return sum(entry.grad is not None for entry in self._entries)

    def clear(self) -> None:
        """Let go of everything."""
        self._entries.clear()

    def run(self) -> bool | None:
        """Add the gradients to the parameters'. Empty afterwards.

        Whether work was left, and not just gradients; None if there was nothing.
        """
        entries = [entry for entry in self._entries if entry.grad is not None]
        self._entries.clear()
        if not entries:
            return None
        has_work = any(not isinstance(entry, PendingAlias) for entry in entries)
        uses = [id(parameter) for entry in entries for parameter in entry.parameters]
        if len(set(uses)) == len(uses):
            while entries:  # what a group holds is free as soon as it has run
                _accumulate_pending_group(_next_group(entries))
        else:
            _accumulate_sums(entries)
        return has_work


def _next_group(entries: list[Entry]) -> list[Entry]:
    """The next entries, taken from the end: small ones together, since a call of autograd takes longer than a small product."""
    group, num_elements = [entries.pop()], 0
    while entries:
        num_elements += _num_elements(group[-1])
        if num_elements + _num_elements(entries[-1]) > _TOGETHER:
            break
        group.append(entries.pop())
    return group


def _num_elements(entry: Entry) -> int:
    return 0 if isinstance(entry, PendingAlias) or entry.grad is None else entry.grad.numel()


def _accumulate_pending_group(group: Sequence[Entry]) -> None:
    """Each gradient goes where it belongs as soon as it is computed: while it is in the cache."""
    roots = [entry.root() for entry in group]
    parameters = [parameter for entry in group for parameter in entry.parameters]
    torch.autograd.backward(roots, [entry.grad for entry in group], inputs=parameters)  # type: ignore[arg-type]


def _accumulate_sums(entries: list[Entry]) -> None:
    """For parameters with several uses: all gradients are summed first, and the sum is accumulated once."""
    sums: dict[nn.Parameter, Tensor] = {}
    while entries:
        entry = entries.pop()
        for parameter, part in zip(entry.parameters, entry.compute(), strict=True):
            if part is not None:
                sums[parameter] = part if parameter not in sums else sums[parameter] + part
    if sums:
        torch.autograd.backward(list(sums), list(sums.values()))


class _ProductRoot(torch.autograd.Function):
    """See `Product.root`."""

    @staticmethod
    def forward(ctx: Any, product: PendingProduct, *parameters: nn.Parameter) -> Tensor:
        ctx.product = product
        assert product.grad is not None, "a product that was not differentiated"
        return product.grad.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        product, ctx.product = ctx.product, None
        return None, *product.compute()


def as_product(
    func: Callable[..., Any], values: Sequence[Any], trained: Sequence[nn.Parameter], places: Sequence[int]
) -> PendingProduct | None:
    """A call with positional arguments `values` as a Product, if it is one. `places`: of arguments that require a gradient and are not
    parameters.

    Other arguments (vectors, complex numbers, autocasts, rows with gaps) are left to records.
    """
    is_linear = func is F.linear
    if is_linear:
        place, weight = 0, values[1]
    elif func is torch.addmm and len(values) == 3:
        place, weight = 1, values[2]
    else:
        return None
    rows = values[place]
    if places != [place] or type(rows) is not Tensor or type(weight) is not nn.Parameter or not weight.requires_grad:
        return None
    dims = rows.dim()
    is_plain = dims == 2 or (dims == 3 and rows.is_contiguous())
    if not is_plain or not rows.is_floating_point() or torch.is_autocast_enabled(rows.device.type):
        return None
    # The weight comes first.
    return PendingProduct(rows, trained if is_linear else trained[::-1], is_linear=is_linear)


def watch(product: PendingProduct, result: Tensor) -> None:
    """Have B tell the product the gradient of its result, after all hooks that change it."""
    # A view can be given another history, by what is done in place to it; its base cannot lose this one.
    made = result._base if result._is_view() else result
    assert made is not None, "a view has a base"
    assert made.grad_fn is not None, "a product that autograd has not recorded"
    made.grad_fn.register_prehook(product.arrive)
