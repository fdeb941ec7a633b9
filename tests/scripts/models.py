"""The models that families.py trains, without smpc, so that plain PyTorch trains the same."""

import dataclasses

import torch
import torch.nn.functional as F
import transformers
from torch import nn

_IDS = {"vocab_size": 61, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}


def _gptneox():
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    config = transformers.GPTNeoXConfig(**_IDS, **sizes, max_position_embeddings=16, use_cache=False)
    return transformers.GPTNeoXForCausalLM(config)


def _gptneo():
    none = {"resid_dropout": 0.0, "embed_dropout": 0.0, "attention_dropout": 0.0}
    sizes = {"hidden_size": 16, "num_layers": 2, "num_heads": 4, "intermediate_size": 32, "window_size": 4}
    types = {"attention_types": [[["global", "local"], 1]], "max_position_embeddings": 16}
    return transformers.GPTNeoForCausalLM(transformers.GPTNeoConfig(**_IDS, **none, **sizes, **types, use_cache=False))


def _t5():
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_heads": 4}
    config = transformers.T5Config(**_IDS, **sizes, dropout_rate=0.0, decoder_start_token_id=0, use_cache=False)
    return transformers.T5ForConditionalGeneration(config)


def _gpt2():
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    sizes = {"n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 4}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**_IDS, **none, **sizes, use_cache=False))


MODELS = {"gptneox": _gptneox, "gptneo": _gptneo, "t5": _t5, "gpt2": _gpt2}


@dataclasses.dataclass
class MineConfig:
    width: int = 16
    heads: int = 4
    positions: int = 16
    vocabulary: int = 61
    depth: int = 2


class Mine(nn.Module):
    """A decoder of one's own."""

    class Block(nn.Module):
        def __init__(self, config, index):
            super().__init__()
            self.heads = config.heads
            self.norm_in, self.norm_out = nn.LayerNorm(config.width), nn.LayerNorm(config.width)
            self.query, self.key, self.value, self.mix = (nn.Linear(config.width, config.width) for _ in range(4))
            self.up, self.down = nn.Linear(config.width, 4 * config.width), nn.Linear(4 * config.width, config.width)

        def forward(self, hidden, mask):
            def split(x):
                return x.view(*x.shape[:2], self.heads, -1).transpose(1, 2)

            x = self.norm_in(hidden)
            parts = (split(part(x)) for part in (self.query, self.key, self.value))
            mixed = F.scaled_dot_product_attention(*parts, is_causal=True)
            hidden = hidden + self.mix(mixed.transpose(1, 2).flatten(2))
            return hidden + self.down(F.relu(self.up(self.norm_out(hidden))))

        @staticmethod
        def names(state):
            """Its weights by the names of the layer that replaces it."""
            own = {
                "norm_in": "attention.pre_layernorm",
                "query": "attention.query",
                "key": "attention.key",
                "value": "attention.value",
                "mix": "attention.dense",
                "norm_out": "output.pre_layernorm",
                "up": "output.dense1",
                "down": "output.dense2",
            }
            split = {name: name.rpartition(".") for name in state}
            return {f"{own[split[name][0]]}.{split[name][2]}": value for name, value in state.items()}

    def __init__(self, config):
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.places = nn.Parameter(torch.randn(config.positions, config.width) * 0.02)
        self.blocks = nn.ModuleList(Mine.Block(config, index) for index in range(config.depth))
        self.head = nn.Linear(config.width, config.vocabulary)

    def forward(self, input_ids, attention_mask, labels):
        hidden = self.tokens(input_ids) + self.places[: input_ids.shape[1]]
        for block in self.blocks:
            hidden = block(hidden, None)
        logits = self.head(hidden)
        return {"loss": F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), "logits": logits}
