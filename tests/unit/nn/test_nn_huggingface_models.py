"""Models of Hugging Face's with distributed layers equal themselves: outputs, loss, gradients; and their state dicts translate exactly."""

import importlib
import inspect

import hugging_face
import pytest
import torch
from safetensors.torch import load_file
from tensor_ranks import run_ranks

from smpc.errors import UsageError
from smpc.nn import DistributedTransformerLayer
from smpc.nn.distribution.distribute import distribute, set_tensor_parallelism
from smpc.nn.distribution.registry import Registry
from smpc.nn.huggingface import families
from smpc.nn.parallel import TensorParallel, distributed_modules
from smpc.v1.nn.huggingface import gpt2


def whole(modules, value, prescaled):
    """What `value` gives for every parameter, of the whole parameter and the whole batch, by its name."""
    owners = [dict(distributed_modules(module)) for module in modules]
    found = {}
    for name, _ in modules[0].named_parameters():
        prefix, _, own = name.rpartition(".")
        slices = [value(module.get_parameter(name)) for module in modules]
        owner = owners[0].get(prefix)
        shard = None if owner is None else owner.shards.get(own)
        if shard is not None:
            found[name] = torch.cat(slices, shard.dim)
            continue
        is_own_batch = (owner is None or own in owner.local_batch) and not prescaled
        found[name] = sum(slices) if is_own_batch else slices[0]
        assert is_own_batch or all(torch.equal(slices[0], other) for other in slices), name
    return found


def chunk(arguments, rank, size, prescaled):
    return arguments if prescaled else {key: value.chunk(size)[rank] for key, value in arguments.items()}


def close(found, expected, name=""):
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, msg=lambda text: f"{name}: {text}")


def check(name, size, optimize, prescaled, masked):
    model = hugging_face.build(name)
    ranks = hugging_face.split(model, size, optimize, prescaled)
    expected_layers = sum(f"{type(m).__module__}.{type(m).__qualname__}" in families.FAMILIES for m in model.modules())
    for rank in ranks:
        assert sum(isinstance(m, DistributedTransformerLayer) for m in rank.modules()) == expected_layers > 0
    arguments = hugging_face.batch(name, hugging_face.BATCH * size, masked)
    expected = [model(**chunk(arguments, rank, size, prescaled)) for rank in range(1 if prescaled else size)]
    sum(output.loss for output in expected).backward()

    def run(rank):
        output = ranks[rank](**chunk(arguments, rank, size, prescaled))
        output.loss.backward()
        return output.loss.detach(), output.logits.detach()

    for rank, (loss, logits) in enumerate(run_ranks(size, run)):
        wanted = expected[0 if prescaled else rank]
        close(loss, wanted.loss.detach())
        close(logits, wanted.logits.detach())
    grads = whole(ranks, lambda p: torch.zeros_like(p) if p.grad is None else p.grad, prescaled)
    grads = hugging_face.FORMATS[hugging_face.MODELS[name][0]].to_hf(grads)
    wanted = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
    assert set(grads) == set(wanted)
    for parameter, grad in wanted.items():
        close(grads[parameter], grad, parameter)


CASES = [(1, "memory", False, True), (2, "memory", False, True), (4, "speed", True, True)]
MORE = [(4, "memory", False, True), (2, "speed", False, False), (4, "memory", True, False)]


@pytest.mark.matrix(12)
@pytest.mark.parametrize("name", hugging_face.MODELS)
@pytest.mark.parametrize(
    ("size", "optimize", "prescaled", "masked"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)],
)
def test_outputs_and_gradients_are_those_of_the_whole_model(name, size, optimize, prescaled, masked):
    check(name, size, optimize, prescaled, masked)


def is_forgotten(name, family):
    """Whether it is a buffer that distributed layers do not have."""
    return hugging_face.FORMATS[family].forgets(name)


@pytest.mark.parametrize("name", hugging_face.MODELS)
def test_state_dicts_translate_there_and_back_bit_for_bit(name):
    """Ours, made from theirs, is what the ranks hold; and back it is theirs again, for load_state_dict(strict=True)."""
    family = hugging_face.MODELS[name][0]
    module = importlib.import_module(f"smpc.v1.nn.huggingface.{family}")
    to_ours = vars(module)[f"translate_hf_state_dict_to_smdistributed_{family}"]
    to_theirs = vars(module)[f"translate_state_dict_to_hf_{family}"]
    assert to_ours is module.translate_hf_state_dict_to_smdistributed
    assert to_theirs is module.translate_state_dict_to_hf
    model = hugging_face.build(name)
    theirs = model.state_dict()
    ours = to_ours(theirs)
    held = whole(hugging_face.split(model, 2), lambda parameter: parameter.detach(), True)
    assert all(torch.equal(ours[key], value) for key, value in held.items())
    assert set(held) <= set(ours)
    back = to_theirs(ours)
    kept = {key: value for key, value in theirs.items() if not is_forgotten(key, family)}
    assert set(back) == set(kept)
    assert all(torch.equal(back[key], value) and back[key].stride() == value.stride() for key, value in kept.items())
    hugging_face.build(name, seed=9).load_state_dict({**theirs, **back})
    assert to_theirs(theirs).keys() == theirs.keys(), "what is theirs already stays"


@pytest.mark.parametrize("name", hugging_face.FORMATS)
def test_every_family_has_its_functions_by_all_their_names(name):
    module = importlib.import_module(f"smpc.v1.nn.huggingface.{name}")
    ours, theirs = module.translate_hf_state_dict_to_smdistributed, module.translate_state_dict_to_hf
    assert vars(module)[f"translate_hf_{name}_state_dict_to_smdistributed"] == ours
    assert vars(module)[f"translate_hf_state_dict_to_smdistributed_{name}"] == ours
    assert vars(module)[f"translate_state_dict_to_hf_{name}"] == theirs


@pytest.mark.parametrize("name", hugging_face.FORMATS)
def test_a_class_that_is_registered_with_the_hooks_of_its_family_is_distributed_as_the_family_is(name):
    module = importlib.import_module(f"smpc.v1.nn.huggingface.{name}")
    init_hook, forward_hook, return_hook = vars(module)[f"get_hf_{name}_transformer_layer_hooks"]()
    model, arguments = hugging_face.build(name), hugging_face.batch(name, hugging_face.BATCH)
    expected = model(**arguments)
    registry = Registry()
    layers = {type(m) for m in model.modules() if f"{type(m).__module__}.{type(m).__qualname__}" in families.FAMILIES}
    for layer in layers:
        registry.register(layer, DistributedTransformerLayer, init_hook, forward_hook, return_hook)
    for layer in [m for m in model.modules() if type(m) in layers]:
        set_tensor_parallelism(layer)
    model = distribute(model, registry, TensorParallel())
    assert not any(type(m) in layers for m in model.modules())
    found = model(**arguments)
    close(found.loss.detach(), expected.loss.detach())
    close(found.logits.detach(), expected.logits.detach())


def test_hooks_read_the_arguments_of_a_constructor():
    init_hook, _, _ = gpt2.get_hf_gpt2_transformer_layer_hooks()
    config = hugging_face.build("gpt2").config
    assert list(inspect.signature(init_hook).parameters) == ["config", "layer_idx"]
    args, kwargs = init_hook(config, layer_idx=1)
    assert args == ()
    assert (kwargs["num_attention_heads"], kwargs["hidden_size"]) == (config.n_head, config.n_embd)
    layer = DistributedTransformerLayer(**kwargs, parallel=TensorParallel())
    held = gpt2.translate_hf_block_state_dict_to_smdistributed(hugging_face.build("gpt2").transformer.h[1].state_dict())
    assert set(held) == set(layer.state_dict())
    layer.load_state_dict(held)
    back = gpt2.translate_layer_state_dict_to_hf_gpt2_block(held)
    theirs = hugging_face.build("gpt2").transformer.h[1].state_dict()
    assert all(torch.equal(back[key], value) for key, value in theirs.items())
    whole = hugging_face.build("gpt2").state_dict()
    ours = gpt2.translate_hf_block_state_dict_to_smdistributed(whole)
    assert ours.keys() == gpt2.translate_hf_state_dict_to_smdistributed(whole).keys()
    assert gpt2.translate_layer_state_dict_to_hf_gpt2_block(ours).keys() == whole.keys()


@pytest.mark.parametrize("name", ["gpt2", "gptj", "gptneo", "gptneox", "bert", "roberta", "t5", "vit"])
def test_files_of_save_pretrained_translate_too(tmp_path, name):
    model, form = hugging_face.build(name), hugging_face.FORMATS[name]
    model.save_pretrained(tmp_path, safe_serialization=True)
    saved = form.to_smdistributed(load_file(tmp_path / "model.safetensors"))
    expected = form.to_smdistributed(model.state_dict())
    assert set(form.to_smdistributed(dict(model.named_parameters()))) <= set(saved) <= set(expected)
    assert all(torch.equal(expected[key], value) for key, value in saved.items())


def test_buffers_of_older_releases_are_dropped():
    theirs = {
        "h.0.attn.bias": torch.ones(1, 1, 4, 4),
        "h.0.attn.masked_bias": torch.tensor(-1e4),
        "wte.weight": torch.ones(2),
    }
    assert list(hugging_face.FORMATS["gpt2"].to_smdistributed(theirs)) == ["wte.weight"]


def test_bad_state_dicts_are_refused():
    form = hugging_face.FORMATS["gpt2"]
    with pytest.raises(UsageError, match=r"missing: h.0.attention.key.weight, h.0.attention.value.weight"):
        form.to_hf({"h.0.attention.query.weight": torch.ones(2, 2)})
    with pytest.raises(UsageError, match=r"h.0.attn.c_attn.bias: expected 3 equal parts, found shape \(4,\)"):
        form.to_smdistributed({"h.0.attn.c_attn.bias": torch.ones(4)})
    with pytest.raises(TypeError, match="expected a mapping, found list"):
        form.to_hf([])
    with pytest.raises(TypeError, match="max_seq_len: expected an int or None, found str"):
        form.to_hf({}, max_seq_len="4")
    with pytest.warns(UserWarning, match="max_seq_len has no effect"):
        assert form.to_hf({}, max_seq_len=4) == {}
