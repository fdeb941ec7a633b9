"""Models from a Hugging Face `config.json`: built on the meta device, so that no weights are allocated.

Nothing is fetched and no code from the file runs: the class is that of transformers for `architectures[0]`, or, if
the file names none that transformers has, the one that fits `model_type` (see `_TASKS`). `use_cache` is switched off:
a training step keeps no cache.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smpc.config import parse_json
from smpc.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

# Tried in order for a config without a known architecture; the first task that has the model type wins.
_TASKS = (
    "MODEL_FOR_MASKED_LM_MAPPING",
    "MODEL_FOR_CAUSAL_LM_MAPPING",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING",
    "MODEL_MAPPING",
)


def load_config_model(path: Path) -> nn.Module:
    """The model that the file describes, in training mode, on the meta device; ConfigError if the file is no good."""
    fields = _read(path)
    try:
        import transformers
    except ImportError:
        raise ConfigError(f"{path}: a Hugging Face config needs transformers: pip install 'smpc[hf]'") from None
    import torch

    config = _config(path, fields)
    if "use_cache" in config.to_dict():
        config.use_cache = False
    model_class = _model_class(path, fields, config, transformers)
    try:
        with torch.device("meta"):
            model: nn.Module = model_class._from_config(config)
    except Exception as error:
        text = " ".join(str(error).split())
        raise ConfigError(f"{path}: {model_class.__name__} raised {type(error).__name__}: {text}") from error
    return model.train()


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the file: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text at byte {error.start}") from error
    fields = parse_json(text, str(path))
    if not isinstance(fields.get("model_type"), str):
        raise ConfigError(f"{path}: no 'model_type': expected the config.json of a Hugging Face model")
    return fields


def _config(path: Path, fields: dict[str, Any]) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

    name = fields["model_type"]
    if name not in CONFIG_MAPPING_NAMES:
        matches = difflib.get_close_matches(name, sorted(CONFIG_MAPPING_NAMES), n=1, cutoff=0.5)
        hint = f"; did you mean {matches[0]!r}?" if matches else ""
        raise ConfigError(f"{path}: transformers knows no model_type {name!r}{hint}")
    try:
        return CONFIG_MAPPING[name].from_dict(fields)
    except Exception as error:  # transformers checks fields with errors of several unrelated types
        text = " ".join(str(error).split())
        raise ConfigError(f"{path}: transformers refuses it: {type(error).__name__}: {text}") from error


def _model_class(path: Path, fields: dict[str, Any], config: Any, transformers: Any) -> Any:
    from transformers.models.auto import modeling_auto

    architectures = fields.get("architectures") or []
    for name in architectures[:1] if isinstance(architectures, list) else []:
        found = getattr(transformers, name, None) if isinstance(name, str) else None
        if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
            return found
    tasks = ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING", *_TASKS) if config.is_encoder_decoder else _TASKS
    for task in tasks:
        mapping = getattr(modeling_auto, task)
        if type(config) in mapping:
            classes = mapping[type(config)]
            return classes[0] if isinstance(classes, tuple) else classes
    raise ConfigError(
        f"{path}: transformers has no model class for architectures {architectures!r} "
        f"or model_type {fields['model_type']!r}"
    )
