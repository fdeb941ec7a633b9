"""A transformer language model split over tensor-parallel ranks: `DistributedTransformerLMHead`.

    ids -> word + position [+ token type] embeddings -> dropout -> DistributedTransformer -> head, tied to the word embeddings

Word embeddings and head are split over the vocabulary: logits stay slices [N, S, V / tp] as far as the loss, for which the ranks
exchange three numbers a token instead of V.

Source: "DistributedTransformerLMHead" in the public tensor-parallelism reference of SMP v1.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from smpc.executor.collectives import all_gather, all_to_all, split
from smpc.kernels.vocab_parallel_cross_entropy import vocab_parallel_cross_entropy
from smpc.nn.attention.attention import hidden_dropout, tuple_of
from smpc.nn.layers.embedding import ChannelEmbedding, VocabularyEmbedding
from smpc.nn.layers.linear import gathered_products
from smpc.nn.parallel import DistributedModule, TensorParallel, current_parallel
from smpc.nn.transformer.transformer import DistributedTransformer, Exit

IGNORED_LABEL = -100


class DistributedTransformerLMHead(DistributedModule):
    """Embeddings, transformer and one head. Arguments as of DistributedTransformerLayer, and

    `num_positions`: size of the position embedding. `num_token_types`: size of the token type embedding; 0: there is none.
    `add_lm_head`: whether there is a head, without bias, with the weight of the word embeddings.

    It returns the logits [N, S, V], without a head the hidden states [N, S, H], and with labels [N, S] the mean cross-entropy over this
    rank's samples. Labels of -100 do not count. A causal model's labels are its ids: it predicts each from those before.
    """

    is_container = True

    def __init__(
        self,
        num_layers: int = 12,
        num_attention_heads: int = 32,
        attention_head_size: int = 32,
        hidden_size: int = 1024,
        intermediate_size: int = 4096,
        vocab_size: int = 30522,
        num_positions: int = 1024,
        attention_dropout_prob: float = 0.1,
        hidden_dropout_prob: float = 0.1,
        activation: str = "gelu",
        layernorm_epsilon: float = 1e-5,
        num_token_types: int = 0,
        causal_mask_size: int | None = None,
        add_cross_attention: bool = False,
        add_lm_head: bool = True,
        initializer_range: float = 0.02,
        use_normal_initialization: bool = False,
        pre_layernorm: bool = False,
        post_layernorm: bool = True,
        *,
        parallel: TensorParallel | None = None,
    ) -> None:
        super().__init__(parallel or current_parallel())
        self.add_cross_attention, self.num_token_types = add_cross_attention, num_token_types
        self.embeddings = Embeddings(
            vocab_size,
            num_positions,
            num_token_types,
            hidden_size,
            hidden_dropout_prob,
            initializer_range,
            parallel=self.parallel,
        )
        self.transformer = DistributedTransformer(
            num_layers=num_layers,
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
        words = self.embeddings.word_embedding
        is_causal = causal_mask_size is not None
        self.lm_head = LMHead(words, is_causal=is_causal, parallel=self.parallel) if add_lm_head else None
        self.exit = Exit(parallel=self.parallel)

    def forward(self, inputs: tuple[Tensor | None, ...]) -> Tensor:
        """(input_ids, attention_mask, token_type_ids, position_ids[, cross_states, cross_mask], labels), each [N, S] or None.

        With cross-attention, the reference's tuple of eight, which names cross_states twice, is accepted too. In `attention_mask` and
        `cross_mask` 1 marks a position that is masked.
        """
        ids, mask, token_types, positions, cross, cross_mask, labels = self._arguments(inputs)
        hidden, mask, cross, cross_mask = self.embeddings(ids, mask, token_types, positions, cross, cross_mask)
        states = (hidden, cross, mask, cross_mask) if self.add_cross_attention else (hidden, mask)
        hidden = self.transformer(states)[0]
        found: Tensor = self.exit(hidden) if self.lm_head is None else self.lm_head(hidden, labels)
        return found

    def _arguments(self, inputs: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        names = ("input_ids", "attention_mask", "token_type_ids", "position_ids")
        if not self.add_cross_attention:
            found = tuple_of(self, inputs, (*names, "labels"))
            return (*found[:4], None, None, found[4])
        if isinstance(inputs, tuple | list) and len(inputs) == 8:
            inputs = (*inputs[:5], *inputs[6:])
        found = tuple_of(self, inputs, (*names, "cross_states", "cross_mask", "labels"))
        if found[4] is None:
            raise ValueError("DistributedTransformerLMHead: expected cross_states with add_cross_attention, found None")
        return found


class Embeddings(DistributedModule):
    """From the model's inputs to its transformer's inputs in the inner layout."""

    def __init__(
        self,
        vocab_size: int,
        num_positions: int,
        num_token_types: int,
        hidden_size: int,
        hidden_dropout_prob: float,
        initializer_range: float,
        *,
        parallel: TensorParallel,
    ) -> None:
        super().__init__(parallel)
        self.hidden_dropout_prob = hidden_dropout_prob
        self.word_embedding = VocabularyEmbedding(vocab_size, hidden_size, initializer_range, parallel=parallel)
        self.position_embedding = ChannelEmbedding(num_positions, hidden_size, initializer_range, parallel=parallel)
        self.token_type_embedding = (
            ChannelEmbedding(num_token_types, hidden_size, initializer_range, parallel=parallel)
            if num_token_types
            else None
        )

    def forward(
        self,
        ids: Tensor,
        mask: Tensor | None,
        token_types: Tensor | None,
        positions: Tensor | None,
        cross: Tensor | None,
        cross_mask: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """Hidden states, mask, cross states and their mask, inside."""
        self._check(ids, positions, token_types)
        if positions is None:
            positions = torch.arange(ids.shape[1], device=ids.device)[None].expand_as(ids)
        whole = self.parallel.enter_whole
        hidden = self.word_embedding(whole(ids)) + self.position_embedding(whole(positions))
        if self.token_type_embedding is not None and token_types is not None:
            hidden = hidden + self.token_type_embedding(whole(token_types))
        hidden = hidden_dropout(self, hidden, self.hidden_dropout_prob)
        masks = [None if each is None else whole(each.bool())[:, None, None, :] for each in (mask, cross_mask)]
        return hidden, masks[0], None if cross is None else self.parallel.enter(cross), masks[1]

    def _check(self, ids: Tensor, positions: Tensor | None, token_types: Tensor | None) -> None:
        longest = self.position_embedding.get_parameter("weight").shape[0]
        if ids.dim() != 2 or (positions is None and ids.shape[1] > longest):
            raise ValueError(
                f"DistributedTransformerLMHead: expected input_ids [N, S] with S up to num_positions = {longest}, found {tuple(ids.shape)}"
            )
        if token_types is not None and self.token_type_embedding is None:
            raise ValueError("DistributedTransformerLMHead: expected token_type_ids None, as num_token_types is 0")


class LMHead(DistributedModule):
    """Logits, or the loss, from hidden states in the inner layout; the weight is the word embeddings'."""

    def __init__(self, words: VocabularyEmbedding, *, is_causal: bool, parallel: TensorParallel) -> None:
        super().__init__(parallel)
        self.is_causal, self.vocab_size = is_causal, words.num_embeddings
        self.weight = words.get_parameter("weight")
        self.shards["weight"] = words.shards["weight"]

    def forward(self, hidden: Tensor, labels: Tensor | None) -> Tensor:
        """Logits [N, S, V] of this rank's samples, or the mean loss over them."""
        if self.parallel.splits_hidden and self.parallel.group.size > 1:
            (logits,) = gathered_products(hidden, [(self.weight, None)], self.parallel.group)
        else:
            logits = F.linear(self.parallel.before_columns(hidden), self.weight)
        if labels is None:
            return self._outside(logits)
        labels = self.parallel.enter_whole(labels)
        if self.is_causal:
            logits, labels = logits[:, :-1], labels[:, 1:]
        losses = self._losses(logits, labels)
        counted = labels != IGNORED_LABEL
        if not self.parallel.prescaled_batch:
            losses, counted = split(losses, 0, self.parallel.group), split(counted, 0, self.parallel.group)
        return losses.sum() / counted.sum()

    def _losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Cross-entropy of each token from slices of the logits, [N, S]; 0 for ignored labels."""
        group = self.parallel.group.process_group
        if group is None:
            scores = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
            return F.cross_entropy(scores.transpose(1, 2), labels, ignore_index=IGNORED_LABEL, reduction="none")
        return vocab_parallel_cross_entropy(
            logits,
            labels,
            group,
            vocab_start=self.shards["weight"].start,
            vocab_size=self.vocab_size,
            ignore_index=IGNORED_LABEL,
            reduction="none",
        )

    def _outside(self, logits: Tensor) -> Tensor:
        """All logits of the samples that this rank was given. Slices of unequal length are padded on the way."""
        group = self.parallel.group
        shares = group.shares(self.vocab_size)
        padded = F.pad(logits, (0, shares[0] - logits.shape[-1]))
        whole = all_gather(padded, -1, group) if self.parallel.prescaled_batch else all_to_all(padded, 0, -1, group)
        if shares[0] == shares[-1]:
            return whole
        parts = torch.split(whole, shares[0], -1)
        return torch.cat([part[..., :share] for part, share in zip(parts, shares, strict=True)], -1)
