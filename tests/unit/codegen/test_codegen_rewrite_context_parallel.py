"""Context parallelism found by the compiler against one process: loss and gradients, on ranks that are threads."""

import copy

import pytest
import torch
import transformers
from context_models import MODELS, assert_alike, made, on_ranks, padded, tokens
from tensor_ranks import run_ranks, tensor_groups
from torch import nn

from smpc.codegen.rewrite.context_parallel.rewrite import share_sequence
from smpc.context_parallel import describe, shard
from smpc.errors import ConfigError
from smpc.executor.collectives import TensorGroup
from smpc.tracer.record import record


def check(make, degree, dtype=torch.float32, **options):
    ranks, whole = on_ranks(tensor_groups(degree), make, dtype, **options)
    for _, found in ranks:
        assert_alike(found, whole, dtype)
    return ranks[0][0]


def collectives(module, layer):
    """What a layer communicates forward."""
    return [c.function for c in module.rewritten.sharded.collectives if c.module.startswith(layer) and c.forward_bytes]


@pytest.mark.long
def test_a_causal_model_gathers_keys_and_values_alone():
    module = check(MODELS["llama"], 2, layout="zigzag", attention="all_gather")
    assert collectives(module, "model.layers.1") == ["gather_in", "gather_in"]
    assert (module.rewritten.layout, module.rewritten.whole) == ("zigzag", ())
    text = describe(module)
    assert "sequence slices: zigzag" in text
    assert "gather_in Z(2) -> B" in text


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "layout"), [pytest.param("gpt2", "zigzag", marks=pytest.mark.slow), ("llama_padded", "contiguous")]
)
def test_layouts_are_chosen_by_the_attention(name, layout):
    module = check(MODELS[name], 2)
    assert (module.rewritten.layout, module.rewritten.whole) == (layout, ())


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layout"), [("llama", "contiguous"), ("llama_eager", "zigzag")])
def test_both_layouts_are_right_for_every_attention(name, layout):
    check(MODELS[name], 2, torch.float64, layout=layout)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "attention", "layout"), [("llama_padded", "p2p", "zigzag"), ("llama_padded", "a2a", "contiguous")]
)
def test_each_way_of_attention_is_right(name, attention, layout):
    """Padding goes around as hidden keys: the causal part of the mask is read from how it is made."""
    module = check(MODELS[name], 2, torch.float64, attention=attention)
    way = {"p2p": "ring_attention", "a2a": "exchanged_attention"}[attention]
    assert collectives(module, "model.layers.1") == [way]
    assert module.rewritten.layout == layout


@pytest.mark.long
def test_a_ring_s_messages_are_in_the_report():
    """Keys and values of the two key heads go on once; backward again, and their gradients twice."""
    module = check(MODELS["llama"], 2, attention="p2p")
    slices = 2 * 2 * 2 * 8 * 8 * 4  # keys and values [2, 2, 8, 8] in float32
    rings = [c for c in module.rewritten.sharded.collectives if c.function == "ring_attention"]
    assert [(c.forward_bytes, c.backward_bytes, c.overlaps) for c in rings] == [(slices, 3 * slices, True)] * 2
    assert "ring_attention Z(2) -> Z(2)" in describe(module)


class Windows(nn.Module):
    """Attention as scripts write it: a view of the result, and windows of a tensor that is laid out by columns."""

    def __init__(self):
        super().__init__()
        self.table, self.head, self.mix = nn.Embedding(64, 16), nn.Linear(16, 64), nn.Linear(16, 16)

    def forward(self, input_ids, labels):
        x = self.table(input_ids)
        heads = x.view(*input_ids.shape, 4, 4).transpose(1, 2)
        y = torch.nn.functional.scaled_dot_product_attention(heads, heads * 2, heads + 1, is_causal=True)
        y = y.transpose(1, 2).contiguous().view(x.size())
        columns = self.mix(y.transpose(0, 1)).transpose(0, 1)  # [batch, sequence, 16], the batch inside
        batch, length, width = columns.shape
        (rows, steps, ones), size = columns.stride(), (batch, length // 2 - 1, 4, width)
        windows = torch.as_strided(columns, size, (rows, 2 * steps, steps, ones))
        logits = self.head(y + windows.mean(axis=(1, 2), keepdims=True).squeeze(1))
        return torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels)


def test_views_of_what_is_laid_out_otherwise_on_a_rank():
    check(lambda: (Windows(), tokens()), 2, torch.float64, layout="zigzag")
    check(lambda: (Windows(), tokens()), 2, torch.float64, layout="contiguous", attention="all_gather")


@pytest.mark.long
def test_lengths_that_only_half_as_many_pieces_divide_are_cut_in_a_row():
    model, inputs = made(MODELS["llama"], length=18)
    modules = [shard(copy.deepcopy(model), inputs, group) for group in tensor_groups(2)]
    assert [module.rewritten.layout for module in modules] == ["contiguous"] * 2


class PerQuery(nn.Module):
    """Attention with a mask that hides other keys of every query, and with one that is learned."""

    def __init__(self):
        super().__init__()
        self.table, self.head, self.bias = nn.Embedding(64, 16), nn.Linear(16, 64), nn.Parameter(torch.zeros(4, 16, 16))

    def forward(self, input_ids, labels):
        x = self.table(input_ids)
        heads = x.unflatten(-1, (4, 4)).transpose(1, 2)
        same = input_ids[:, None, :, None] % 3 != input_ids[:, None, None, :] % 2
        first = torch.nn.functional.scaled_dot_product_attention(heads, heads * 2, heads + 1, same)
        second = torch.nn.functional.scaled_dot_product_attention(first, heads * 2, heads + 1, self.bias[None])
        logits = self.head(second.transpose(1, 2).flatten(2))
        return torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels)


@pytest.mark.parametrize("attention", ["p2p", "a2a", "all_gather"])
def test_what_a_ring_cannot_hide_is_gathered(attention):
    module = check(lambda: (PerQuery(), tokens()), 2, torch.float64, attention=attention)
    found = {c.function for c in module.rewritten.sharded.collectives if c.forward_bytes}
    assert "ring_attention" not in found
    assert ("exchanged_attention" in found) == (attention == "a2a")


def test_auto_takes_the_ring_where_a_step_computes_longer_than_it_sends():
    """By arithmetic alone, on fakes: sixteen heads over two key heads, and long sequences."""
    ways = {}
    for length, key_heads in ((64, 16), (65536, 2)):
        config = transformers.LlamaConfig(
            num_hidden_layers=1, hidden_size=256, num_attention_heads=16, num_key_value_heads=key_heads,
            intermediate_size=64, vocab_size=64, max_position_embeddings=length,
        )  # fmt: skip
        with torch.device("meta"):
            model = transformers.LlamaForCausalLM(config)
            ids = torch.zeros(1, length, dtype=torch.long)
        found = share_sequence(record(model, (), {"input_ids": ids, "use_cache": False}), 2)
        ways[length] = {c.function for c in found.sharded.collectives if "attn" in c.module and c.forward_bytes}
    assert ways[65536] == {"ring_attention"}
    assert ways[64] in ({"gather_in"}, {"exchanged_attention"})


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["p2p", "a2a", "all_gather"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "llama_padded", "neox", "qwen3", "bert"])
def test_every_model_in_every_way(name, attention):
    for degree in (2, 4):
        check(MODELS[name], degree, torch.float64, attention=attention)


@pytest.mark.slow
@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("name", MODELS)
def test_every_model_in_every_type(name, layout, dtype, degree):
    check(MODELS[name], degree, dtype, layout=layout)


@pytest.mark.long
def test_evaluation_uses_the_same_parameters():
    model, inputs = made(MODELS["llama"])
    modules = [shard(copy.deepcopy(model), inputs, group).eval() for group in tensor_groups(2)]

    def work(rank):
        with torch.no_grad():
            return modules[rank](**inputs).logits

    with torch.no_grad():
        expected = model.eval()(**inputs).logits
    for found in run_ranks(2, work):
        torch.testing.assert_close(found, expected)


def test_logits_that_nobody_wants_are_not_gathered():
    module = check(MODELS["llama"], 2, outputs=("loss",))
    assert [c.function for c in module.rewritten.sharded.collectives if not c.module and c.forward_bytes] == [
        "all_reduce"
    ]


class Mixed(nn.Module):
    """Attention between two mixers along the sequence that no rule knows."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(64, 16)
        self.conv = nn.Conv1d(16, 16, 3, padding=1)
        self.head = nn.Linear(16, 64)

    def forward(self, input_ids, labels):
        x = self.table(input_ids)
        x = x + self.conv(x.transpose(1, 2)).transpose(1, 2)
        x = x + torch.nn.functional.scaled_dot_product_attention(x, x * 2, x + 1, is_causal=True)
        x = x + x.cumsum(1) / 16
        logits = self.head(x)
        return torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, label_smoothing=0.1) + x.mean()


def test_what_no_rule_shares_is_whole_right_and_named():
    module = check(lambda: (Mixed(), tokens()), 2)
    named = [item.function for item in module.rewritten.whole]
    assert "conv1d" in named
    assert "cumsum" in named
    assert "scaled_dot_product_attention" not in named
    assert "computed whole on every rank" in describe(module)


class Summing(nn.Module):
    """Blocks that no rule shares."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(64, 16), nn.Linear(16, 64)
        self.blocks = nn.ModuleList(Running() for _ in range(3))

    def forward(self, input_ids, labels):
        x = self.table(input_ids)
        for block in self.blocks:
            x = block(x)
        return torch.nn.functional.cross_entropy(self.head(x).transpose(1, 2), labels)


class Running(nn.Module):
    def forward(self, x):
        return x + x.cumsum(1) / 16


def test_what_is_whole_in_blocks_that_are_alike_is_named_once():
    """A Mixtral of 56 layers had 168 lines of it."""
    _, _, named = describe(check(lambda: (Summing(), tokens()), 2)).partition("computed whole on every rank")
    assert "blocks.0 and 2 like it, to blocks.2" in named
    assert named.count("cumsum") == 1


class ByName(nn.Module):
    """Operations with arguments by name."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(64, 16), nn.Linear(16, 64)
        self.scale = nn.Parameter(torch.rand(16))

    def forward(self, input_ids, labels):
        x = torch.mul(self.table(input_ids), other=2.0)
        x = torch.reshape(input=x.view(dtype=x.dtype), shape=(len(x), -1, 16))
        x = nn.functional.layer_norm(weight=self.scale, normalized_shape=(16,), input=x)
        x = x + nn.functional.scaled_dot_product_attention(x, x * 2, x + 1, is_causal=True)
        return nn.functional.cross_entropy(self.head(x).transpose(1, 2), labels)


def test_arguments_by_name():
    module = check(lambda: (ByName(), tokens()), 2)
    assert "computed whole on every rank" not in describe(module)


class Places(nn.Module):
    """Numbers for every place of a sequence, of which it asks for the length alone."""

    def forward(self, hidden):
        length = hidden.shape[1]
        return torch.arange(1 - length, length, dtype=hidden.dtype)[length - 1 :].unsqueeze(-1) / length


class Placed(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.places, self.head = nn.Embedding(64, 8), Places(), nn.Linear(8, 64)

    def forward(self, input_ids, labels):
        hidden = torch.tanh(self.embed(input_ids))
        return nn.functional.cross_entropy(self.head(hidden + self.places(hidden)).flatten(0, 1), labels.flatten())


def test_a_module_that_asks_for_the_length_alone_is_not_called_with_a_slice():
    """Nothing inside of it differs between ranks, so it could be called as it is; but the slice that it got was half as long."""
    check(lambda: (Placed(), tokens()), 2)


class Losses(nn.Module):
    """Token losses with weights of classes, summed, and of flattened rows."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(64, 16), nn.Linear(16, 8)

    def forward(self, input_ids, labels):
        logits = self.head(self.table(input_ids))
        known = torch.where(labels < 0, labels, labels % 8)
        weight = torch.arange(1.0, 9.0, dtype=logits.dtype)
        rows = logits.view(-1, 8)
        weighed = torch.nn.functional.cross_entropy(rows, known.view(-1), weight)
        summed = torch.nn.functional.cross_entropy(rows, known.view(-1), reduction="sum")
        return weighed + 1e-3 * summed + (logits**2).mean()


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_losses_of_slices_are_over_all_tokens(layout):
    module = check(lambda: (Losses(), tokens()), 2, layout=layout)
    assert {c.function for c in module.rewritten.sharded.collectives if c.forward_bytes} == {"all_reduce"}


class WithCategories(nn.Module):
    """Integers beside the tokens, of a length of their own."""

    def __init__(self):
        super().__init__()
        self.table, self.kinds, self.head = nn.Embedding(64, 16), nn.Embedding(9, 16), nn.Linear(16, 64)

    def forward(self, input_ids, categories):
        x = self.table(input_ids) + self.kinds(categories).mean(1, keepdim=True)
        return torch.nn.functional.cross_entropy(self.head(x).flatten(0, 1), input_ids.flatten())


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_integers_that_are_no_sequence_may_have_any_length(layout):
    """They were refused, as sequences that cannot be cut."""
    ids = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(1))
    check(lambda: (WithCategories(), {"input_ids": ids, "categories": ids[:, :5] % 9}), 2, layout=layout)


def test_one_rank_runs_as_one_process():
    ((_, found),), whole = on_ranks([TensorGroup()], MODELS["llama"])
    assert_alike(found, whole)


@pytest.mark.parametrize(
    ("options", "length", "message"),
    [
        ({"layout": "zigzag"}, 18, r"length that 4 divides, .*zigzag.*input_ids has 18.*labels has 18.*'contiguous'"),
        ({}, 15, "length that 2 divides, for 2 ranks; found: input_ids has 15"),
        ({"layout": "contiguous"}, 15, "length that 2 divides, for 2 ranks; found: input_ids has 15"),
        ({"attention": "ulysses"}, 16, "expected one of auto, p2p, all_gather, a2a, found 'ulysses'"),
        ({"layout": "spiral"}, 16, "expected one of auto, contiguous, zigzag, found 'spiral'"),
        ({"sequence_dims": {"ids": 1}}, 16, "expected inputs among input_ids, labels, found ids"),
        ({"sequence_dims": {"input_ids": 2}}, 16, r"expected dimensions of input_ids from 0 to 1, found \[2\]"),
        ({"outputs": ("los",)}, 16, "expected names among loss, logits, found los"),
    ],
)
def test_errors_say_what_was_expected(options, length, message):
    model, inputs = made(MODELS["llama"], length=length)
    with pytest.raises(ConfigError, match=message):
        shard(model, inputs, tensor_groups(2)[0], **options)


def test_a_model_is_shared_once():
    model, inputs = made(MODELS["llama"])
    shard(model, inputs, tensor_groups(2)[0])
    with pytest.raises(ConfigError, match="sharded before"):
        shard(model, inputs, tensor_groups(2)[0])


def test_padding_counts_globally():
    """The samples have unequally many labels, so means of slices would not do."""
    labels = padded()["labels"]
    counted = [(half != -100).sum().item() for half in labels.chunk(2, 1)]
    assert counted[0] != counted[1]
