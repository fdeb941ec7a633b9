"""More models: Hugging Face architectures from tiny configurations, and awkward plain modules."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from zoo import BATCH, LENGTH, VOCABULARY, Batch

# Tried on every configuration; those that it has are set.
_TINY: dict[str, Any] = {
    "num_hidden_layers": 4, "n_layer": 4, "n_layers": 4, "num_layers": 2, "num_decoder_layers": 2, "encoder_layers": 2,
    "decoder_layers": 2, "hidden_size": 32, "d_model": 32, "n_embd": 32, "dim": 32, "embedding_size": 16, "hidden_dim": 64,
    "intermediate_size": 64, "d_ff": 64, "d_kv": 8, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "ffn_dim": 64,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "rotary_dim": 4, "vocab_size": VOCABULARY, "max_position_embeddings": 64,
    "n_positions": 64, "image_size": 16, "patch_size": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "word_embed_proj_dim": 32,
    "projection_dim": 16, "conv_dim": (16, 16), "conv_stride": (4, 4), "conv_kernel": (8, 8), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4, "mask_time_prob": 0.0,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "decoder_start_token_id": 0, "use_cache": False,
}  # fmt: skip
_DROPOUT = ("drop", "pdrop")


def _configuration(config_class: Any) -> Any:
    default = config_class()
    settings = {
        name: value
        for name, value in _TINY.items()
        if name in vars(default) or name in getattr(config_class, "attribute_map", {}) or hasattr(default, name)
    }
    settings |= {
        name: 0.0
        for name, value in vars(default).items()
        if any(d in name for d in _DROPOUT) and isinstance(value, float)
    }
    if default.is_encoder_decoder:
        settings["decoder_start_token_id"] = 0
    for part in ("text_config", "vision_config"):
        if getattr(default, part, None) is not None:
            settings[part] = _configuration(type(getattr(default, part))).to_dict()
    return config_class(**settings)


def _hugging_face(name: str, *inputs: str) -> tuple[nn.Module, Batch]:
    import transformers

    model_class = getattr(transformers, name)
    model = model_class(_configuration(model_class.config_class))
    ids = torch.randint(3, VOCABULARY, (BATCH, LENGTH))
    mask = torch.ones_like(ids)
    mask[::2, LENGTH - 3 :] = 0  # every second row is padded
    known = {
        "input_ids": ids,
        "labels": ids.clone(),
        "attention_mask": mask,
        "pixel_values": torch.randn(BATCH, 3, 16, 16),
        "input_values": torch.randn(BATCH, 400),
        "class": torch.randint(0, 2, (BATCH,)),
    }
    return model, ((), {"labels" if name == "class" else name: known[name] for name in inputs})


HUGGING_FACE: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("GPT2LMHeadModel", "GPTJForCausalLM", "GPTNeoXForCausalLM", "LlamaForCausalLM", "MistralForCausalLM",
         "Qwen3ForCausalLM", "GemmaForCausalLM", "PhiForCausalLM", "OPTForCausalLM", "BloomForCausalLM",
         "MixtralForCausalLM"),
        ("input_ids", "attention_mask", "labels"),
    ),
    **dict.fromkeys(
        ("BertForSequenceClassification", "RobertaForSequenceClassification", "DistilBertForSequenceClassification",
         "AlbertForSequenceClassification"),
        ("input_ids", "attention_mask", "class"),
    ),
    "T5ForConditionalGeneration": ("input_ids", "labels"),
    "BartForConditionalGeneration": ("input_ids", "labels"),
    "ViTForImageClassification": ("pixel_values", "class"),
    "CLIPModel": ("input_ids", "pixel_values"),
    "Wav2Vec2Model": ("input_values",),
}  # fmt: skip


class Residual(nn.Module):
    """A ResNet block."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.down = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.relu(self.norm1(self.conv1(x)))
        out = self.norm2(self.conv2(out))
        out += self.down(x)
        return self.relu(out)


def resnet() -> tuple[nn.Module, Batch]:
    blocks = [Residual(8, 8, 1), Residual(8, 16, 2), Residual(16, 32, 2)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 5)]
    stem = [nn.Conv2d(3, 8, 3, 1, 1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
    return nn.Sequential(*stem, *blocks, *head), ((torch.randn(BATCH, 3, 16, 16),), {})


class Choice(nn.Module):
    """Which layer runs depends on values: nothing of it can be recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.small, self.large = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.large(x) if x.norm() > 8 else self.small(x)


def branching() -> tuple[nn.Module, Batch]:
    return nn.Sequential(nn.Linear(8, 8), Choice(), nn.Tanh(), Choice(), nn.Linear(8, 8)), (
        (torch.randn(BATCH, 8),),
        {},
    )


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 0.5


class ScaledGradient(nn.Module):
    """Identity whose gradient is halved."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Scaled.apply(x)


def custom_function() -> tuple[nn.Module, Batch]:
    layers = [nn.Linear(8, 8), ScaledGradient(), nn.Linear(8, 8), ScaledGradient(), nn.Linear(8, 8)]
    return nn.Sequential(*layers), ((torch.randn(BATCH, 8),), {})


class Counting(nn.Module):
    """Updates buffers: one in place, one by a new tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = self.linear(x)
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(dim=0)
        return x - self.mean


def counting() -> tuple[nn.Module, Batch]:
    return nn.Sequential(*(Counting() for _ in range(4))), ((torch.randn(BATCH, 8),), {})


class NestedContainers(nn.Module):
    """Passes dicts of tuples from module to module."""

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, state: dict[str, Any]) -> dict[str, Any]:
            hidden, (first, _) = state["hidden"], state["pair"]
            hidden = self.linear(hidden) + first
            return {"hidden": hidden, "pair": (first, [hidden.sum(dim=1)]), "name": "part"}

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(self.Part() for _ in range(4))

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        state: dict[str, Any] = {"hidden": x, "pair": (x * 0.5, [])}
        for part in self.parts:
            state = part(state)
        return state


def nested_containers() -> tuple[nn.Module, Batch]:
    return NestedContainers(), ((torch.randn(BATCH, 8),), {})


class SharedByAll(nn.Module):
    """One weight that every layer uses."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8) * 0.3)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x) @ self.weight)
        return x


def shared_by_all() -> tuple[nn.Module, Batch]:
    return SharedByAll(), ((torch.randn(BATCH, 8),), {})


PLAIN = {
    "resnet": resnet, "branching": branching, "custom_function": custom_function, "counting": counting,
    "nested_containers": nested_containers, "shared_by_all": shared_by_all,
}  # fmt: skip


def build(name: str, *, without: str = "") -> tuple[nn.Module, Batch]:
    """A model in training mode and its inputs, but for one; the same bits every time."""
    torch.manual_seed(0)
    model, (args, kwargs) = PLAIN[name]() if name in PLAIN else _hugging_face(name, *HUGGING_FACE[name])
    return model.train(), (args, {key: value for key, value in kwargs.items() if key != without})
