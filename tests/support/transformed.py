"""What the tests of transformed models share: small models, FSDP around them, training on real ranks, and one process to compare with."""

import functools

import pytest
import torch
import torch.distributed as dist
import transformers
from expert_models import LoopBlock
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    fully_shard,
)
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

import smpc.v2 as tsm
from smpc.v2.tensor_parallel.transformer import TransformerLayer

STEPS, BATCH, LENGTH, VOCABULARY = 3, 2, 16, 64
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 32,
    "max_position_embeddings": 32,
    "use_cache": False,
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
FAMILIES = {
    "llama": ("Llama", {"num_key_value_heads": 2}),
    "gpt_neox": ("GPTNeoX", {"hidden_dropout": 0.0, "attention_dropout": 0.0}),
    "mixtral": ("Mixtral", {"num_key_value_heads": 2, "num_local_experts": 4}),
    "gpt_oss": (
        "GptOss",
        {
            "num_key_value_heads": 2,
            "num_local_experts": 4,
            "head_dim": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": ROPE,
        },
    ),
    "dropout": ("GPTNeoX", {"hidden_dropout": 0.2, "attention_dropout": 0.2}),
}
SHARED = {"tensor_parallel_degree": 2, "hybrid_shard_degree": 2}
CONTEXT = {"context_parallel_degree": 2, "hybrid_shard_degree": 2}
EXPERTS = {"expert_parallel_degree": 2, "hybrid_shard_degree": 2}
WHOLE = {"hybrid_shard_degree": 2}
BOTH = {"tensor_parallel_degree": 2, "context_parallel_degree": 2}
WITH_TENSOR = {"expert_parallel_degree": 2, "tensor_parallel_degree": 2}
WITH_CONTEXT = {"expert_parallel_degree": 2, "context_parallel_degree": 2}


class ListedLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mixture = nn.LayerNorm(16), LoopBlock(16, 10)

    def forward(self, x):
        return x + self.mixture(self.norm(x))[0]


class Listed(nn.Module):
    """A language model whose experts are modules of their own; of few tokens some come to no expert."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY)
        self.layers = nn.ModuleList(ListedLayer() for _ in range(2))

    @property
    def dummy_inputs(self):
        return {"input_ids": torch.zeros(BATCH, LENGTH, dtype=torch.int64)}

    def forward(self, input_ids, labels=None, attention_mask=None):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        loss = (
            None
            if labels is None
            else nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        )
        return transformers.modeling_outputs.CausalLMOutput(loss, logits)


def build(family, seed=0, **more):
    torch.manual_seed(seed)
    if family == "listed":
        return Listed()
    name, options = FAMILIES[family]
    return getattr(transformers, f"{name}ForCausalLM")(
        getattr(transformers, f"{name}Config")(**SMALL, **options, **more)
    )


def wrapped(model, fsdp, *, checkpoints=False, use_orig_params=False, **options):
    """The model as a script wraps it."""
    if fsdp == 1:
        policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={TransformerLayer})
        model = FullyShardedDataParallel(
            model, auto_wrap_policy=policy, device_id=torch.device("cpu"), use_orig_params=use_orig_params, **options
        )
    elif fsdp == 2:
        for module in model.modules():
            if isinstance(module, TransformerLayer):
                fully_shard(module)
        fully_shard(model)
    if checkpoints:
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, TransformerLayer))
    return model


def batch(step, sample):
    generator = torch.Generator().manual_seed(100 * step + sample)
    return torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=generator)


def own_chunks(ids):
    """What a script passes of a sequence that context-parallel ranks share."""
    size, rank = tsm.state.cp_size, tsm.state.cp_rank
    if size == 1:
        return ids
    chunks = ids.chunk(2 * size, 1)
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]], 1)


def sample_of():
    """The number of the samples that this rank has; ranks of a tensor- or context-parallel group have the same."""
    return tsm.state.rank // (tsm.state.tp_size * tsm.state.cp_size)


def train(model, loss_of, steps=range(STEPS), optimizer=None):
    """Losses averaged over the ranks."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in steps:
        optimizer.zero_grad()
        first = tsm.state.tp_rank == tsm.state.cp_rank == 0
        torch.manual_seed(
            seed_of(step, sample_of()) if first else tsm.state.rank
        )  # ranks that share a model draw as the first one
        loss = loss_of(model, own_chunks(batch(step, sample_of())))
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / tsm.state.world_size)
    return losses


def seed_of(step, sample):
    return 1000 * step + sample


def loss_of_model(model, ids):
    return model(input_ids=ids, labels=ids, attention_mask=None).loss


def loss_of_script(model, ids):
    """A loss that the script computes from this rank's logits: each position predicts its own token."""
    logits = model(input_ids=ids).logits
    assert logits.shape == (*ids.shape, VOCABULARY)
    return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


@functools.cache
def reference(family, num_samples, loss_of, num_last=0):
    """Losses of one process on all samples; on `num_last` of them in the last step."""
    model = build(family)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        count = num_last if num_last and step == STEPS - 1 else num_samples
        total = 0.0
        for sample in range(count):
            torch.manual_seed(seed_of(step, sample))
            loss = loss_of(model, batch(step, sample)) / count
            loss.backward()
            total += loss.item()
        optimizer.step()
        losses.append(total)
    return losses


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)
