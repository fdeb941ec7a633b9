"""Every architecture of Hugging Face that gets small by its configuration: a model of each type, with labels where it takes them.

Configurations are made small by name: what is called `hidden_size` becomes 32, wherever it is. Where that makes no model that runs, less of
it is made small (`profile`), and other inputs are tried (`variant`); what runs by itself in no way is left out.
"""

from __future__ import annotations

import copy
import inspect
import re

import torch
from torch import nn

from smpc.tracer import flatten

VOCABULARY, LENGTH, BATCH, PIXELS = 99, 12, 4, 32
PROFILES, VARIANTS = 3, 5

_LAYERS = {
    **dict.fromkeys(
        ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers", "encoder_layers", "decoder_layers",
         "num_encoder_layers", "depth"), 2,
    ),
    "vocab_size": VOCABULARY, "layerdrop": 0.0, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0, "mask_time_prob": 0.0,
    "mask_feature_prob": 0.0, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "decoder_start_token_id": 0, "use_cache": False,
    "num_labels": 3, "chunk_size": 4,
}  # fmt: skip
_WIDTHS = {
    **dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "dim", "encoder_hidden_size", "decoder_hidden_size", "d_embed", "embedding_dim",
         "word_embed_proj_dim"), 32,
    ),
    **dict.fromkeys(
        ("intermediate_size", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim", "ffn_dim", "ffn_hidden_size", "max_position_embeddings",
         "n_positions", "max_source_positions", "max_target_positions", "max_seq_len"), 64,
    ),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_dim"), 32),
    **dict.fromkeys(
        ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads",
         "attention_heads", "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4,
    ),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk"), 2),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "n_shared_experts", "num_shared_experts", "n_groups"), 1),
    **dict.fromkeys(("projection_dim", "projection_size", "codevector_dim", "classifier_proj_size"), 16),
    "d_kv": 8, "sliding_window": 8, "attention_window": 4, "num_channels": 3, "num_queries": 6, "max_2d_position_embeddings": 128,
    "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4, "num_feat_extract_layers": 2,
}  # fmt: skip
_DETAILS = {
    **dict.fromkeys(("head_dim", "d_head", "attention_head_size", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "state_size"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "num_mel_bins", "qk_head_dim"), 16),
    **dict.fromkeys(("embed_dim", "hidden_dim", "embedding_size", "emb_dim"), 32),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 4),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
    "num_key_value_heads": 2, "rotary_dim": 4, "image_size": PIXELS, "patch_size": 8, "conv_dim": (16, 16), "conv_stride": (4, 4),
    "conv_kernel": (8, 8),
}  # fmt: skip
_OPTIONAL = ("sliding_window", "q_lora_rank", "head_dim", "rotary_dim", "projection_size")
_LISTS = ("layer_types", "mlp_layer_types", "layers_block_type")
_TASKS = (
    "CTC", "SPEECH_SEQ_2_SEQ", "SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "CAUSAL_LM", "MASKED_LM", "IMAGE_CLASSIFICATION",
    "AUDIO_CLASSIFICATION", "SEMANTIC_SEGMENTATION", "OBJECT_DETECTION", "VIDEO_CLASSIFICATION", "SEQUENCE_CLASSIFICATION",
    "PRETRAINING", "QUESTION_ANSWERING",
)  # fmt: skip


def names() -> list[str]:
    """A class of each model type, the first of these tasks that it is for."""
    from transformers.models.auto import modeling_auto

    found: dict[str, str] = {}
    for task in (*(f"MODEL_FOR_{task}" for task in _TASKS), "MODEL"):
        for kind, name in getattr(modeling_auto, f"{task}_MAPPING_NAMES").items():
            found.setdefault(kind, name if isinstance(name, str) else name[0])
    return sorted(set(found.values()))


def _is_small_already(name, found, value):
    if isinstance(found, bool) != isinstance(value, bool) and found is not None:
        return True
    return isinstance(found, (list, tuple)) != isinstance(value, (list, tuple)) or (name in _OPTIONAL and found is None)


def _settings(default, profile):
    """What makes a configuration small."""
    from transformers import PreTrainedConfig

    table, aliases = vars(default), getattr(type(default), "attribute_map", {})
    wanted = {**_LAYERS, **(_WIDTHS if profile < 2 else {}), **(_DETAILS if profile < 1 else {})}
    found = {}
    for name, value in wanted.items():
        is_known = name in table or (name in aliases and aliases[name] not in wanted)
        if is_known and not _is_small_already(name, table.get(name, table.get(aliases.get(name))), value):
            found[name] = value
    for name, value in table.items():
        if isinstance(value, float) and "drop" in name:
            found[name] = 0.0
        elif isinstance(value, (list, tuple)) and name == "depths":
            found[name] = type(value)([1] * len(value))
        elif isinstance(value, (list, tuple)) and name in _LISTS:
            kinds = list(dict.fromkeys(value))
            found["num_hidden_layers"] = max(2, len(kinds))
            found[name] = (kinds * 2)[: found["num_hidden_layers"]]
        elif isinstance(value, PreTrainedConfig):
            found[name] = _constructed(type(value), _settings(value, profile))
    if table.get("is_encoder_decoder"):
        found["decoder_start_token_id"] = 0
    return found


def _constructed(cls, settings):
    """A configuration without the settings that it refuses."""
    while True:
        try:
            return cls(**settings)
        except Exception as error:
            refused = re.search(r"field '(\w+)'", str(error))
            if refused is None or refused[1] not in settings:
                raise
            settings = {name: value for name, value in settings.items() if name != refused[1]}


def build(name, profile):
    """A model in training mode, the same bits every time. Raises whatever goes wrong, ValueError for one that is not small."""
    import transformers

    cls = getattr(transformers, name)
    config = _constructed(cls.config_class, _settings(cls.config_class(), profile))
    with torch.device("meta"):
        if sum(parameter.numel() for parameter in cls(copy.deepcopy(config)).parameters()) > 20_000_000:
            raise ValueError(f"{name} is not small")
    torch.manual_seed(0)
    model = cls(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.add_(torch.randn_like(parameter) * 0.02)
    return model.train()


def inputs(model, variant):
    """Arguments of a batch, by name."""
    wanted, config, kind = inspect.signature(model.forward).parameters, model.config, type(model).__name__
    generator = torch.Generator().manual_seed(7)

    def numbers(*shape, below):
        return torch.randint(3 if below > 3 else 0, below, shape, generator=generator)

    def noise(*shape):
        return torch.randn(*shape, generator=generator)

    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", PIXELS)
    size = size if isinstance(size, int) else PIXELS
    ids, mask = numbers(BATCH, LENGTH, below=VOCABULARY - 4), torch.ones(BATCH, LENGTH, dtype=torch.int64)
    mask[::2, LENGTH - 3 :] = 0
    is_text, mel = "input_ids" in wanted, getattr(config, "num_mel_bins", 16)
    found = {}
    if is_text:
        found["input_ids"] = ids
        if "attention_mask" in wanted and variant % 2 == 0:
            found["attention_mask"] = mask
    if "pixel_values" in wanted and (not is_text or variant >= 2):
        found["pixel_values"] = noise(BATCH, getattr(vision, "num_channels", 3), size, size)
    if "input_values" in wanted:
        found["input_values"] = noise(BATCH, 400) if variant < 2 else noise(BATCH, 64, mel)
    if "input_features" in wanted and not is_text:
        steps = 2 * getattr(config, "max_source_positions", 32) if variant % 2 == 0 else 64
        found["input_features"] = noise(BATCH, mel, steps) if variant < 2 else noise(BATCH, 64, mel)
    if "bbox" in wanted:
        found["bbox"] = numbers(BATCH, LENGTH, 4, below=50).sort(-1).values
    if "decoder_input_ids" in wanted and "labels" not in wanted:
        found["decoder_input_ids"] = ids
    if "return_loss" in wanted:
        found["return_loss"] = True
    if "start_positions" in wanted:
        found |= {name: numbers(BATCH, below=LENGTH) for name in ("start_positions", "end_positions")}
    if "labels" in wanted:
        found |= _labels(kind, config, ids, size, numbers, generator)
    return found


def _labels(kind, config, ids, size, numbers, generator):
    if kind.endswith(("Classification", "MultipleChoice")) and "Token" not in kind:
        return {"labels": numbers(BATCH, below=2)}
    if "CTC" in kind:
        labels = numbers(BATCH, 6, below=VOCABULARY - 4)
        labels[::2, 4:] = -100
        labels[0, 3:] = -100  # microbatches differ in how many there are
        return {"labels": labels}
    if "Segmentation" in kind:
        return {"labels": numbers(BATCH, size, size, below=2)}
    if "Detection" in kind:
        boxes = [torch.rand(2, 4, generator=generator) * 0.4 + 0.1 for _ in range(BATCH)]
        return {"labels": [{"class_labels": numbers(2, below=2), "boxes": box} for box in boxes]}
    return {"labels": ids.clone()}


def loss_of(output):
    """The loss that a model returns, or one that depends on every floating-point output."""
    if getattr(output, "loss", None) is not None:
        return output.loss.float().mean()
    tensors = [leaf for leaf in flatten(output)[0] if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
    return torch.stack([(tensor.float() ** 2).mean() for tensor in tensors]).sum()


def split(batch, microbatches):
    """The batch in equal parts; lists by samples, too."""
    rows = BATCH // microbatches

    def part(value, m):
        is_batched = len(value) == BATCH if isinstance(value, (list, torch.Tensor)) else False
        return value[m * rows : (m + 1) * rows] if is_batched else value

    return [{name: part(value, m) for name, value in batch.items()} for m in range(microbatches)]


def runs(model: nn.Module, batch, microbatches) -> bool:
    """Whether the model trains by itself on this batch."""
    try:
        model = copy.deepcopy(model)
        for part in split(batch, microbatches):
            loss = loss_of(model(**part))
            loss.backward()
        return bool(torch.isfinite(loss))
    except Exception:
        return False


def choose(name, microbatches):
    """(profile, variant) with which the model runs by itself, None if it does with none."""
    for profile in range(PROFILES):
        try:
            model = build(name, profile)
        except Exception:  # its configuration, or a library that is not there
            continue
        for variant in range(VARIANTS):
            try:
                batch = inputs(model, variant)
            except Exception:
                continue
            if runs(model, batch, microbatches):
                return profile, variant
    return None
