"""The models that the issue of the spine names, from tiny configurations with random weights, with inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Batch = tuple[tuple[Any, ...], dict[str, Any]]
BATCH, LENGTH, VOCABULARY = 8, 12, 64


def _tokens() -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (BATCH, LENGTH))


def _labelled(**extra: Any) -> Batch:
    ids = _tokens()
    return (), {"input_ids": ids, "labels": ids.clone(), **extra}


def gpt2(**changes: Any) -> tuple[nn.Module, Batch]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=4,
        n_embd=32,
        n_head=4,
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        bos_token_id=0,
        eos_token_id=1,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        tie_word_embeddings=False,
        **changes,
    )
    return GPT2LMHeadModel(config), _labelled()


def gpt2_tied() -> tuple[nn.Module, Batch]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=3,
        n_embd=32,
        n_head=4,
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        bos_token_id=0,
        eos_token_id=1,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )
    return GPT2LMHeadModel(config), _labelled()


def _decoder(name: str, **changes: Any) -> tuple[nn.Module, Batch]:
    import transformers

    config = getattr(transformers, f"{name}Config")(
        num_hidden_layers=3,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=4,
        vocab_size=VOCABULARY,
        max_position_embeddings=32,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        tie_word_embeddings=False,
        **changes,
    )
    mask = torch.ones(BATCH, LENGTH, dtype=torch.int64)
    mask[:, -2:] = 0
    return getattr(transformers, f"{name}ForCausalLM")(config), _labelled(attention_mask=mask)


def llama() -> tuple[nn.Module, Batch]:
    return _decoder("Llama", num_key_value_heads=2)


def qwen3() -> tuple[nn.Module, Batch]:
    return _decoder("Qwen3", num_key_value_heads=2, head_dim=8)


def gpt_neox() -> tuple[nn.Module, Batch]:
    return _decoder("GPTNeoX", hidden_dropout=0.0, attention_dropout=0.0)


def bert() -> tuple[nn.Module, Batch]:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        num_hidden_layers=3,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=4,
        vocab_size=VOCABULARY,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=3,
    )
    mask = torch.ones(BATCH, LENGTH, dtype=torch.int64)
    mask[:, -3:] = 0
    return BertForSequenceClassification(config), (
        (),
        {"input_ids": _tokens(), "attention_mask": mask, "labels": torch.randint(0, 3, (BATCH,))},
    )


def vit() -> tuple[nn.Module, Batch]:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        num_hidden_layers=3,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=4,
        image_size=16,
        patch_size=4,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=3,
    )
    return ViTForImageClassification(config), (
        (),
        {"pixel_values": torch.randn(BATCH, 3, 16, 16), "labels": torch.randint(0, 3, (BATCH,))},
    )


def t5() -> tuple[nn.Module, Batch]:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        num_layers=2,
        num_decoder_layers=2,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_heads=4,
        vocab_size=VOCABULARY,
        dropout_rate=0.0,
        use_cache=False,
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=1,
    )
    return T5ForConditionalGeneration(config), _labelled()


class ConvNet(nn.Module):
    """Convolutions with BatchNorm and an in-place activation."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            nn.Conv2d(8, 16, 3, stride=2, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
        )
        self.classifier = nn.Linear(16 * 4 * 4, 5)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.classifier(torch.flatten(self.features(images), 1))


def convnet() -> tuple[nn.Module, Batch]:
    return ConvNet(), ((torch.randn(BATCH, 3, 16, 16),), {})


class LSTMClassifier(nn.Module):
    """Embedding, a two-layer LSTM, and a classifier on the last state."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.lstm = nn.LSTM(16, 24, num_layers=2, batch_first=True)
        self.head = nn.Linear(24, 4)

    def forward(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        states, (hidden, _) = self.lstm(self.embed(tokens))
        return {"logits": self.head(hidden[-1]), "mean": states.mean(dim=1)}


def lstm() -> tuple[nn.Module, Batch]:
    return LSTMClassifier(), ((_tokens(),), {})


class UNet(nn.Module):
    """Two levels down, two up, skip connections across."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = self._block(1, 8), self._block(8, 16)
        self.bottom = self._block(16, 16)
        self.up2, self.up1 = self._block(32, 8), self._block(16, 8)
        self.out = nn.Conv2d(8, 1, 1)

    @staticmethod
    def _block(inputs: int, outputs: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(2, outputs), nn.GELU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        c = self.bottom(F.max_pool2d(b, 2))
        d = self.up2(torch.cat([F.interpolate(c, scale_factor=2), b], dim=1))
        return self.out(self.up1(torch.cat([F.interpolate(d, scale_factor=2), a], dim=1)))


def unet() -> tuple[nn.Module, Batch]:
    return UNet(), ((torch.randn(BATCH, 1, 16, 16),), {})


class TiedEmbeddings(nn.Module):
    """An embedding whose weight is also the output projection's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16)) for _ in range(3))
        self.head = nn.Linear(16, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def tied() -> tuple[nn.Module, Batch]:
    return TiedEmbeddings(), ((_tokens(),), {})


MODELS: dict[str, Callable[[], tuple[nn.Module, Batch]]] = {
    "gpt2": gpt2, "llama": llama, "qwen3": qwen3, "gpt_neox": gpt_neox, "bert": bert, "vit": vit, "t5": t5,
    "convnet": convnet, "lstm": lstm, "unet": unet, "tied": tied, "gpt2_tied": gpt2_tied,
}  # fmt: skip


def build(name: str, seed: int = 0) -> tuple[nn.Module, Batch]:
    """A model in training mode and its inputs; the same seed gives the same bits."""
    torch.manual_seed(seed)
    model, batch = MODELS[name]()
    return model.train(), batch
