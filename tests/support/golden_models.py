"""The models whose compilations are held byte for byte by `golden_programs`, and the names of their modules."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import zoo
from golden_unet import UNet
from torch import nn

logging.getLogger("transformers").setLevel(logging.ERROR)


@dataclass(frozen=True)
class Facts:
    """`blocks`: a pattern of modules to recompute. `tensor_parallel_plan`: styles. `marks`: modules by hand on three ranks."""

    make: Callable[[], tuple[nn.Module, zoo.Batch]]
    blocks: str
    tensor_parallel_plan: str | Mapping[str, str]
    marks: tuple[tuple[str, int], ...]


def _mlp() -> tuple[nn.Module, zoo.Batch]:
    blocks = (nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(8))
    return nn.Sequential(*blocks), ((torch.randn(zoo.BATCH, 16),), {})


def _unet() -> tuple[nn.Module, zoo.Batch]:
    return UNet(), ((torch.randn(zoo.BATCH, 1, 16, 16),), {})


def _decoder(name: str, **changes: Any) -> tuple[nn.Module, zoo.Batch]:
    import transformers

    config = getattr(transformers, f"{name}Config")(
        num_hidden_layers=4,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=zoo.VOCABULARY,
        max_position_embeddings=32,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        **changes,
    )
    ids = torch.randint(3, zoo.VOCABULARY, (zoo.BATCH, zoo.LENGTH))
    return getattr(transformers, f"{name}ForCausalLM")(config), ((), {"input_ids": ids, "labels": ids.clone()})


def _llama_tied() -> tuple[nn.Module, zoo.Batch]:
    return _decoder("Llama", tie_word_embeddings=True)


def _mixtral() -> tuple[nn.Module, zoo.Batch]:
    return _decoder("Mixtral", num_local_experts=4, num_experts_per_tok=2, tie_word_embeddings=False)


FACTS: Mapping[str, Facts] = {
    "mlp": Facts(_mlp, "[1-6]", {"*.0": "colwise", "*.2": "rowwise"}, (("0", 2), ("3", 1), ("4", 1), ("6", 2))),
    "gpt2": Facts(
        zoo.gpt2,
        "transformer.h.*",
        {"h.*.attn.c_attn": "colwise", "h.*.mlp.c_fc": "colwise", "h.*.mlp.c_proj": "rowwise", "lm_head": "colwise"},
        (("transformer.h.1", 1), ("transformer.h.2", 2), ("lm_head", 1)),
    ),
    "llama_tied": Facts(
        _llama_tied,
        "model.layers.*",
        {"*_proj": "colwise", "*.o_proj": "rowwise", "*.down_proj": "rowwise"},
        (("model.layers.1", 1), ("model.layers.2", 2), ("model.layers.3", 1)),
    ),
    "t5": Facts(
        zoo.t5,
        "*.block.*",
        {"*.DenseReluDense.wi": "colwise", "*.DenseReluDense.wo": "rowwise", "q": "colwise"},
        (("encoder.block.1", 1), ("decoder", 2)),
    ),
    "unet": Facts(_unet, "*1", {"down1.0": "colwise"}, (("down2", 1), ("bottom", 2), ("up2", 1))),
    "mixtral": Facts(
        _mixtral, "model.layers.[12]", "huggingface", (("model.layers.1", 1), ("model.layers.2", 2), ("lm_head", 1))
    ),
}


def build(name: str) -> tuple[nn.Module, zoo.Batch]:
    """A model in training mode and its inputs, the same in every process."""
    torch.manual_seed(0)
    model, batch = FACTS[name].make()
    return model.train(), batch
