"""A GPT-2 of one million parameters over a thousand words, from a Hugging Face configuration with random weights.

smpc compile examples/gpt2.py:build -p 2 -m 8
"""

from __future__ import annotations

import torch
from transformers import GPT2Config, GPT2LMHeadModel, logging

logging.set_verbosity_error()  # it warns about a loss type that a configuration from scratch does not name

VOCABULARY_SIZE = 1024
SEQUENCE_LENGTH = 32
BATCH_SIZE = 16


def make_model(seed: int = 0) -> GPT2LMHeadModel:
    """The model; the same seed gives the same weights on every rank."""
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=VOCABULARY_SIZE,
        n_positions=SEQUENCE_LENGTH,
        n_embd=128,
        n_layer=4,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config).train()


def build() -> tuple[GPT2LMHeadModel, dict[str, torch.Tensor]]:
    """A model and one batch of sample inputs, as `smpc compile` wants them."""
    ids = torch.zeros(BATCH_SIZE, SEQUENCE_LENGTH, dtype=torch.int64)
    return make_model(), {"input_ids": ids, "labels": ids}
