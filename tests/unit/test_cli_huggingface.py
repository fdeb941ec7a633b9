"""Hugging Face config files: the right class, no weights, no code, and one clear line for what is wrong."""

import json

import pytest
from torch import nn

from smpc.cli.huggingface import load_config_model
from smpc.cli.inputs import InputSpec
from smpc.cli.targets import load_target
from smpc.errors import ConfigError

GPT2 = {"model_type": "gpt2", "n_layer": 2, "n_embd": 8, "n_head": 2, "vocab_size": 16, "n_positions": 8}
BERT = {"model_type": "bert", "num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 16}
T5 = {"model_type": "t5", "num_layers": 1, "d_model": 8, "d_ff": 8, "num_heads": 2, "d_kv": 4, "vocab_size": 16}
VIT = {"model_type": "vit", "num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "image_size": 16}


@pytest.fixture
def write(tmp_path):
    def write(content):
        path = tmp_path / "config.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    return write


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({**GPT2, "architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({**GPT2, "architectures": ["GPT2Model"]}, "GPT2Model"),
        ({**GPT2, "architectures": ["SomebodysModel"]}, "GPT2LMHeadModel"),
        ({**GPT2, "architectures": ["AutoConfig"]}, "GPT2LMHeadModel"),
        (GPT2, "GPT2LMHeadModel"),
        (BERT, "BertForMaskedLM"),
        (T5, "T5ForConditionalGeneration"),
        (VIT, "ViTForImageClassification"),
    ],
)
def test_class_of_the_model(write, fields, expected):
    assert type(load_config_model(write(fields))).__name__ == expected


def test_model_trains_without_weights_or_cache(write):
    model = load_config_model(write({**GPT2, "torch_dtype": "bfloat16"}))
    assert {(p.device.type, str(p.dtype)) for p in model.parameters()} == {("meta", "torch.bfloat16")}
    assert model.training
    assert model.config.use_cache is False


def test_folder_with_a_config_is_a_target(write):
    folder = write(GPT2).parent
    model, inputs = load_target(str(folder), (InputSpec("input_ids", "int64", (2, 4)),))
    assert isinstance(model, nn.Module)
    assert inputs["input_ids"].shape == (2, 4)


def test_options_of_transformers_are_no_inputs(write):
    path = write(GPT2)
    with pytest.raises(ConfigError, match="has no input 'input_idz'; did you mean 'input_ids'"):
        load_target(str(path), (InputSpec("input_idz", "int64", (2, 4)),))


def test_config_names_no_code(write, tmp_path):
    canary = tmp_path / "canary"
    (tmp_path / "modeling.py").write_text(f"open({str(canary)!r}, 'w')")
    auto_map = {"AutoConfig": "modeling.Config", "AutoModelForCausalLM": "modeling.Model"}
    load_config_model(write({**GPT2, "auto_map": auto_map, "architectures": ["Model"]}))
    assert not canary.exists()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "malformed JSON at line 1"),
        ("[1]", "expected a JSON object, found list"),
        ({"n_layer": 2}, "no 'model_type'"),
        ({"model_type": 3}, "no 'model_type'"),
        ({"model_type": "gptt2"}, "knows no model_type 'gptt2'; did you mean 'gpt2'?"),
        ({"model_type": "gpt2", "n_layer": "two"}, "transformers refuses it"),
        ({**GPT2, "n_head": 3}, "GPT2LMHeadModel raised ValueError"),
    ],
)
def test_bad_files_give_one_line(write, content, says):
    path = write(content)
    with pytest.raises(ConfigError) as caught:
        load_config_model(path)
    assert says in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_and_binary_files(tmp_path):
    with pytest.raises(ConfigError, match="cannot read the file: No such file"):
        load_config_model(tmp_path / "config.json")
    (tmp_path / "config.json").write_bytes(b'{"model_type": "\xff"}')
    with pytest.raises(ConfigError, match="not UTF-8 text at byte 16"):
        load_config_model(tmp_path / "config.json")
