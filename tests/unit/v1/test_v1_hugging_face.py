"""Full models under Hugging Face's names, tensor by tensor: the same as translating a whole state dict."""

import pytest
import torch
import zoo

import smpc.v1 as smp
from smpc.checkpoint.sources.conversion_sources import SourceItem
from smpc.errors import CheckpointError
from smpc.nn.huggingface.families import FAMILIES
from smpc.v1.saving.hugging_face import Ours, Theirs, format_of, is_hugging_face, texts_of

FORMATS = {name.split(".")[2]: family.installed for name, family in FAMILIES.items()}


class Memory:
    """A source of a state dict."""

    def __init__(self, tensors):
        self.tensors, self.metadata = tensors, {}
        self.items = [SourceItem("model", name, value.dtype, tuple(value.shape)) for name, value in tensors.items()]

    def read(self, item):
        return self.tensors[item.name]


def taken(source):
    found = {}
    for item in source.items:
        found[item.name] = value = source.read(item)
        assert (tuple(value.shape), value.dtype, value.is_contiguous()) == (item.shape, item.dtype, True), item
    return found


def same(found, expected):
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "bert", "t5", "vit"])
def test_tensor_by_tensor_is_as_the_whole(name):
    module, form = zoo.build(name)[0], FORMATS[name]
    theirs = {key: value.detach() for key, value in module.state_dict().items()}
    ours = taken(Ours(Memory(theirs), form))
    assert same(ours, form.to_smdistributed(theirs))
    assert ours.keys() != theirs.keys()
    back = taken(Theirs(Memory(ours), form))
    assert same(back, form.to_hf(ours))
    assert same(back, theirs)


def test_the_rules_of_a_model_are_found():
    module = zoo.build("gpt2")[0]
    assert is_hugging_face(module)
    assert not is_hugging_face(module.transformer.wte)
    assert format_of(module) is None
    texts = texts_of(module)
    assert '"architectures": [\n    "GPT2LMHeadModel"' in texts["config.json"]
    assert "generation_config.json" in texts
    smp.init({"pipeline_parallel_degree": 1})
    try:
        with smp.tensor_parallelism():
            module = zoo.build("gpt2")[0]
        assert format_of(smp.DistributedModel(module).get_module()) is FORMATS["gpt2"]
    finally:
        smp.shutdown()
    module.extra = torch.nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match=r"other names than Hugging Face's: extra.bias, extra.weight, "):
        format_of(module)
