"""Attention of torch.nn, opened: the call's own results and gradients, and heads and sequences that ranks share."""

import copy

import pytest
import torch
from tensor_ranks import run_ranks, tensor_groups
from torch import nn
from torch.nn import functional

from smpc import context_parallel, tensor_parallel
from smpc.codegen.rewrite.opened_attention import TARGET, open_attention
from smpc.codegen.rewrite.whole_draws import draw_whole
from smpc.tracer.record import record
from smpc.tracer.replay import replay

SAMPLES, LENGTH, WIDTH, HEADS = 2, 8, 32, 4
PADDING = torch.arange(LENGTH).repeat(SAMPLES, 1) >= torch.tensor([[5], [8]])


class Attends(nn.Module):
    """One layer; `look` makes the query, key and value and the options of the call of x."""

    def __init__(self, look, **options):
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, HEADS, **options)
        self.look = look

    def forward(self, x):
        tensors, options = self.look(x)
        found, weights = self.inner(*tensors, **options)
        return found.square().sum() + (weights.square().sum() if weights is not None else 0.0)


def one(**options):
    return lambda x: ((x, x, x), options)


def memory(x):
    return (x, x.flip(1)[:, :6] * 2, x.flip(1)[:, :6] * 2), {}


def one_memory(x):
    seen = x[:, :6] * 2
    return (x, seen, seen), {"need_weights": False}


def narrow(x):
    return (x, x[..., :24], x[..., 8:24]), {"need_weights": False}


def future(**options):
    def look(x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        return (x, x, x), {"attn_mask": mask, "is_causal": True, **options}

    return look


def of_heads(x):
    """A mask for each head that depends on values, as WavLM's positions do."""
    added = (x[:, :, None, :HEADS] * x[:, None, :, :HEADS]).permute(0, 3, 1, 2).reshape(-1, LENGTH, LENGTH)
    return (x, x, x), {"attn_mask": added, "key_padding_mask": PADDING.to(x.dtype) * -3.0}


def hidden(x):
    return (x, x, x), {"attn_mask": torch.ones(LENGTH, LENGTH).triu(1).bool(), "need_weights": False}


def alone(x):
    return (x[0], x[0], x[0]), {"key_padding_mask": PADDING[0]}


BATCHED = {"batch_first": True}
MANY = {
    "self": (one(need_weights=False), BATCHED),
    "padded, its weights": (one(key_padding_mask=PADDING), BATCHED),
    "weights of every head": (one(average_attn_weights=False), BATCHED),
    "samples second": (one(), {}),
    "three tensors, narrow keys": (narrow, BATCHED | {"kdim": 24, "vdim": 16}),
    "cross": (memory, BATCHED | {"bias": False}),
    "cross, one memory": (one_memory, BATCHED),
    "a key more": (one(key_padding_mask=PADDING, need_weights=False), BATCHED | {"add_bias_kv": True}),
    "two keys more": (future(), BATCHED | {"add_bias_kv": True, "add_zero_attn": True}),
    "causal": (future(need_weights=False), BATCHED),
    "causal and padded": (future(key_padding_mask=PADDING, need_weights=False), BATCHED),
    "a mask of heads": (of_heads, BATCHED),
    "a mask of truth values": (hidden, BATCHED | {"add_zero_attn": True}),
    "one sample": (alone, {"add_bias_kv": True}),
}


def made(look, options):
    torch.manual_seed(0)
    return Attends(look, **options).double(), torch.randn(SAMPLES, LENGTH, WIDTH, dtype=torch.float64)


def gradients(model):
    return {name: p.grad for name, p in model.named_parameters()}


def trained(run, model):
    loss = run(model)
    loss.backward()
    return loss.detach(), gradients(model)


def assert_same(found, expected):
    for mine, own in [(found[0], expected[0]), *((found[1][name], own) for name, own in expected[1].items())]:
        torch.testing.assert_close(mine, own, rtol=0, atol=1e-12 * max(1.0, own.abs().max().item()))


def on_ranks(modules, **inputs):
    def work(rank):
        loss = modules[rank](**inputs)
        loss.backward()
        own = modules[rank]
        return loss.detach(), own.whole_gradients() if hasattr(own, "whole_gradients") else gradients(own.model)

    return run_ranks(len(modules), work)


@pytest.mark.filterwarnings("ignore:Support for mismatched")
@pytest.mark.matrix(6)
@pytest.mark.parametrize("name", MANY)
def test_an_opened_call_is_the_call_and_its_heads_are_shared(name):
    """`multi_head_attention_forward` had no rule: its parameters were whole on every rank."""
    model, x = made(*MANY[name])
    trace = record(model, (x,))
    opened = open_attention(trace)
    assert TARGET not in {node.target for node in opened.nodes}
    expected = trained(lambda own: own(x), copy.deepcopy(model))
    assert_same(trained(lambda own: replay(opened, own, (x,)), copy.deepcopy(model)), expected)
    modules = [tensor_parallel.shard(copy.deepcopy(model), {"x": x}, group) for group in tensor_groups(2)]
    own = sum(p.numel() for p in modules[0].parameters())
    assert own < 0.51 * sum(p.numel() for p in model.parameters())
    for found in on_ranks(modules, x=x):
        assert_same(found, expected)


def test_what_has_no_such_call_or_is_given_keys_stays_as_it_is():
    class Given(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.MultiheadAttention(WIDTH, HEADS)

        def forward(self, x):
            inner, keys = self.inner, torch.ones(SAMPLES * HEADS, 3, WIDTH // HEADS)
            own = (inner.in_proj_weight, inner.in_proj_bias, None, None, False, 0.0)
            out = (inner.out_proj.weight, inner.out_proj.bias)
            tensors = (x, x, x, WIDTH, HEADS)
            return functional.multi_head_attention_forward(*tensors, *own, *out, static_k=keys, static_v=keys)[0]

    plain, given = record(nn.Linear(4, 4), (torch.ones(2, 4),)), record(Given(), (torch.ones(3, SAMPLES, WIDTH),))
    assert open_attention(plain) is plain
    assert TARGET in {node.target for node in open_attention(given).nodes}


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 64, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x):
        return self.layers(x, src_key_padding_mask=PADDING).square().mean()


def test_layers_of_torch_share_their_sequence():
    model = Encoder().double()
    x = torch.randn(SAMPLES, LENGTH, WIDTH, dtype=torch.float64)
    modules = [context_parallel.shard(copy.deepcopy(model), {"x": x}, group) for group in tensor_groups(2)]
    assert modules[0].rewritten.whole == ()
    expected = trained(lambda own: own(x), model)
    for found in on_ranks(modules, x=x):
        assert_same(found, expected)


@pytest.mark.parametrize("need_weights", [False, True])
def test_noise_that_is_drawn_whole_is_that_of_the_call(need_weights):
    torch.manual_seed(0)
    look, x = one(need_weights=need_weights), torch.randn(SAMPLES, LENGTH, WIDTH, dtype=torch.float64)
    model = Attends(look, dropout=0.25, **BATCHED).double()
    drawn = draw_whole(open_attention(record(model, (x,))))
    assert any(node.target.endswith("dropout_noise") for node in drawn.nodes)

    def seeded(run):
        torch.manual_seed(1)
        return run()

    expected = seeded(lambda: trained(lambda own: own(x), copy.deepcopy(model)))
    assert_same(seeded(lambda: trained(lambda own: replay(drawn, own, (x,)), copy.deepcopy(model))), expected)


class Widely(Attends):
    """With autocast of its own."""

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


def test_autocast_around_a_call_is_around_what_it_is_opened_to():
    torch.manual_seed(0)
    model, x = Widely(one(need_weights=False), **BATCHED), torch.randn(SAMPLES, LENGTH, WIDTH)
    opened = open_attention(record(model, (x,)))
    assert TARGET not in {node.target for node in opened.nodes}
    assert torch.equal(replay(opened, model, (x,)), model(x))
