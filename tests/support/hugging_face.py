"""Tiny models of the families whose layers have distributed versions, with random weights, and batches for them."""

import copy
import warnings

import torch
import transformers
from tensor_ranks import tensor_groups

from smpc.nn.distribution.distribute import distribute, set_tensor_parallelism
from smpc.nn.distribution.registry import Registry
from smpc.nn.huggingface import families
from smpc.nn.parallel import TensorParallel

HIDDEN, HEADS, WIDE, VOCABULARY, LENGTH, BATCH = 16, 4, 24, 23, 6, 2


def _decoder(name, **changes):
    return getattr(transformers, f"{name}Config")(
        num_hidden_layers=2,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        vocab_size=VOCABULARY,
        max_position_embeddings=16,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        **changes,
    )


def _gpt(name, **changes):
    sizes = {"n_layer": 2, "n_embd": HIDDEN, "n_head": HEADS, "n_inner": WIDE, "n_positions": 16}
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    ids = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    return getattr(transformers, f"{name}Config")(**(sizes | none | ids | changes))


NONE = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def _bert(name, **changes):
    return _decoder(name, intermediate_size=WIDE, **NONE, **changes)


def _t5(**changes):
    return transformers.T5Config(
        num_layers=2,
        d_model=HIDDEN,
        num_heads=HEADS,
        d_kv=5,
        d_ff=WIDE,
        vocab_size=VOCABULARY,
        relative_attention_num_buckets=6,
        relative_attention_max_distance=5,
        dropout_rate=0.0,
        initializer_factor=0.3,
        decoder_start_token_id=0,
        pad_token_id=2,
        eos_token_id=1,
        **changes,
    )


def _vit(**changes):
    return transformers.ViTConfig(
        num_hidden_layers=2,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        intermediate_size=WIDE,
        image_size=8,
        patch_size=4,
        num_labels=3,
        **NONE,
        **changes,
    )


# Name: (family, class, configuration), where attention is by default scaled_dot_product_attention.
MODELS = {
    "gpt2": ("gpt2", "GPT2LMHeadModel", lambda: _gpt("GPT2")),
    "gpt2-eager": ("gpt2", "GPT2LMHeadModel", lambda: _gpt("GPT2", attn_implementation="eager", n_head=8)),
    "gpt2-scaled": (
        "gpt2",
        "GPT2LMHeadModel",
        lambda: _gpt("GPT2", scale_attn_by_inverse_layer_idx=True, activation_function="relu"),
    ),
    "gpt2-crossed": ("gpt2", "GPT2LMHeadModel", lambda: _gpt("GPT2", add_cross_attention=True)),
    "gptj": ("gptj", "GPTJForCausalLM", lambda: _gpt("GPTJ", rotary_dim=2)),
    "gptneo": ("gptneo", "GPTNeoForCausalLM", lambda: _neo()),
    "gptneox": ("gptneox", "GPTNeoXForCausalLM", lambda: _neox()),
    "gptneox-sequential": (
        "gptneox",
        "GPTNeoXForCausalLM",
        lambda: _neox(use_parallel_residual=False, attention_bias=False, attn_implementation="eager"),
    ),
    "bert": ("bert", "BertForSequenceClassification", lambda: _bert("Bert", num_labels=3)),
    "bert-decoder": (
        "bert",
        "BertLMHeadModel",
        lambda: _bert("Bert", is_decoder=True, add_cross_attention=True, attn_implementation="eager"),
    ),
    "roberta": ("roberta", "RobertaForMaskedLM", lambda: _bert("Roberta", hidden_act="gelu_new")),
    "t5": ("t5", "T5ForConditionalGeneration", lambda: _t5()),
    "t5-gated": (
        "t5",
        "T5ForConditionalGeneration",
        lambda: _t5(feed_forward_proj="gated-gelu", tie_word_embeddings=False, attn_implementation="eager"),
    ),
    "vit": ("vit", "ViTForImageClassification", lambda: _vit()),
    "vit-unbiased": ("vit", "ViTForImageClassification", lambda: _vit(qkv_bias=False, attn_implementation="eager")),
}


def _neo():
    """The second layer sees a window of three positions."""
    return transformers.GPTNeoConfig(
        num_layers=2,
        attention_types=[[["global", "local"], 1]],
        window_size=3,
        hidden_size=HIDDEN,
        num_heads=HEADS,
        intermediate_size=WIDE,
        max_position_embeddings=16,
        vocab_size=VOCABULARY,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        resid_dropout=0.0,
        embed_dropout=0.0,
        attention_dropout=0.0,
    )


def is_before_5():
    return int(transformers.__version__.split(".")[0]) < 5


def _neox(**changes):
    rotary = {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}}
    if is_before_5():
        rotary = {"rotary_pct": 0.5, "rotary_emb_base": 100.0}
    return _decoder(
        "GPTNeoX",
        intermediate_size=WIDE,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        **rotary,
        **changes,
    )


def build(name, seed=0, **changes):
    """The model, with every parameter random, biases and norms included, unless it waits for its parameters."""
    _, cls, make = MODELS[name]
    config = make()
    for key, value in changes.items():
        setattr(config, key, value)
    torch.manual_seed(seed)
    model = getattr(transformers, cls)(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.is_meta:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def batch(name, size, masked=True, seed=1):
    """Arguments of a call on `size` samples. Some positions are padding, on the right and on the left."""
    generator = torch.Generator().manual_seed(seed)
    if name.startswith("vit"):
        pixels = torch.randn(size, 3, 8, 8, generator=generator)
        return {"pixel_values": pixels, "labels": torch.randint(0, 3, (size,), generator=generator)}
    ids = torch.randint(3, VOCABULARY, (size, LENGTH), generator=generator)
    found = {"input_ids": ids}
    if masked:
        mask = torch.ones(size, LENGTH, dtype=torch.long)
        mask[::2, -2:] = 0
        if not name.startswith("t5"):
            mask[1::2, :2] = 0
        found["attention_mask"] = mask
    if name == "bert":
        return found | {"labels": torch.randint(0, 3, (size,), generator=generator)}
    if name in ("gpt2-crossed", "bert-decoder"):
        found["encoder_hidden_states"] = torch.randn(size, 3, HIDDEN, generator=generator)
        found["encoder_attention_mask"] = torch.tensor([[1, 1, 0]]).repeat(size, 1)
    return found | {"labels": ids.clone()}


FORMATS = {family.layer.split(".")[2].replace("_", ""): family.installed for family in families.FAMILIES.values()}


def split(model, size, optimize="memory", prescaled=False):
    """The model with distributed layers, on every rank."""
    found = []
    for group in tensor_groups(size):
        own = copy.deepcopy(model)
        set_tensor_parallelism(own)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*it shares .* with another module")
            warnings.filterwarnings("ignore", message=".*divisible by tensor_parallel_degree")
            found.append(distribute(own, Registry(), TensorParallel(group, optimize, prescaled)))
    return found
