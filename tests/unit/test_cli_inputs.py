"""`--input`: what is accepted, and one clear line for what is not."""

import pytest
import torch
from torch import nn

from smpc.cli.inputs import InputSpec, check_names, parse_inputs
from smpc.errors import ConfigError


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
