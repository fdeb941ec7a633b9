"""Mixtures of experts for tests: Hugging Face's, tiny, and hand-written ones that route in ways of their own."""

import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY, LENGTH = 64, 8
_COMMON = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
           "num_key_value_heads": 2, "max_position_embeddings": 32, "num_experts_per_tok": 2, "use_cache": False,
           "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "attention_dropout": 0.0}  # fmt: skip
_DEEPSEEK = {**_COMMON, "num_key_value_heads": 4, "moe_intermediate_size": 16, "n_routed_experts": 4, "num_local_experts": 4,
             "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
             "first_k_dense_replace": 1, "n_shared_experts": 1}  # fmt: skip
SETTINGS = {
    "MixtralForCausalLM": {**_COMMON, "num_local_experts": 4},
    "Qwen2MoeForCausalLM": {**_COMMON, "num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24},
    "Qwen3MoeForCausalLM": {**_COMMON, "num_experts": 5, "moe_intermediate_size": 16, "head_dim": 8, "norm_topk_prob": True},
    "OlmoeForCausalLM": {**_COMMON, "num_experts": 4},
    "DeepseekV2ForCausalLM": {**_DEEPSEEK, "n_group": 1, "topk_group": 1},
    "DeepseekV3ForCausalLM": {**_DEEPSEEK, "n_group": 2, "topk_group": 1, "qk_head_dim": 16},
    "GptOssForCausalLM": {**_COMMON, "num_local_experts": 4, "head_dim": 8, "layer_types": ["full_attention"] * 2},
    "SwitchTransformersForConditionalGeneration": {
        "vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4,
        "num_experts": 4, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "dropout_rate": 0.0, "expert_capacity": 5,
        "router_jitter_noise": 0.0, "decoder_start_token_id": 0, "pad_token_id": 0, "use_cache": False},
    "NllbMoeForConditionalGeneration": {
        "vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_experts": 4, "encoder_sparse_step": 2, "decoder_sparse_step": 2,
        "dropout": 0.0, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0,
        "moe_token_dropout": 0.0, "expert_capacity": 64,
        "max_position_embeddings": 32, "decoder_start_token_id": 0, "pad_token_id": 0, "use_cache": False},
}  # fmt: skip


def hugging_face(name, dtype, implementation="eager", **more):
    import transformers

    model_class = getattr(transformers, name)
    config = model_class.config_class(**SETTINGS[name] | more)
    config._experts_implementation = implementation
    config._attn_implementation = "eager"
    model = model_class(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():  # some are zero, or not drawn at all
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(drawn * 0.2 + (1 if parameter.dim() == 1 else 0))
    return model.to(dtype)


def tokens(seed, rows=2):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (rows, LENGTH), generator=generator)
    return {"input_ids": ids, "labels": ids}


class Gated(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(width, 20), nn.Linear(width, 20), nn.Linear(20, width)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class LoopBlock(nn.Module):
    """Loops over a list of experts and skips those without tokens."""

    def __init__(self, width=16, num_experts=4):
        super().__init__()
        self.router = nn.Linear(width, num_experts, bias=False)
        self.experts = nn.ModuleList(Gated(width) for _ in range(num_experts))
        self.register_buffer("load", torch.zeros(num_experts))

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        weights, index = self.router(flat).softmax(-1).topk(2)
        self.load += index.flatten().bincount(minlength=len(self.experts))
        result = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows, slot = torch.where(index == number)
            if len(rows):
                result.index_add_(0, rows, expert(flat[rows]) * weights[rows, slot, None])
        return result.view_as(x), index


class SortedBlock(nn.Module):
    """Sorts tokens by expert, multiplies before the expert, and takes experts from a dictionary, last first."""

    def __init__(self, width=16, num_experts=4):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, num_experts) * 0.3)
        self.parts = nn.ModuleDict({f"e{i}": Gated(width) for i in range(num_experts)})

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        value, index = (flat @ self.weight).sigmoid().max(-1)
        order = index.argsort(stable=True)
        sizes = index.bincount(minlength=len(self.parts)).tolist()
        pieces = torch.split(flat[order] * value[order, None], sizes)
        found = [self.parts[f"e{i}"](pieces[i]) for i in reversed(range(len(pieces)))][::-1]
        return torch.zeros_like(flat).index_copy(0, order, torch.cat(found)).view_as(x)


class Stack(nn.Module):
    """One module with three-dimensional parameters, made by hand; `num` counts experts, and so does `width` by accident."""

    def __init__(self, width=16, num_experts=4):
        super().__init__()
        self.n, self.width = num_experts, width
        self.w1, self.w2 = (
            nn.Parameter(torch.randn(num_experts, width, 20) * 0.2),
            nn.Parameter(torch.randn(num_experts, 20, width) * 0.2),
        )

    def forward(self, tokens, chosen, gates):
        shown = F.one_hot(chosen, self.n).to(tokens.dtype)  # [N, k, E]
        every = torch.einsum(
            "neh,ehw->new", torch.einsum("nw,ewh->neh", tokens.view(-1, self.width), self.w1).relu(), self.w2
        )
        return torch.einsum("nke,nk,new->nw", shown, gates, every)


class StackBlock(nn.Module):
    def __init__(self, width=16, num_experts=4):
        super().__init__()
        self.router, self.inner = nn.Linear(width, num_experts), Stack(width, num_experts)

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        weights, index = self.router(flat).topk(2)
        return self.inner(flat, index, gates=weights.softmax(-1)).view_as(x)


class HandWritten(nn.Module):
    """Embedding, two residual blocks of experts, a head and the loss."""

    def __init__(self, block, **options):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.blocks = nn.ModuleList(block(**options) for _ in range(2))
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, input_ids, labels):
        x = self.embed(input_ids)
        for block in self.blocks:
            found = block(x)
            x = x + (found[0] if isinstance(found, tuple) else found)
        return {"loss": F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())}


HAND_WRITTEN = {"loop": LoopBlock, "sorted": SortedBlock, "stack": StackBlock}


def make(name, dtype=torch.float64, **more):
    if name in SETTINGS:
        return hugging_face(name, dtype, **more)
    torch.manual_seed(0)
    return HandWritten(HAND_WRITTEN[name], **more).to(dtype)


def one_process(model, batches):
    """The mean of the ranks' losses, and its gradients by name.

    Losses are summed and gradients divided after: models compute some steps in fp32, where a third more or less rounds otherwise.
    """
    loss = sum(model(**batch)["loss"] for batch in batches)
    loss.backward()
    gradients = {name: p.grad / len(batches) for name, p in model.named_parameters() if p.grad is not None}
    return loss.detach() / len(batches), gradients


def ranks_against_one_process(rank, folder, cases):
    """Work of one real rank. By case: errors of the loss and of a gradient, the share of parameters held."""
    import torch.distributed as dist

    from smpc.expert_parallel import shard

    found = {}
    for name, dtype, seeds in cases:
        batches = [tokens(seed) for seed in seeds]
        whole = make(name, getattr(torch, dtype))
        loss, gradients = one_process(whole, batches)
        module = shard(make(name, getattr(torch, dtype)), dist.group.WORLD)
        own = module(**batches[rank])["loss"]
        own.backward()
        module.average_gradients()
        losses = [torch.zeros_like(own) for _ in seeds]
        dist.all_gather(losses, own.detach())
        gathered = module.whole_gradients()
        assert gathered.keys() == gradients.keys()
        error = max(_error(gathered[key], expected) for key, expected in gradients.items())
        held = sum(p.numel() for p in module.parameters()) / sum(p.numel() for p in whole.parameters())
        found[name, dtype, seeds] = (_error(sum(losses) / len(losses), loss), error, held)
    return found


def _error(found, expected):
    return float((found - expected).abs().max() / expected.abs().max())
