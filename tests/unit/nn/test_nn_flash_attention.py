"""The attention modules: interfaces, layouts, scales and faults, against torch's scaled_dot_product_attention and fp64."""

import inspect
import math

import pytest
import torch
from attention_reference import alibi_bias, expected_attention
from torch.nn.functional import scaled_dot_product_attention

import smpc.v1 as smp
from smpc.nn import FlashAttentionLayer, FlashGroupedQueryAttention, FlashSelfAttention, LlamaFlashAttention


def signature(function: object) -> str:
    parameters = inspect.signature(function).parameters.values()
    return ", ".join(str(parameter.replace(annotation=inspect.Parameter.empty)) for parameter in parameters)


def test_signatures_are_those_of_smp():
    assert smp.nn.FlashAttentionLayer is FlashAttentionLayer
    assert signature(FlashAttentionLayer) == (
        "attention_dropout_prob=0.1, attention_head_size=None, scale_attention_scores=True, scale_attn_by_layer_idx=False, "
        "layer_idx=None, scale=None, triton_flash_attention=False, use_alibi=False"
    )
    assert signature(FlashAttentionLayer.forward) == "self, qkv, attn_mask=None, causal=False"
    assert (
        signature(FlashSelfAttention)
        == "attention_dropout_prob=0.0, scale=None, triton_flash_attention=False, use_alibi=False"
    )
    assert signature(FlashSelfAttention.forward) == (
        "self, qkv, attn_mask=None, causal=False, cast_dtype=None, layout='b h s d'"
    )
    assert signature(FlashGroupedQueryAttention) == "attention_dropout_prob=0.0, scale=None"
    assert (
        signature(FlashGroupedQueryAttention.forward) == "self, q, kv, causal=False, cast_dtype=None, layout='b s h d'"
    )
    assert signature(LlamaFlashAttention) == "config"
    documented = (
        "self, hidden_states, attention_mask=None, position_ids=None, past_key_value=None, output_attentions=False, "
        "use_cache=False"
    )
    assert signature(LlamaFlashAttention.forward) == f"{documented}, **transformers_arguments"


@pytest.mark.parametrize("triton", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_v1_layout(triton: bool, causal: bool):
    qkv = torch.randn(2, 7, 3, 4, 16)
    layer = FlashAttentionLayer(0.0, attention_head_size=16, triton_flash_attention=triton)
    q, k, v = (qkv[:, :, part].transpose(1, 2) for part in range(3))
    out = layer(qkv, causal=causal)
    assert out.shape == (2, 4, 7, 16)
    torch.testing.assert_close(out, scaled_dot_product_attention(q, k, v, is_causal=causal))


@pytest.mark.parametrize(
    ("settings", "scale"),
    [
        ({"attention_head_size": 16}, 0.25),
        ({"attention_head_size": 16, "scale_attn_by_layer_idx": True, "layer_idx": 3}, 0.0625),
        ({"scale_attention_scores": False, "scale_attn_by_layer_idx": True, "layer_idx": 1}, 0.5),
        ({"scale_attention_scores": False}, 1.0),
        ({"scale": 0.7}, 0.7),
        ({"scale": 0.7, "attention_head_size": 16, "scale_attn_by_layer_idx": True, "layer_idx": 3}, 0.7),
    ],
)
@pytest.mark.parametrize("triton", [False, True])
def test_v1_scale(settings: dict, scale: float, triton: bool):
    qkv = torch.randn(1, 5, 3, 2, 16)
    out = FlashAttentionLayer(0.0, triton_flash_attention=triton, **settings)(qkv)
    q, k, v = (qkv[:, :, part].transpose(1, 2) for part in range(3))
    torch.testing.assert_close(out, scaled_dot_product_attention(q, k, v, scale=scale))


def test_alibi_with_padding():
    qkv = torch.randn(2, 6, 3, 4, 16)
    mask = alibi_bias(4, 6).repeat(2, 1, 1, 1)
    mask[1, :, :, 4:] = -math.inf
    q, k, v = (qkv[:, :, part].transpose(1, 2) for part in range(3))
    expected, _ = expected_attention(q, k, v, mask, 0.25, True, 0)
    v1 = FlashAttentionLayer(0.0, 16, triton_flash_attention=True, use_alibi=True)
    v2 = FlashSelfAttention(triton_flash_attention=True, use_alibi=True)
    torch.testing.assert_close(v1(qkv, mask, causal=True), expected.float())
    torch.testing.assert_close(v2((q, k, v), mask, causal=True), expected.float())


def test_v2_layouts_agree():
    q, k, v = (torch.randn(2, 4, 5, 16) for _ in range(3))
    expected = scaled_dot_product_attention(q, k, v, is_causal=True)
    attention = FlashSelfAttention()
    flipped = tuple(part.transpose(1, 2) for part in (q, k, v))
    for qkv, layout in (
        ((q, k, v), "b h s d"),
        (torch.cat((q, k, v), 1), "b h s d"),
        (flipped, "b s h d"),
        (torch.cat(flipped, 2), "b s h d"),
    ):
        torch.testing.assert_close(attention(qkv, causal=True, layout=layout), expected)


def test_grouped_queries_and_cast():
    q, k, v = torch.randn(2, 5, 4, 16), torch.randn(2, 5, 2, 16), torch.randn(2, 5, 2, 16)
    expected = scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, enable_gqa=True)
    attention = FlashGroupedQueryAttention()
    torch.testing.assert_close(attention(q, (k, v), causal=True), expected)
    torch.testing.assert_close(attention(q, torch.cat((k, v), 2), causal=True), expected)
    torch.testing.assert_close(
        attention(q.transpose(1, 2), (k.transpose(1, 2), v.transpose(1, 2)), True, None, "b h s d"), expected
    )
    half = attention(q, (k, v.half()), causal=True, cast_dtype=torch.bfloat16)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), expected, rtol=0.05, atol=0.05)


def test_dropout_acts_in_training_alone():
    qkv = torch.randn(1, 30, 3, 2, 16)
    layer = FlashAttentionLayer(0.5, 16)
    assert not torch.equal(layer(qkv), layer(qkv))
    layer.eval()
    assert torch.equal(layer(qkv), layer(qkv))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "expected attention_head_size of 1 or more .* found None"),
        ({"attention_head_size": 8, "scale_attn_by_layer_idx": True}, "expected layer_idx .* found None"),
        (
            {"scale": 1.0, "triton_flash_attention": True},
            "attention_dropout_prob=0 with triton_flash_attention.* found 0.1",
        ),
        ({"scale": 1.0, "use_alibi": True}, "triton_flash_attention=True with use_alibi; found False"),
        ({"scale": 1.0, "attention_dropout_prob": 1.5}, "attention_dropout_prob of 0 to below 1; found 1.5"),
    ],
)
def test_bad_settings(settings: dict, message: str):
    with pytest.raises(ValueError, match=message):
        FlashAttentionLayer(**settings)


def test_bad_calls():
    layer = FlashAttentionLayer(0.0, 8)
    qkv = torch.randn(1, 4, 3, 2, 8)
    mask = torch.zeros(1, 1, 1, 4)
    with pytest.raises(
        ValueError,
        match=r"no attn_mask without triton_flash_attention=True and use_alibi=True; found one \[1, 1, 1, 4\]",
    ):
        layer(qkv, mask)
    with pytest.raises(ValueError, match=r"\[batch, sequence, 3, heads, head size\]; found \[1, 4, 2, 2, 8\]"):
        layer(qkv[:, :, :2])
    with pytest.raises(ValueError, match=r"heads of size 8.* found 4"):
        layer(qkv[..., :4])
    with pytest.raises(ValueError, match=r"found q torch\.int32"):
        layer(qkv.int())
    alibi = FlashAttentionLayer(0.0, 8, triton_flash_attention=True, use_alibi=True)
    with pytest.raises(ValueError, match="because use_alibi is set; found none"):
        alibi(qkv)
    with pytest.raises(ValueError, match=r"found \[1, 1, 1, 5\]"):
        alibi(qkv, torch.zeros(1, 1, 1, 5))
    v2 = FlashSelfAttention()
    with pytest.raises(ValueError, match="layout 'b h s d' or 'b s h d'; found 's b h d'"):
        v2(torch.randn(1, 6, 4, 8), layout="s b h d")
    with pytest.raises(ValueError, match=r"heads that 3 divides; found \[1, 4, 4, 8\]"):
        v2(torch.randn(1, 4, 4, 8))
    with pytest.raises(ValueError, match="a tensor or 2 tensors; found 3"):
        FlashGroupedQueryAttention()(torch.randn(1, 4, 2, 8), (torch.randn(1, 4, 2, 8),) * 3)
    with pytest.raises(ValueError, match="multiple of k's heads"):
        FlashGroupedQueryAttention()(torch.randn(1, 4, 3, 8), (torch.randn(1, 4, 2, 8),) * 2)
