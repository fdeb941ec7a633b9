"""TARGET: factories of files and modules, and one clear line when they are no good.

`--input`: what is accepted, and one clear line for what is not.

Hugging Face config files: the right class, no weights, no code, and one clear line for what is wrong.
"""

from __future__ import annotations

import json
import sys
import textwrap

import pytest
import torch
from torch import nn

from smpc.cli.model_target import InputSpec, check_names, load_config_model, load_target, parse_inputs
from smpc.errors import ConfigError

pytestmark = pytest.mark.usefixtures("clean_imports")


@pytest.fixture
def write(tmp_path):
    def write(text, name="factories.py"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return path

    return write


GOOD = """
    import torch
    from torch import nn
    from dataclasses import dataclass

    @dataclass
    class Settings:  # dataclasses look their module up in sys.modules
        size: "int" = 4

    def pair():
        return nn.Linear(Settings().size, 2), torch.ones(3, 4)

    def alone():
        return nn.Linear(4, 2)

    class Holder:
        @staticmethod
        def build():
            return pair()

    model = nn.Linear(4, 2)
    number = 7

    def wrong():
        return 3, 4, 5
"""


def test_file_factory(write):
    path = write(GOOD)
    for name in ("pair", "Holder.build"):
        model, inputs = load_target(f"{path}:{name}", ())
        assert isinstance(model, nn.Linear)
        assert torch.equal(inputs, torch.ones(3, 4))


def test_module_factory_in_the_current_folder(write, tmp_path, monkeypatch):
    write("", "pack/__init__.py")
    write(GOOD, "pack/inner.py")
    monkeypatch.chdir(tmp_path)
    model, inputs = load_target("pack.inner:pair", ())
    assert isinstance(model, nn.Linear)
    assert inputs.shape == (3, 4)


def test_file_imports_its_neighbours(write):
    write("SIZE = 5", "neighbour_of_factory.py")
    path = write("""
        from torch import nn
        import neighbour_of_factory
        def build():
            return nn.Linear(neighbour_of_factory.SIZE, 1), None
    """)
    model, _ = load_target(f"{path}:build", (InputSpec("input", "float32", (2, 5)),))
    assert model.in_features == 5


def test_file_does_not_replace_a_module_of_its_name(write):
    for name in ("types", "time"):
        before = sys.modules[name]
        model, _ = load_target(f"{write(GOOD, f'{name}.py')}:pair", ())
        assert isinstance(model, nn.Linear)
        assert sys.modules[name] is before


def test_inputs_by_shape_replace_those_of_the_factory(write):
    path = write(GOOD)
    for name in ("alone", "pair"):
        _, inputs = load_target(f"{path}:{name}", (InputSpec("input", "float32", (6, 4)),))
        assert list(inputs) == ["input"]
        assert inputs["input"].shape == (6, 4)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("alone", "gives a model without sample inputs: add --input NAME=DTYPE[d0,d1]"),
        ("wrong", "expected wrong to return (model, sample_inputs) or a model, found a tuple of 3"),
        ("bair", "has no 'bair'; did you mean 'pair'?"),
        ("Holder.bild", "has no 'Holder.bild'; did you mean 'build'?"),
        ("number", "expected a function of no arguments, found int 'number'"),
    ],
)
def test_unusable_factories(write, name, says):
    with pytest.raises(ConfigError) as caught:
        load_target(f"{write(GOOD)}:{name}", ())
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("raise ValueError('no\\nway')", "build raised ValueError: no way ({path}:5)"),
        ("helper()", "build raised ZeroDivisionError: division by zero ({path}:3)"),
        ("raise SystemExit(4)", "build raised SystemExit: 4 ({path}:5)"),
        ("import torch; torch.ones(2) @ torch.ones(3)", "({path}:5)"),
    ],
)
def test_raising_factory_is_named_with_its_line(write, body, says):
    path = write(f"""
        def helper():
            1 / 0
        def build():
            {body}
    """)
    with pytest.raises(ConfigError) as caught:
        load_target(f"{path}:build", ())
    assert says.format(path=path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x = 1\ndef build(:\n", "the file raised SyntaxError"),
        ("x = 1\nimport no_such_module_at_all\n", "the file raised ModuleNotFoundError"),
    ],
)
def test_file_that_does_not_import(write, text, says):
    path = write(text)
    with pytest.raises(ConfigError) as caught:
        load_target(f"{path}:build", ())
    assert says in str(caught.value)
    assert f"({path}:2)" in str(caught.value)


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("nothing", "expected module:factory, file.py:factory"),
        (":build", "expected module:factory"),
        ("module:", "expected module:factory"),
        ("missing.py:build", "file 'missing.py' does not exist"),
        ("missing.json", "no such file"),
        ("missing_module:build", "no module 'missing_module'"),
        ("missing_package.module:build", "no module 'missing_package.module'"),
        ("a/b:build", "no module 'a/b'"),
        ("..x:build", "no module '..x'"),
    ],
)
def test_targets_that_are_not_there(target, says):
    with pytest.raises(ConfigError) as caught:
        load_target(target, ())
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "dtype", "shape"),
    [
        ("x=int64[8,512]", torch.int64, (8, 512)),
        (" x = float32 [ 8 , 3 ] ", torch.float32, (8, 3)),
        ("x=bool[1]", torch.bool, (1,)),
        ("x=bfloat16[]", torch.bfloat16, ()),
        ("x=long[2]", torch.int64, (2,)),
    ],
)
def test_spec_becomes_a_tensor(text, dtype, shape):
    (spec,) = parse_inputs([text])
    tensor = spec.tensor()
    assert (spec.name, tensor.dtype, tuple(tensor.shape)) == ("x", dtype, shape)
    assert not tensor.any()


def test_masks_hide_nothing():
    (spec,) = parse_inputs(["attention_mask=int64[2,3]"])
    assert spec.tensor().all()


@pytest.mark.parametrize(
    "text",
    ["", "x", "x=int64", "x=int64[", "x=int64[3]]", "=int64[3]", "1x=int64[3]", "x=int64(3)", "x=int64[3;4]", "x=[3]"],
)
def test_malformed_input_says_the_form(text):
    with pytest.raises(ConfigError, match=r"expected NAME=DTYPE\[d0,d1\]") as caught:
        parse_inputs([text])
    assert repr(text) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["x=int64[0]", "x=int64[2,,3]", "x=int64[2,]", "x=int64[2 3]"])
def test_sizes_are_positive_numbers(text):
    with pytest.raises(ConfigError, match="sizes of at least 1"):
        parse_inputs([text])


def test_every_violation_has_a_line():
    with pytest.raises(ConfigError) as caught:
        parse_inputs(["a=int65[3]", "b=int64[3]", "b=int64[4]", "c", "d=Tensor[3]"])
    assert [line.split(": ")[1].split(";")[0] for line in str(caught.value).splitlines()] == [
        "unknown dtype 'int65'",
        "'b' is given twice",
        "expected NAME=DTYPE[d0,d1], for example input_ids=int64[8,512]",
        "unknown dtype 'Tensor'",
    ]
    assert "did you mean 'int64'?" in str(caught.value)


class _Model(nn.Module):
    def forward(self, tokens, mask, scale=1.0):
        return tokens


class _Anything(nn.Module):
    def forward(self, **inputs):
        return inputs["a"]


def _spec(name):
    return InputSpec(name, "int64", (2,))


def test_names_are_those_of_forward():
    check_names([_spec("tokens"), _spec("mask")], _Model())
    check_names([_spec("a"), _spec("b")], _Anything())


def test_unknown_names_are_reported_with_the_closest():
    with pytest.raises(ConfigError) as caught:
        check_names([_spec("token"), _spec("zzz")], _Model())
    first, second = str(caught.value).splitlines()
    assert first == (
        "--input token: _Model.forward has no input 'token'; did you mean 'tokens'?; it takes tokens, mask, scale"
    )
    assert second == "--input zzz: _Model.forward has no input 'zzz'; it takes tokens, mask, scale"


def test_missing_names_are_reported():
    with pytest.raises(ConfigError, match="forward also needs mask"):
        check_names([_spec("tokens")], _Model())


GPT2 = {"model_type": "gpt2", "n_layer": 2, "n_embd": 8, "n_head": 2, "vocab_size": 16, "n_positions": 8}
BERT = {"model_type": "bert", "num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 16}
T5 = {"model_type": "t5", "num_layers": 1, "d_model": 8, "d_ff": 8, "num_heads": 2, "d_kv": 4, "vocab_size": 16}
VIT = {"model_type": "vit", "num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "image_size": 16}


@pytest.fixture
def write_config(tmp_path):
    def write_config(content):
        path = tmp_path / "config.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    return write_config


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
def test_class_of_the_model(write_config, fields, expected):
    assert type(load_config_model(write_config(fields))).__name__ == expected


def test_model_trains_without_weights_or_cache(write_config):
    model = load_config_model(write_config({**GPT2, "torch_dtype": "bfloat16"}))
    assert {(p.device.type, str(p.dtype)) for p in model.parameters()} == {("meta", "torch.bfloat16")}
    assert model.training
    assert model.config.use_cache is False


def test_folder_with_a_config_is_a_target(write_config):
    folder = write_config(GPT2).parent
    model, inputs = load_target(str(folder), (InputSpec("input_ids", "int64", (2, 4)),))
    assert isinstance(model, nn.Module)
    assert inputs["input_ids"].shape == (2, 4)


def test_options_of_transformers_are_no_inputs(write_config):
    path = write_config(GPT2)
    with pytest.raises(ConfigError, match="has no input 'input_idz'; did you mean 'input_ids'"):
        load_target(str(path), (InputSpec("input_idz", "int64", (2, 4)),))


def test_config_names_no_code(write_config, tmp_path):
    canary = tmp_path / "canary"
    (tmp_path / "modeling.py").write_text(f"open({str(canary)!r}, 'w')")
    auto_map = {"AutoConfig": "modeling.Config", "AutoModelForCausalLM": "modeling.Model"}
    load_config_model(write_config({**GPT2, "auto_map": auto_map, "architectures": ["Model"]}))
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
def test_bad_files_give_one_line(write_config, content, says):
    path = write_config(content)
    with pytest.raises(ConfigError) as caught:
        load_config_model(path)
    assert says in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_and_binary_files(tmp_path):
    with pytest.raises(ConfigError, match="cannot read it: No such file"):
        load_config_model(tmp_path / "config.json")
    (tmp_path / "config.json").write_bytes(b'{"model_type": "\xff"}')
    with pytest.raises(ConfigError, match="not UTF-8 text at byte 16"):
        load_config_model(tmp_path / "config.json")
