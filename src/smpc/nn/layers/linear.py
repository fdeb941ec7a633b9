"""Linear layers whose weight is split over tensor-parallel ranks.

    DistributedLinear    what nn.Linear is, outside: each rank holds [out, in / tp]
    ColumnLinear         inside, [.., in] to [.., out / tp]: each rank holds [out / tp, in]
    RowLinear            inside, [.., in / tp] to a hidden state: each rank holds [out, in / tp]

Source: "DistributedLinear" in the public tensor-parallelism reference of SMP v1; Shoeybi et al. 2019, arXiv 1909.08053.

`gathered_products` are products of a hidden state inside with weights that are split by output channels. What the ranks have gathered is
not kept.

    [tp * B, S, H / tp] --all-gather--> [tp * B, S, H] --weights--> [tp * B, S, out / tp] each
                                              |
                          given up after the products, gathered once more for the gradients of the weights

So a rank keeps its own slice alone of every hidden state for the backward pass (Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from smpc.executor.collectives import TensorGroup, all_reduce, all_to_all, gather_in, gathered, reduce_scatter, split
from smpc.nn.parallel import DistributedModule, TensorParallel, current_parallel, linear_fills

Linear = tuple[Tensor, Tensor | None]  # weight [out / tp, H] and bias [out / tp]


def gathered_products(hidden: Tensor, linears: Sequence[Linear], group: TensorGroup) -> tuple[Tensor, ...]:
    """The output of every linear layer for the hidden state that is sliced over ranks along its last dimension."""
    device = hidden.device.type
    flat = [tensor for linear in linears for tensor in linear]
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        hidden, flat = hidden.to(dtype), [None if tensor is None else tensor.to(dtype) for tensor in flat]
    with torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext():
        found: tuple[Tensor, ...] = _Products.apply(hidden, group, *flat)  # type: ignore[no-untyped-call]
    return found


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, group: TensorGroup, *flat: Tensor | None) -> tuple[Tensor, ...]:
        weights, biases = flat[::2], flat[1::2]
        ctx.save_for_backward(hidden, *weights)
        ctx.group = group
        ctx.set_materialize_grads(False)
        whole = gathered(hidden, -1, group)
        return tuple(F.linear(whole, weight, bias) for weight, bias in zip(weights, biases, strict=True))  # type: ignore[arg-type]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, *weights = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        into_hidden = None
        if wanted[0]:
            parts = [grad @ weight for grad, weight in zip(grads, weights, strict=True) if grad is not None]
            into_hidden = reduce_scatter(sum(parts[1:], parts[0]), -1, ctx.group)
        rows = gather_in(hidden, -1, ctx.group).flatten(0, -2) if any(wanted[2::2]) else None
        found: list[Tensor | None] = []
        for i, grad in enumerate(grads):
            flat = None if grad is None else grad.flatten(0, -2)
            found.append(flat.t() @ rows if flat is not None and rows is not None and wanted[2 + 2 * i] else None)
            found.append(flat.sum(0) if flat is not None and wanted[3 + 2 * i] else None)
        return into_hidden, None, *found


class DistributedLinear(DistributedModule):
    """nn.Linear with the weight split by input channels: [B, .., in_features] to [B, .., out_features].

    Without `prescaled_batch` every rank's own samples go in and come out: the ranks exchange slices of the input, and the summands of the
    output are summed to where the samples came from. With it all ranks have the same samples.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, *, parallel: TensorParallel | None = None
    ) -> None:
        super().__init__(parallel or current_parallel())
        self.parallel.check_divides("DistributedLinear", in_features=in_features)
        self.in_features, self.out_features = in_features, out_features
        fill_weight, fill_bias = linear_fills(in_features, 0.0, False)
        self.declare("weight", (out_features, in_features), fill_weight, 1)
        if bias:
            self.declare("bias", (out_features,), fill_bias)
            self.local_batch = ("bias",)
        self.reset_parameters()

    def forward(self, input: Tensor) -> Tensor:
        """Applies the layer. ValueError for another number of features, or samples that cannot be told apart."""
        self._check(input)
        group, weight = self.parallel.group, self.get_parameter("weight")
        if self.parallel.prescaled_batch or group.size == 1:
            output = all_reduce(F.linear(split(input, -1, group), weight), group)
        else:
            output = reduce_scatter(F.linear(all_to_all(input, -1, 0, group), weight), 0, group)
        return output + self.get_parameter("bias") if "bias" in self._parameters else output

    def extra_repr(self) -> str:
        """The global sizes."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={'bias' in self._parameters}, "
            f"ranks={self.parallel.group.size}"
        )

    def _check(self, input: Tensor) -> None:
        if input.dim() == 0 or input.shape[-1] != self.in_features:
            raise ValueError(
                f"DistributedLinear: expected an input of {self.in_features} features in its last dimension, found shape "
                f"{tuple(input.shape)}"
            )
        if input.dim() < 2 and self.parallel.group.size > 1 and not self.parallel.prescaled_batch:
            raise ValueError(
                f"DistributedLinear: expected a batch dimension before the features, found shape {tuple(input.shape)}; unsqueeze(0) it"
            )


class ColumnLinear(DistributedModule):
    """[.., in_features] to this rank's [.., out_features / tp]; takes what `TensorParallel.before_columns` returns.

    `column_products` takes several of them to the same hidden state inside, and keeps nothing whole for the backward pass.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        initializer_range: float,
        use_normal_initialization: bool,
        parallel: TensorParallel,
        bias: bool = True,
    ) -> None:
        super().__init__(parallel)
        weight, bias_fill = linear_fills(in_features, initializer_range, use_normal_initialization)
        self.declare("weight", (out_features, in_features), weight, 0)
        if bias:
            self.declare("bias", (out_features,), bias_fill, 0)
        self.reset_parameters()

    def forward(self, hidden: Tensor) -> Tensor:
        """Applies the layer."""
        return F.linear(hidden, self.get_parameter("weight"), self._parameters.get("bias"))


def column_products(hidden: Tensor, *linears: ColumnLinear) -> tuple[Tensor, ...]:
    """The outputs of several linear layers for one hidden state in the inner layout."""
    parallel = linears[0].parallel
    if parallel.splits_hidden and parallel.group.size > 1:
        own = [(linear.get_parameter("weight"), linear._parameters.get("bias")) for linear in linears]
        return gathered_products(hidden, own, parallel.group)
    whole = parallel.before_columns(hidden)
    return tuple(linear(whole) for linear in linears)


class RowLinear(DistributedModule):
    """This rank's [.., in_features / tp] to a hidden state of `out_features` inside."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        initializer_range: float,
        use_normal_initialization: bool,
        parallel: TensorParallel,
        bias: bool = True,
    ) -> None:
        super().__init__(parallel)
        weight, bias_fill = linear_fills(in_features, initializer_range, use_normal_initialization)
        self.declare("weight", (out_features, in_features), weight, 1)
        if bias:
            self.declare("bias", (out_features,), bias_fill, 0 if parallel.splits_hidden else None)
        self.reset_parameters()

    def forward(self, channels: Tensor) -> Tensor:
        """Applies the layer. The bias is added once, after the sum over ranks."""
        output = self.parallel.after_rows(F.linear(channels, self.get_parameter("weight")))
        return output + self.get_parameter("bias") if "bias" in self._parameters else output
