"""Small models that tensor parallelism divides, each made with a batch of named inputs; outputs hold a loss."""

import torch
import transformers
from torch import nn

BATCH, SEQUENCE, HIDDEN, VOCABULARY = 2, 8, 32, 64
SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": HIDDEN,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": VOCABULARY,
}


def tokens(**more):
    torch.manual_seed(1)
    ids, labels = torch.randint(0, VOCABULARY, (2, BATCH, SEQUENCE))
    return {"input_ids": ids, "labels": labels} | more


def gpt2():
    config = transformers.GPT2Config(
        n_layer=2,
        n_embd=HIDDEN,
        n_head=4,
        vocab_size=VOCABULARY,
        n_positions=16,
        resid_pdrop=0,
        attn_pdrop=0,
        embd_pdrop=0,
    )
    return transformers.GPT2LMHeadModel(config), tokens(use_cache=False)


def llama():
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=2, max_position_embeddings=32)
    return transformers.LlamaForCausalLM(config), tokens(use_cache=False)


def neox():
    config = transformers.GPTNeoXConfig(**SIZES, max_position_embeddings=32, hidden_dropout=0, attention_dropout=0)
    return transformers.GPTNeoXForCausalLM(config), tokens(use_cache=False)


def bert():
    config = transformers.BertConfig(
        **SIZES, max_position_embeddings=32, hidden_dropout_prob=0, attention_probs_dropout_prob=0
    )
    return transformers.BertForMaskedLM(config), tokens(attention_mask=torch.ones(BATCH, SEQUENCE, dtype=torch.long))


def t5():
    config = transformers.T5Config(
        num_layers=2,
        d_model=HIDDEN,
        num_heads=4,
        d_kv=8,
        d_ff=64,
        vocab_size=VOCABULARY,
        dropout_rate=0,
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config), tokens(use_cache=False)


def vit():
    sizes = {name: size for name, size in SIZES.items() if name != "vocab_size"}
    config = transformers.ViTConfig(**sizes, image_size=16, patch_size=8, num_labels=4)
    torch.manual_seed(1)
    pixels = torch.randn(BATCH, 3, 16, 16)
    return transformers.ViTForImageClassification(config), {"pixel_values": pixels, "labels": torch.tensor([0, 1])}


def mixtral():
    config = transformers.MixtralConfig(**SIZES, num_key_value_heads=2, max_position_embeddings=32, num_local_experts=4)
    return transformers.MixtralForCausalLM(config), tokens(use_cache=False)


def aria():
    """Its experts' weights are multiplied from the left."""
    experts = {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1, "pad_token_id": 0}
    config = transformers.AriaTextConfig(**SIZES, num_key_value_heads=2, max_position_embeddings=32, **experts)
    return transformers.AriaTextForCausalLM(config), tokens(use_cache=False)


class MixerBlock(nn.Module):
    def __init__(self, patches, channels):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(channels), nn.LayerNorm(channels)])
        self.across_patches = nn.Sequential(nn.Linear(patches, 4 * patches), nn.GELU(), nn.Linear(4 * patches, patches))
        self.across_channels = nn.Sequential(
            nn.Linear(channels, 4 * channels), nn.GELU(), nn.Linear(4 * channels, channels)
        )

    def forward(self, x):
        x = x + self.across_patches(self.norms[0](x).mT).mT
        return x + self.across_channels(self.norms[1](x))


class Mixer(nn.Module):
    """An MLP-Mixer (Tolstikhin et al. 2021), which returns its loss."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, HIDDEN, 4, 4)
        self.blocks = nn.ModuleList([MixerBlock(16, HIDDEN) for _ in range(2)])
        self.head = nn.Linear(HIDDEN, 4)

    def forward(self, pixels, labels):
        x = self.stem(pixels).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x.mean(1)), labels)


def mixer():
    torch.manual_seed(1)
    return Mixer(), {"pixels": torch.randn(BATCH, 3, 16, 16), "labels": torch.tensor([0, 1])}
