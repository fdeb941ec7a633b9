"""Transformer layers split over tensor-parallel ranks, and a sequence of them.

    DistributedTransformerLayer    attention, cross-attention if there is one, output layer
    DistributedTransformer         entry, `num_layers` layers, exit; a pipeline may cut it between any two

Both take and return the tuple (hidden_states, attention_mask), or (hidden_states, cross_states, attention_mask, cross_mask) with
cross-attention, so that layers can be in an nn.Sequential.

Source: "DistributedTransformerLayer" and "DistributedTransformer" in the public tensor-parallelism reference of SMP v1.

Inputs that all layers of a chain share (masks, cross states, rotary angles), converted to the inner layout once and passed on with the
hidden state.

    shared = SharedInputs.of(hidden)                   # what the layer before has brought inside, if it was one of this chain
    mask = shared.inside(mask, parallel.enter_whole)   # its result for this very tensor, or a new one
    shared.pass_on(output)                             # to the layer that is given `output`

It lives as long as the hidden states of one forward pass. If the next layer does not get the same tensor object, as at the start of
another pipeline stage, it starts anew; all ranks of a group do the same, since they run the same program.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from smpc.nn.attention.attention import DistributedAttentionLayer, check_layer_norms, tuple_of
from smpc.nn.attention.scores import angles
from smpc.nn.attention.variant import AttentionCall, Variant, returned
from smpc.nn.layers.norms import DistributedLayerNorm
from smpc.nn.parallel import DistributedModule, TensorParallel, current_parallel
from smpc.nn.transformer.output_layer import DistributedTransformerOutputLayer

_ATTRIBUTE = "_smpc_shared_inputs"


class SharedInputs:
    """Tensors outside and inside."""

    def __init__(self) -> None:
        self._found: list[tuple[Tensor, Tensor]] = []

    @classmethod
    def of(cls, hidden: Tensor) -> SharedInputs:
        """The shared inputs of a hidden state."""
        found = vars(hidden).get(_ATTRIBUTE)
        return found if isinstance(found, cls) else cls()

    def inside(self, tensor: Tensor, bring: Callable[[Tensor], Tensor]) -> Tensor:
        """The tensor in the inner layout; `bring` converts it. A tensor converted without a gradient is not used if one is needed."""
        needs_grad = tensor.requires_grad and torch.is_grad_enabled()
        for outside, found in self._found:
            if outside is tensor and found.requires_grad == needs_grad:
                return found
        brought = bring(tensor)
        self._found.append((tensor, brought))
        return brought

    def pass_on(self, hidden: Tensor) -> None:
        """Sends it on with a hidden state."""
        vars(hidden)[_ATTRIBUTE] = self


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
    than torch.nn.Linear's. Not in the reference: `is_inside`: states are as they are between distributed layers; `variant`: how it
    differs from the reference's layer.
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
        variant: Variant | None = None,
        parallel: TensorParallel | None = None,
    ) -> None:
        super().__init__(parallel or current_parallel())
        self.variant = variant or Variant()
        self.add_cross_attention = add_cross_attention
        self.takes_inside = self.returns_inside = is_inside  # a chain changes them: see smpc.nn.transformer.chains
        self.num_local_heads = num_attention_heads // self.parallel.group.size

        attention = partial(
            DistributedAttentionLayer,
            num_attention_heads=num_attention_heads,
            attention_head_size=attention_head_size,
            hidden_size=hidden_size,
            attention_dropout_prob=attention_dropout_prob,
            hidden_dropout_prob=hidden_dropout_prob,
            layernorm_epsilon=layernorm_epsilon,
            initializer_range=initializer_range,
            use_normal_initialization=use_normal_initialization,
            pre_layernorm=pre_layernorm,
            post_layernorm=post_layernorm,
            is_inside=True,
            variant=self.variant,
            parallel=self.parallel,
        )
        self.attention = attention(causal_mask_size=causal_mask_size)
        self.cross_attention = attention(cross_attention=True) if add_cross_attention else None
        self.output = DistributedTransformerOutputLayer(
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            hidden_dropout_prob=hidden_dropout_prob,
            activation=activation,
            layernorm_epsilon=layernorm_epsilon,
            initializer_range=initializer_range,
            use_normal_initialization=use_normal_initialization,
            pre_layernorm=pre_layernorm and self.variant.residual != "shared",
            post_layernorm=post_layernorm,
            is_inside=True,
            variant=self.variant,
            parallel=self.parallel,
        )

    def forward(self, inputs: States, call: AttentionCall | None = None) -> States:
        """The new hidden states, and the other inputs as they were.

        With a `call` (not in the reference) `inputs` are the hidden states alone, and what is returned are the new ones, the biases of
        the scores by position, of this rank's heads, or None, and what a causal layer returns of a cache, if the call says so.
        """
        if call is not None:
            return self._run(inputs, call)
        given = tuple_of(self, inputs, _NAMES[self.add_cross_attention])
        states = given if self.takes_inside else enter(self.parallel, given)
        hidden = self.attention((states[0], states[-2] if self.add_cross_attention else states[1]))
        if self.cross_attention is not None:
            hidden = self.cross_attention((hidden, states[1], states[3]))
        hidden = self.output(hidden)
        return (hidden if self.returns_inside else self.parallel.leave(hidden), *given[1:])

    def _run(self, inputs: States, call: AttentionCall) -> States:
        (hidden,) = tuple_of(self, inputs, ("hidden_states",))
        assert hidden is not None, "tuple_of has looked"
        shared = SharedInputs.of(hidden)
        call = self._inside(call, hidden.shape[0], shared)
        hidden = hidden if self.takes_inside else self.parallel.enter(hidden)
        if call.positions is not None:
            size, base, kind = self.variant.rotary_size, self.variant.rotary_base, self.variant.rotary
            call = replace(call, rotary=angles(call.positions, size, base, kind, hidden.dtype))
        bias = self._position_bias(hidden.shape[1], call)
        own = replace(call, cross=None, position_bias=bias)
        if self.variant.residual == "sequential":
            hidden = self._clamped(self.attention.attend(hidden, own))
            if self.cross_attention is not None and call.cross is not None:
                crossed = AttentionCall(call.cross_mask, call.cross, cache=call.cache)
                hidden = self._clamped(self.cross_attention.attend(hidden, crossed))
            hidden = self._clamped(self.output(hidden))
        else:
            normed = self.attention.normed(hidden)
            attended = self.attention.mix(normed, own)
            hidden = self.output.mix(self.output.normed(hidden, normed)) + attended + hidden
        cache = (returned(call.cache),) if call.returns_cache and self.variant.is_causal else ()
        if not self.returns_inside:
            return self.parallel.leave(hidden), bias, *cache
        shared.pass_on(hidden)
        return hidden, bias, *cache

    def _clamped(self, hidden: Tensor) -> Tensor:
        if not self.variant.clamps_half or hidden.dtype is not torch.float16:
            return hidden
        largest = torch.finfo(hidden.dtype).max
        limit = torch.where(hidden.isinf().any(), largest - 1000, largest).to(hidden.dtype)
        return hidden.clamp(-limit, limit)

    def _inside(self, call: AttentionCall, batch: int, shared: SharedInputs) -> AttentionCall:
        """The call with tensors of the scaled batch. `batch`: how many samples the hidden state has that this layer is given."""
        if self.takes_inside and not self.parallel.prescaled_batch:
            batch //= self.parallel.group.size

        def bring(tensor: Tensor) -> Tensor:
            return self.parallel.enter_batch(tensor, batch)

        def inside(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else shared.inside(tensor, bring)

        rotary = call.rotary
        return replace(
            call,
            mask=inside(call.mask),
            cross=None if call.cross is None else shared.inside(call.cross, self.parallel.enter),
            cross_mask=inside(call.cross_mask),
            rotary=None if rotary is None else (shared.inside(rotary[0], bring), shared.inside(rotary[1], bring)),
            positions=inside(call.positions),
        )

    def _position_bias(self, queries: int, call: AttentionCall) -> Tensor | None:
        """The biases of an earlier layer, or of this one if it computes them."""
        bias = call.position_bias
        if bias is not None and bias.shape[1] != self.num_local_heads:
            raise ValueError(
                f"{type(self).__name__}: expected position biases of this rank's {self.num_local_heads} heads, found {bias.shape[1]}; "
                "distribute all layers of a model that shares them, or none"
            )
        if bias is not None or self.attention.positions is None:
            return bias
        past = 0 if call.cache is None else int(call.cache.get_seq_length(self.variant.layer_index))
        found: Tensor = self.attention.positions(queries, past + queries, past)
        return found


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

        self.entry = TransformerEntry(parallel=self.parallel)
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


class TransformerEntry(DistributedModule):
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
    """From (hidden, mask) or (hidden, cross, mask, mask): states in the inner layout, masks of the scaled batch."""
    num_hidden = len(states) // 2
    assert states[0] is not None, "tuple_of has looked"
    batch = states[0].shape[0]
    hidden = tuple(None if state is None else parallel.enter(state) for state in states[:num_hidden])
    return (*hidden, *(None if mask is None else parallel.enter_batch(mask, batch) for mask in states[num_hidden:]))
