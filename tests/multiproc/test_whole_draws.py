"""Ranks that share a model and are asked to draw as one process: dropout drops what it drops there, and generators end as there."""

import copy

import pytest
import torch
import torch.distributed as dist
import transformers
from executor_harness import run_workers
from torch import nn

import smpc.v1 as smp
from smpc import context_parallel, tensor_parallel
from smpc.executor.collectives import TensorGroup

BATCH, LENGTH, VOCABULARY, STEPS, SEED = 2, 16, 64, 2, 7
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"intermediate_size": 64, "max_position_embeddings": 32}


def gpt2(attention):
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=32, bos_token_id=0, eos_token_id=0, use_cache=False,
        attn_implementation=attention,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config), {}


def padded_bert(attention):
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    mask[0, 10:] = 0
    return transformers.BertForMaskedLM(transformers.BertConfig(**SIZES, attn_implementation=attention)), {
        "attention_mask": mask
    }


def llama_with_few_key_heads(attention):
    config = transformers.LlamaConfig(
        **SIZES, num_key_value_heads=2, attention_dropout=0.2, use_cache=False, attn_implementation=attention
    )
    return transformers.LlamaForCausalLM(config), {}


MODELS = {
    "gpt2": gpt2,
    "bert": padded_bert,
    "llama": llama_with_few_key_heads,
}


def made(name, attention):
    torch.manual_seed(0)
    model, more = MODELS[name](attention)
    ids = torch.randint(VOCABULARY, (BATCH, LENGTH))
    return model.train(), {"input_ids": ids, "labels": ids, **more}


def trained(model, batch):
    """The losses of two steps, the gradients of both, and what the generator gives next."""
    torch.manual_seed(SEED)
    losses = []
    for _ in range(STEPS):
        loss = model(**batch).loss
        loss.backward()
        losses.append(loss.item())
    return losses, torch.rand(4)


def share(rank, folder, name, attention):
    model, batch = made(name, attention)
    group = TensorGroup.of(dist.group.WORLD)
    found = {}
    sliced = tensor_parallel.shard(copy.deepcopy(model), batch, group, draw_as_one_process=True)
    found["tensor"] = *trained(sliced, batch), sliced.whole_gradients()
    cut = context_parallel.shard(copy.deepcopy(model), batch, group, draw_as_one_process=True)
    found["context"] = *trained(cut, batch), {name: p.grad for name, p in cut.model.named_parameters()}
    assert cut.rewritten.whole == ()
    return found


@pytest.mark.long
@pytest.mark.matrix(1)
@pytest.mark.parametrize(("name", "attention"), [("gpt2", "sdpa"), ("bert", "eager"), ("llama", "sdpa")])
def test_dropout_drops_what_it_does_on_one_process(tmp_path, name, attention):
    model, batch = made(name, attention)
    losses, after = trained(model, batch)
    wanted = {name: p.grad for name, p in model.named_parameters()}
    largest = max(grad.abs().max() for grad in wanted.values())
    for found in run_workers(share, 2, tmp_path, name, attention):
        for own_losses, own_after, gradients in found.values():
            assert own_losses == pytest.approx(losses, rel=1e-6)
            assert torch.equal(own_after, after)
            for one, grad in wanted.items():
                torch.testing.assert_close(gradients[one], grad, rtol=1e-5, atol=1e-6 * largest.item())


@smp.step
def train_step(model, ids):
    loss = model(input_ids=ids, labels=ids).loss
    model.backward(loss)
    return loss


def script(rank, folder):
    config = {"tensor_parallel_degree": 2, "tensor_parallel_plan": "auto", "ddp": True, "prescaled_batch": True}
    smp.init(config | {"draw_as_one_process": True})
    model, batch = made("gpt2", "sdpa")
    model = smp.DistributedModel(model)
    losses = []
    for step in range(STEPS):
        torch.manual_seed(SEED + step)
        losses.append(train_step(model, batch["input_ids"]).reduce_mean().item())
    smp.shutdown()
    return losses


@pytest.mark.long
def test_the_same_in_training_scripts(tmp_path):
    model, batch = made("gpt2", "sdpa")
    losses = []
    for step in range(STEPS):
        torch.manual_seed(SEED + step)
        losses.append(model(**batch).loss.item())
    for found in run_workers(script, 2, tmp_path):
        assert found == pytest.approx(losses, rel=1e-6)


class Noisy(nn.Module):
    """Draws otherwise than by dropout of a value: what depends on parameters runs whole."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        inner = nn.functional.alpha_dropout(self.up(x), 0.3, True) * torch.rand_like(x[..., :1])
        inner = nn.functional.dropout(inner * 2, 0.2, True, True)
        return self.down(inner * torch.bernoulli(torch.sigmoid(inner.detach()))).square().mean()


def noisy():
    torch.manual_seed(0)
    return Noisy(), torch.randn(4, 8, 16)


def share_noisy(rank, folder):
    model, x = noisy()
    sliced = tensor_parallel.shard(model, x, TensorGroup.of(dist.group.WORLD), draw_as_one_process=True)
    torch.manual_seed(SEED)
    loss = sliced(x)
    loss.backward()
    return loss.item(), torch.rand(4), sliced.whole_gradients()


def test_other_draws_are_those_of_one_process(tmp_path):
    model, x = noisy()
    torch.manual_seed(SEED)
    loss = model(x)
    loss.backward()
    after = torch.rand(4)
    for own, own_after, gradients in run_workers(share_noisy, 2, tmp_path):
        assert own == pytest.approx(loss.item(), rel=1e-6)
        assert torch.equal(own_after, after)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-5, atol=1e-7)
