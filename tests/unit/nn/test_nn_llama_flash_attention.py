"""LlamaFlashAttention against transformers' own attention, by itself and inside a model."""

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from smpc.nn import LlamaFlashAttention


def tiny_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config).eval()


def replace(model: LlamaForCausalLM) -> LlamaForCausalLM:
    for index, layer in enumerate(model.model.layers):
        attention = LlamaFlashAttention(model.config)
        attention.load_state_dict(layer.self_attn.state_dict())
        attention.layer_idx = index
        layer.self_attn = attention
    return model.eval()


@pytest.mark.parametrize("padded", [False, True])
def test_takes_the_place_of_transformers_attention(padded: bool):
    tokens = torch.arange(14).view(2, 7)
    mask = torch.ones(2, 7, dtype=torch.long)
    if padded:
        mask[1, :3] = 0
    expected = tiny_model()(tokens, attention_mask=mask).logits
    found = replace(tiny_model())(tokens, attention_mask=mask).logits
    torch.testing.assert_close(found[mask.bool()], expected[mask.bool()], rtol=1e-4, atol=1e-5)


def test_generates_with_a_cache():
    tokens = torch.arange(5).view(1, 5)
    expected = tiny_model().generate(tokens, max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert torch.equal(
        replace(tiny_model()).generate(tokens, max_new_tokens=6, do_sample=False, pad_token_id=0), expected
    )


def test_documented_protocol():
    model = tiny_model()
    layer = replace(tiny_model()).model.layers[0].self_attn
    hidden = torch.randn(2, 7, 32)
    positions = torch.arange(7).expand(2, 7)
    rotation = model.model.rotary_emb(hidden, positions)
    mask = torch.ones(7, 7, dtype=torch.bool).tril()[None, None]
    expected, _ = model.model.layers[0].self_attn(hidden, rotation, mask)
    by_heads = expected.view(2, 7, 4, 8).transpose(1, 2)
    for states in (hidden, hidden.view(2, 7, 4, 8)):
        found = layer(states, None, positions, None, False, False)
        torch.testing.assert_close(found, by_heads, rtol=1e-4, atol=1e-5)
    padding = torch.ones(2, 7, dtype=torch.long)
    padding[0, 5:] = 0
    found = layer(hidden, padding, positions, None, False, False)
    torch.testing.assert_close(found[:, :, :5], by_heads[:, :, :5], rtol=1e-4, atol=1e-5)


def test_hidden_queries_are_zero():
    layer = LlamaFlashAttention(tiny_model().config)
    padding = torch.tensor([[0, 0, 1, 1]])
    found = layer(torch.randn(1, 4, 32), padding)
    assert not found[:, :, :2].any()
    assert found[:, :, 2:].isfinite().all()


def test_bad_input():
    layer = LlamaFlashAttention(tiny_model().config)
    hidden = torch.randn(1, 4, 32)
    with pytest.raises(ValueError, match="output_attentions=False"):
        layer(hidden, output_attentions=True)
    with pytest.raises(ValueError, match=r"hidden states \[batch, sequence, 32\]; found \[1, 4, 31\]"):
        layer(hidden[..., :31])
    with pytest.raises(ValueError, match="layer_idx"):
        layer(hidden, past_key_value=DynamicCache())
    with pytest.raises(ValueError, match=r"\[batch, keys\], here \[1, 4\]; found \[1, 5\]"):
        layer(hidden, torch.ones(1, 5))
