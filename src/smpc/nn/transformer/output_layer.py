"""The second half of a transformer layer, split over tensor-parallel ranks: `DistributedTransformerOutputLayer`.

    inside hidden state -> [norm] -> dense1 by columns -> activation -> dense2 by rows -> dropout -> + residual -> [norm]

Source: "DistributedTransformerOutputLayer" in the public tensor-parallelism reference of SMP v1.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from smpc.nn.attention.attention import check_layer_norms, hidden_dropout
from smpc.nn.attention.variant import Variant
from smpc.nn.layers.linear import ColumnLinear, RowLinear, column_products
from smpc.nn.layers.norms import make_norm
from smpc.nn.parallel import DistributedModule, TensorParallel, current_parallel

# The reference's activations, and others that act on each channel alone.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "relu": F.relu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "quick_gelu": lambda wide: wide * torch.sigmoid(1.702 * wide),
    "silu": F.silu,
    "tanh": torch.tanh,
}


class DistributedTransformerOutputLayer(DistributedModule):
    """hidden_size to intermediate_size and back, [N, S, H] in and out. Arguments as of DistributedTransformerLayer."""

    def __init__(
        self,
        hidden_size: int = 1024,
        intermediate_size: int = 4096,
        hidden_dropout_prob: float = 0.1,
        activation: str = "gelu",
        layernorm_epsilon: float = 1e-5,
        initializer_range: float = 0.02,
        use_normal_initialization: bool = False,
        pre_layernorm: bool = False,
        post_layernorm: bool = True,
        *,
        is_inside: bool = False,
        variant: Variant | None = None,
        parallel: TensorParallel | None = None,
    ) -> None:
        super().__init__(parallel or current_parallel())
        split = self.parallel
        self.variant = variant or Variant()
        if self.variant.residual != "shared":
            check_layer_norms("DistributedTransformerOutputLayer", pre_layernorm, post_layernorm)
        if activation not in ACTIVATIONS:
            raise ValueError(
                f"{type(self).__name__}: expected activation one of {', '.join(ACTIVATIONS)}, found {activation!r}"
            )
        sizes = {"intermediate_size": intermediate_size} | ({"hidden_size": hidden_size} if split.splits_hidden else {})
        split.check_divides(type(self).__name__, **sizes)
        self.activation, self.hidden_dropout_prob, self.is_inside = activation, hidden_dropout_prob, is_inside

        def columns() -> ColumnLinear:
            return ColumnLinear(
                hidden_size,
                intermediate_size,
                initializer_range=initializer_range,
                use_normal_initialization=use_normal_initialization,
                parallel=split,
                bias=self.variant.output_bias,
            )

        def norm(wanted: bool) -> DistributedModule | None:
            return make_norm(self.variant.norm, hidden_size, layernorm_epsilon, split) if wanted else None

        self.pre_layernorm = norm(pre_layernorm)
        self.dense1 = columns()
        self.gate = columns() if self.variant.is_gated else None
        self.dense2 = RowLinear(
            intermediate_size,
            hidden_size,
            initializer_range=initializer_range,
            use_normal_initialization=use_normal_initialization,
            parallel=split,
            bias=self.variant.output_bias,
        )
        self.layernorm = norm(post_layernorm)

    def forward(self, inputs: Tensor | tuple[Tensor, ...]) -> Tensor:
        """hidden_states [N, S, H], or a tuple that begins with them, to [N, S, H]."""
        hidden = inputs[0] if isinstance(inputs, tuple | list) else inputs
        if not self.is_inside:
            hidden = self.parallel.enter(hidden)
        output = hidden + self.mix(self.normed(hidden, hidden))
        if self.layernorm is not None:
            output = self.layernorm(output)
        return output if self.is_inside else self.parallel.leave(output)

    def normed(self, hidden: Tensor, otherwise: Tensor) -> Tensor:
        """Hidden states as this layer takes them; `otherwise` where it has no norm for them."""
        return otherwise if self.pre_layernorm is None else self.pre_layernorm(hidden)

    def mix(self, normed: Tensor) -> Tensor:
        """The layer's output, from the normalized hidden states in the inner layout; the caller adds it to the residual."""
        first, *gates = column_products(normed, self.dense1, *([] if self.gate is None else [self.gate]))
        wide = ACTIVATIONS[self.activation](first)
        for gate in gates:
            wide = wide * gate
        if self.variant.has_wide_dropout:
            wide = self._wide_dropout(wide)
        return hidden_dropout(self, self.dense2(wide), self.hidden_dropout_prob)

    def _wide_dropout(self, wide: Tensor) -> Tensor:
        if not self.training or not self.hidden_dropout_prob or is_fake(wide):
            return F.dropout(wide, self.hidden_dropout_prob, self.training)
        with self.parallel.streams.split(wide.device):
            return F.dropout(wide, self.hidden_dropout_prob, True)
