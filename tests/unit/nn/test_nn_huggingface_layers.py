"""What distributed layers of Hugging Face's models take over, what they refuse, and which layers are left alone."""

import copy
import functools
import inspect
import warnings

import hugging_face
import pytest
import torch
from hugging_face import HIDDEN
from tensor_ranks import run_ranks, tensor_groups

from smpc.errors import UsageError
from smpc.nn import DistributedTransformerLayer
from smpc.nn.distribution.distribute import distribute, set_tensor_parallelism, tensor_parallelism
from smpc.nn.distribution.registry import Registry
from smpc.nn.huggingface import families
from smpc.nn.parallel import TensorParallel
from smpc.tracer.regions import CheckpointMark, checkpoint_mark, mark_checkpoint


def distributed(model, size=1, **kwargs):
    """What rank 0 has, and the warnings."""
    set_tensor_parallelism(model, **kwargs)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = distribute(model, Registry(), TensorParallel(tensor_groups(size)[0]))
    return found, [str(warning.message) for warning in caught]


def states(output):
    """The hidden states that a layer returns, alone or in a tuple."""
    return output[0] if isinstance(output, tuple) else output


def layers(model):
    return [module for module in model.modules() if isinstance(module, DistributedTransformerLayer)]


@pytest.mark.parametrize(
    ("name", "changes", "size", "reason"),
    [
        (
            "gpt2",
            {"activation_function": "mish"},
            1,
            "h.0 (GPT2Block) is not distributed by tensor parallelism: its activation 'mish'",
        ),
        ("bert", {"num_attention_heads": 2}, 4, "num_attention_heads divisible by tensor_parallel_degree 4, found 2"),
    ],
)
def test_what_cannot_be_distributed_is_left_alone_and_said(name, changes, size, reason):
    model, texts = distributed(hugging_face.build(name, **changes), size)
    assert not layers(model)
    assert any(reason in text for text in texts)


def test_layers_that_someone_has_changed_are_left_alone():
    model = hugging_face.build("gpt2")
    model.transformer.h[0].attn.adapter = torch.nn.Linear(HIDDEN, HIDDEN)
    model.transformer.h[1].register_forward_hook(lambda module, args, output: output)
    model, texts = distributed(model)
    assert [isinstance(layer, DistributedTransformerLayer) for layer in model.transformer.h] == [False, True]
    assert any("tensors that such layers do not have: attn.adapter.weight, attn.adapter.bias" in text for text in texts)
    assert any(
        "h.1 (GPT2Block): hooks that were registered on it are not on its distributed version" in text for text in texts
    )


def test_arguments_of_the_context_override_the_configuration():
    with tensor_parallelism(attention_dropout_prob=0.25, activation="relu"):
        model = hugging_face.build("gptneox")
    layer = layers(distribute(model, Registry(), TensorParallel()))[0]
    assert (layer.attention.attention_dropout_prob, layer.output.activation) == (0.25, "relu")


def test_what_was_said_of_layers_holds_for_what_replaces_them():
    model = hugging_face.build("gpt2").to(torch.bfloat16)
    first, second = model.transformer.h
    mark_checkpoint(first, CheckpointMark(preserve_rng_state=False))
    vars(first)["_smpc_partition"] = 1
    first.attn.c_attn.weight.requires_grad_(False)
    second.gradient_checkpointing = True
    second.eval()
    model, _ = distributed(model)
    first, second = model.transformer.h
    assert checkpoint_mark(first) == CheckpointMark(preserve_rng_state=False)
    assert checkpoint_mark(second) == CheckpointMark()
    assert vars(first)["_smpc_partition"] == 1
    assert first.training
    assert not second.training
    frozen = {name for name, parameter in first.named_parameters() if not parameter.requires_grad}
    assert frozen == {"attention.query.weight", "attention.key.weight", "attention.value.weight"}
    assert {parameter.dtype for parameter in first.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("name", "wish"),
    [
        ("gpt2-eager", "output_attentions"),
        ("gptj", "output_attentions"),
        ("bert", "output_hidden_states"),
        ("gptj", "output_hidden_states"),
    ],
)
def test_what_layers_do_not_return_is_refused(name, wish):
    model, _ = distributed(hugging_face.build(name))
    with pytest.raises(UsageError, match=rf"{wish}(, \w+)?: a distributed \w+ neither returns nor takes it"):
        model(**hugging_face.batch(name, 2), **{wish: True})


def test_masks_that_are_no_tensors_are_refused():
    model, _ = distributed(hugging_face.build("gpt2"))
    with pytest.raises(UsageError, match="attention_mask: expected a tensor, found object"):
        model.transformer.h[0](torch.zeros(1, 2, HIDDEN), attention_mask=object())


def test_missing_positions_are_refused():
    model, _ = distributed(hugging_face.build("gptneox"))
    with pytest.raises(UsageError, match=r"position_(embeddings|ids): expected .* found None"):
        model.gpt_neox.layers[0](torch.zeros(1, 2, HIDDEN))


def test_masks_of_padding_alone_are_understood():
    """As flash attention is given them: [N, S], 1 where there is no padding; the rest is causal."""
    model = hugging_face.build("gpt2")
    hidden, padding = torch.randn(2, 4, HIDDEN), torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    causal = torch.ones(4, 4, dtype=torch.bool).tril() & padding.bool()[:, None, None]
    least = torch.zeros(2, 1, 4, 4).masked_fill(~causal, torch.finfo(hidden.dtype).min)
    expected = states(model.transformer.h[0](hidden, attention_mask=least))
    layer = distributed(model)[0].transformer.h[0]
    torch.testing.assert_close(states(layer(hidden, attention_mask=padding)), expected)
    if "kwargs" in inspect.signature(type(model.transformer.h[0]).forward).parameters:
        with pytest.raises(UsageError, match="cu_seq_lens_q: a distributed GPT2Block"):
            layer(hidden, cu_seq_lens_q=torch.tensor([0, 4]))


def test_layers_that_share_biases_are_distributed_together():
    model = hugging_face.build("t5")
    set_tensor_parallelism(model.encoder.block)
    set_tensor_parallelism(model.encoder.block[0], False)
    ranks = [distribute(model, Registry(), TensorParallel(tensor_groups(2)[0], prescaled_batch=True))]
    with pytest.raises(ValueError, match="2 heads, found 4; distribute all layers of a model that shares them"):
        ranks[0](**hugging_face.batch("t5", 2))


@pytest.mark.parametrize("name", ["gpt2", "gptj", "gptneox", "t5"])
def test_generated_tokens_are_those_of_the_whole_model(name):
    """Caches hold the keys and values of each rank's heads."""
    model = hugging_face.build(name).eval()
    arguments = {key: value for key, value in hugging_face.batch(name, 2).items() if key != "labels"}
    arguments["attention_mask"] = torch.ones_like(arguments["input_ids"])
    wishes = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "use_cache": True}
    expected = model.generate(**arguments, **wishes)
    ranks = hugging_face.split(model, 2, "speed", prescaled=True)
    for found in run_ranks(2, lambda rank: ranks[rank].generate(**arguments, **wishes)):
        assert torch.equal(found, expected)


def test_float16_is_clamped_as_t5_does():
    model = hugging_face.build("t5").half()
    with torch.no_grad():
        model.encoder.block[0].layer[1].DenseReluDense.wi.weight.fill_(1.0)
        model.encoder.block[0].layer[1].DenseReluDense.wo.weight.fill_(6e4)
    hidden = torch.full((1, 2, HIDDEN), 3e4, dtype=torch.float16)
    block = model.encoder.block[0]
    has_places = "cache_position" in inspect.signature(block.forward).parameters
    places = {"cache_position": torch.arange(2)} if has_places else {}
    expected = block(hidden, **places)[0]
    found = distributed(model)[0].encoder.block[0](hidden, **places)[0]
    assert expected.isfinite().all()
    assert expected.abs().max() > 6e4
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=1)


@pytest.mark.parametrize(
    ("name", "stacks"),
    [
        ("gpt2", {"transformer": "h"}),
        ("gptj", {"transformer": "h"}),
        ("gptneo", {"transformer": "h"}),
        ("gptneox", {"transformer": "layers"}),
        ("bert", {"bert.encoder": "layer"}),
        ("roberta", {"roberta.encoder": "layer"}),
        ("t5", {"encoder": "block", "decoder": "block"}),
        ("vit", {"vit": "layers"}),
    ],
)
@pytest.mark.parametrize("size", [1, 2])
def test_stacks_have_their_layers_as_seq_layers(name, stacks, size):
    model = hugging_face.build(name)
    plain = copy.deepcopy(model)
    assert not any("seq_layers" in vars(module) for module in plain.modules())
    for layer in [m for m in model.modules() if f"{type(m).__module__}.{type(m).__qualname__}" in families.FAMILIES]:
        set_tensor_parallelism(layer)
    found = distribute(model, Registry(), TensorParallel(tensor_groups(size)[0]))
    if name == "vit" and hugging_face.is_before_5():
        stacks = {"vit.encoder": "layer"}
    for path, own in stacks.items():
        stack = functools.reduce(getattr, path.split("."), found)
        assert stack.seq_layers is getattr(stack, own)
        assert all(isinstance(layer, DistributedTransformerLayer) for layer in stack.seq_layers)
    assert not any("seq_layers" in key for key, _ in found.named_parameters())
