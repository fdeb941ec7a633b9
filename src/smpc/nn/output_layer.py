"""The second half of a transformer layer, split over tensor-parallel ranks: `DistributedTransformerOutputLayer`.

    inside hidden state -> [layer norm] -> dense1 by columns -> activation -> dense2 by rows -> dropout -> + residual -> [layer norm]

Source: "DistributedTransformerOutputLayer" in the public tensor-parallelism reference of SMP v1.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from smpc.nn.attention import check_layer_norms, hidden_dropout
from smpc.nn.layer_norm import DistributedLayerNorm
from smpc.nn.linear import ColumnLinear, RowLinear
from smpc.nn.parallel import DistributedModule, TensorParallel, current_parallel

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": F.gelu, "relu": F.relu}


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
        parallel: TensorParallel | None = None,
    ) -> None:
        super().__init__(parallel or current_parallel())
        split = self.parallel
        check_layer_norms("DistributedTransformerOutputLayer", pre_layernorm, post_layernorm)
        if activation not in ACTIVATIONS:
            raise ValueError(
                f"{type(self).__name__}: expected activation {' or '.join(ACTIVATIONS)}, found {activation!r}"
            )
        sizes = {"intermediate_size": intermediate_size} | ({"hidden_size": hidden_size} if split.splits_hidden else {})
        split.check_divides(type(self).__name__, **sizes)
        self.activation, self.hidden_dropout_prob, self.is_inside = activation, hidden_dropout_prob, is_inside
        self.pre_layernorm = (
            DistributedLayerNorm(hidden_size, layernorm_epsilon, parallel=split) if pre_layernorm else None
        )
        self.dense1 = ColumnLinear(
            hidden_size,
            intermediate_size,
            initializer_range=initializer_range,
            use_normal_initialization=use_normal_initialization,
            parallel=split,
        )
        self.dense2 = RowLinear(
            intermediate_size,
            hidden_size,
            initializer_range=initializer_range,
            use_normal_initialization=use_normal_initialization,
            parallel=split,
        )
        self.layernorm = (
            DistributedLayerNorm(hidden_size, layernorm_epsilon, parallel=split) if post_layernorm else None
        )

    def forward(self, inputs: Tensor | tuple[Tensor, ...]) -> Tensor:
        """hidden_states [N, S, H], or a tuple that begins with them, to [N, S, H]."""
        hidden = inputs[0] if isinstance(inputs, tuple | list) else inputs
        if not self.is_inside:
            hidden = self.parallel.enter(hidden)
        residual = hidden
        if self.pre_layernorm is not None:
            hidden = self.pre_layernorm(hidden)
        wide = ACTIVATIONS[self.activation](self.dense1(self.parallel.before_columns(hidden)))
        output = residual + hidden_dropout(self, self.dense2(wide), self.hidden_dropout_prob)
        if self.layernorm is not None:
            output = self.layernorm(output)
        return output if self.is_inside else self.parallel.leave(output)
