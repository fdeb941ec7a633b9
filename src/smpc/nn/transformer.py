"""Transformer layers split over tensor-parallel ranks, and a sequence of them.

    DistributedTransformerLayer    attention, cross-attention if there is one, output layer
    DistributedTransformer         entry, `num_layers` layers, exit; a pipeline may cut it between any two

Both take and return the tuple (hidden_states, attention_mask), or (hidden_states, cross_states, attention_mask, cross_mask) with
cross-attention, so that layers can stand in an nn.Sequential.

Source: "DistributedTransformerLayer" and "DistributedTransformer" in the public tensor-parallelism reference of SMP v1.
"""

from __future__ import annotations

from torch import Tensor, nn

from smpc.nn.attention import DistributedAttentionLayer, check_layer_norms, tuple_of
from smpc.nn.layer_norm import DistributedLayerNorm
from smpc.nn.output_layer import DistributedTransformerOutputLayer
from smpc.nn.parallel import DistributedModule, TensorParallel, current_parallel

States = tuple[Tensor | None, ...]
_NAMES = {
    False: ("hidden_states", "attention_mask"),
    True: ("hidden_states", "cross_states", "attention_mask", "cross_mask"),
}


class DistributedTransformerLayer(DistributedModule):
    """One transformer layer. Heads, hidden and intermediate size are global quantities.

    `causal_mask_size`: the longest sequence, for causal self-attention; None: attention is not causal. `pre_layernorm`, `post_layernorm`:
    layer normalization at the input, at the output, or both, of each of its parts. `activation`: "gelu" or "relu".
    `use_normal_initialization`: weights from a normal distribution of standard deviation `initializer_range` and zero biases, rather
    than torch.nn.Linear's. `is_inside` (not in the reference): states are as they are between distributed layers.
    """

    def __init__(
        self,
        num_attention_heads: int = 32,
        attention_head_size: int = 32,
        hidden_size: int = 1024,
        intermediate_size: int = 4096,
        attention_dropout_prob: float = 0.1,
        hidden_dropout_prob: float = 0.1,
        activation: str = "gelu",
        layernorm_epsilon: float = 1e-5,
        initializer_range: float = 0.02,
        use_normal_initialization: bool = False,
        causal_mask_size: int | None = None,
        add_cross_attention: bool = False,
        pre_layernorm: bool = False,
        post_layernorm: bool = True,
        *,
        is_inside: bool = False,
        parallel: TensorParallel | None = None,
    ) -> None:
        super().__init__(parallel or current_parallel())
        self.add_cross_attention, self.is_inside = add_cross_attention, is_inside

        def attention(crosses: bool) -> DistributedAttentionLayer:
            return DistributedAttentionLayer(
                num_attention_heads=num_attention_heads,
                attention_head_size=attention_head_size,
                hidden_size=hidden_size,
                attention_dropout_prob=attention_dropout_prob,
                hidden_dropout_prob=hidden_dropout_prob,
                layernorm_epsilon=layernorm_epsilon,
                initializer_range=initializer_range,
                use_normal_initialization=use_normal_initialization,
                cross_attention=crosses,
                causal_mask_size=None if crosses else causal_mask_size,
                pre_layernorm=pre_layernorm,
                post_layernorm=post_layernorm,
                is_inside=True,
                parallel=self.parallel,
            )

        self.attention = attention(False)
        self.cross_attention = attention(True) if add_cross_attention else None
        self.output = DistributedTransformerOutputLayer(
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            hidden_dropout_prob=hidden_dropout_prob,
            activation=activation,
            layernorm_epsilon=layernorm_epsilon,
            initializer_range=initializer_range,
            use_normal_initialization=use_normal_initialization,
            pre_layernorm=pre_layernorm,
            post_layernorm=post_layernorm,
            is_inside=True,
            parallel=self.parallel,
        )

    def forward(self, inputs: States) -> States:
        """The new hidden states, and the other inputs as they were."""
        given = tuple_of(self, inputs, _NAMES[self.add_cross_attention])
        states = given if self.is_inside else enter(self.parallel, given)
        hidden = self.attention((states[0], states[-2] if self.add_cross_attention else states[1]))
        if self.cross_attention is not None:
            hidden = self.cross_attention((hidden, states[1], states[3]))
        hidden = self.output(hidden)
        return (hidden if self.is_inside else self.parallel.leave(hidden), *given[1:])


class DistributedTransformer(DistributedModule):
    """`num_layers` transformer layers; with both layer normalizations also one at its input and one at its output."""

    is_container = True

    def __init__(
        self,
        num_layers: int = 12,
        num_attention_heads: int = 32,
        attention_head_size: int = 32,
        hidden_size: int = 1024,
        intermediate_size: int = 4096,
        attention_dropout_prob: float = 0.1,
        hidden_dropout_prob: float = 0.1,
        activation: str = "gelu",
        layernorm_epsilon: float = 1e-5,
        initializer_range: float = 0.02,
        use_normal_initialization: bool = False,
        causal_mask_size: int | None = None,
        add_cross_attention: bool = False,
        pre_layernorm: bool = False,
        post_layernorm: bool = True,
        *,
        is_inside: bool = False,
        parallel: TensorParallel | None = None,
    ) -> None:
        super().__init__(parallel or current_parallel())
        check_layer_norms("DistributedTransformer", pre_layernorm, post_layernorm)
        self.add_cross_attention, self.is_inside = add_cross_attention, is_inside
        has_both = pre_layernorm and post_layernorm

        def norm() -> DistributedLayerNorm | None:
            return DistributedLayerNorm(hidden_size, layernorm_epsilon, parallel=self.parallel) if has_both else None

        self.entry = Entry(parallel=self.parallel)
        self.input_layernorm = norm()
        self.seq_layers = nn.ModuleList(
            DistributedTransformerLayer(
                num_attention_heads=num_attention_heads,
                attention_head_size=attention_head_size,
                hidden_size=hidden_size,
                intermediate_size=intermediate_size,
                attention_dropout_prob=attention_dropout_prob,
                hidden_dropout_prob=hidden_dropout_prob,
                activation=activation,
                layernorm_epsilon=layernorm_epsilon,
                initializer_range=initializer_range,
                use_normal_initialization=use_normal_initialization,
                causal_mask_size=causal_mask_size,
                add_cross_attention=add_cross_attention,
                pre_layernorm=pre_layernorm,
                post_layernorm=post_layernorm,
                is_inside=True,
                parallel=self.parallel,
            )
            for _ in range(num_layers)
        )
        self.output_layernorm = norm()
        self.exit = Exit(parallel=self.parallel)

    def forward(self, inputs: States) -> States:
        """The last layer's hidden states, and the other inputs as they were."""
        given = tuple_of(self, inputs, _NAMES[self.add_cross_attention])
        states = given if self.is_inside else self.entry(given)
        if self.input_layernorm is not None:
            states = (self.input_layernorm(states[0]), *states[1:])
        for layer in self.seq_layers:
            states = layer(states)
        hidden = states[0]
        if self.output_layernorm is not None:
            hidden = self.output_layernorm(hidden)
        return (hidden if self.is_inside else self.exit(hidden), *given[1:])


class Entry(DistributedModule):
    """Brings the states that a transformer is given inside."""

    def forward(self, states: States) -> States:
        """Hidden and cross states as hidden states, masks whole."""
        return enter(self.parallel, states)


class Exit(DistributedModule):
    """Brings a hidden state outside."""

    def forward(self, hidden: Tensor) -> Tensor:
        """The hidden state of the samples that this rank was given."""
        return self.parallel.leave(hidden)


def enter(parallel: TensorParallel, states: States) -> States:
    """Of (hidden, mask) or (hidden, cross, mask, mask): the states inside, the masks of the scaled batch."""
    num_hidden = len(states) // 2
    hidden = tuple(None if state is None else parallel.enter(state) for state in states[:num_hidden])
    return (*hidden, *(None if mask is None else parallel.enter_whole(mask) for mask in states[num_hidden:]))
