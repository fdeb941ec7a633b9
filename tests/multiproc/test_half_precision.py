"""Pure bf16 models that ranks share: as near to the numbers of fp64 as plain PyTorch's bf16 is."""

import copy

import pytest
import torch
import torch.distributed as dist
from executor_harness import run_workers
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import smpc.context_parallel
import smpc.tensor_parallel
from smpc.executor.collectives import TensorGroup

SIZES = {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "hidden_size": 64,
    "intermediate_size": 160,
    "vocab_size": 96,
}
NONE = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MODELS = {
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(n_layer=2, n_head=4, n_embd=64, vocab_size=96, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    ),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(num_key_value_heads=2, **SIZES)),
    "bert": lambda: BertForMaskedLM(BertConfig(**SIZES, **NONE)),
}
SHARDS = {"context": smpc.context_parallel.shard, "tensor": smpc.tensor_parallel.shard}
ALLOWED = 1.5  # of eager bf16's own error; measured are 0.95 to 1.11


def made(name, seed):
    torch.manual_seed(seed)
    model = MODELS[name]().to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(2)  # as large as trained ones
    return model, torch.randint(0, 96, (4, 32))


def logits_of(model, ids):
    out = model(input_ids=ids, labels=ids)
    out.loss.backward()
    return out.logits.detach()


def error(found, reference):
    """Of all numbers together, relative."""
    far = sum((ours.double() - theirs).square().sum() for ours, theirs in zip(found, reference, strict=True))
    return (far / sum(each.square().sum() for each in reference)).sqrt()


def errors(rank, folder, name, axis):
    """Of logits and gradients: eager's and ours, over some seeds."""
    found = torch.zeros(2, 2, dtype=torch.float64)
    for seed in range(2):
        model, ids = made(name, seed)
        exact, plain = copy.deepcopy(model).double(), copy.deepcopy(model)
        sharded = SHARDS[axis](model, {"input_ids": ids, "labels": ids}, TensorGroup.of(dist.group.WORLD))
        logits, *others = [logits_of(each, ids) for each in (exact, plain, sharded)]
        found[:, 0] += torch.stack([error([own], [logits]) for own in others])
        names = [key for key, _ in exact.named_parameters()]
        whole = {key: p.grad for key, p in model.named_parameters()} if axis == "context" else sharded.whole_gradients()
        reference = [exact.get_parameter(key).grad for key in names]
        for row, own in enumerate(({key: plain.get_parameter(key).grad for key in names}, whole)):
            found[row, 1] += error([own[key] for key in names], reference)
    return found


@pytest.mark.long
@pytest.mark.matrix(3)
@pytest.mark.parametrize("axis", SHARDS)
@pytest.mark.parametrize("name", MODELS)
def test_bf16_is_as_near_to_fp64_as_eager(tmp_path, name, axis):
    for eager, ours in run_workers(errors, 2, tmp_path, name, axis):
        assert torch.all(ours < ALLOWED * eager), f"logits and gradients: eager {eager.tolist()}, ours {ours.tolist()}"
