"""Mixtures of experts written by hand, with batches of several lengths, for training scripts that divide the experts."""

import expert_models
import torch
from torch import nn
from torch.nn import functional as F

import smpc.v1 as smp

MB = 2
VOCABULARY = expert_models.VOCABULARY
BALANCED = ", balanced by a loss"  # of the router, as Hugging Face computes it


class Experts(nn.Module):
    """All experts in one module, with biases."""

    def __init__(self, num_experts, width, inner):
        super().__init__()
        self.num_experts = num_experts
        self.up = nn.Parameter(torch.randn(num_experts, width, inner) * 0.3)
        self.bias = nn.Parameter(torch.randn(num_experts, inner) * 0.3)
        self.down = nn.Parameter(torch.randn(num_experts, inner, width) * 0.3)

    def forward(self, hidden, index, weights):
        found = torch.zeros_like(hidden)
        for expert in range(self.num_experts):
            row, slot = (index == expert).nonzero(as_tuple=True)
            inner = F.gelu(hidden[row] @ self.up[expert] + self.bias[expert])
            found = found.index_add(0, row, (inner @ self.down[expert]) * weights[row, slot].unsqueeze(1))
        return found


class Block(nn.Module):
    def __init__(self, width, num_experts):
        super().__init__()
        self.norm, self.router = nn.LayerNorm(width), nn.Linear(width, num_experts, bias=False)
        self.experts = Experts(num_experts, width, 24)

    def forward(self, hidden):
        flat = self.norm(hidden).reshape(-1, hidden.shape[-1])
        weights, index = self.router(flat).softmax(-1).topk(2)
        return hidden + self.experts(flat, index, weights).view_as(hidden)


class Counting(Block):
    """Counts its calls, so that a pipeline calls it whole, with the experts in it."""

    def __init__(self, width, num_experts):
        super().__init__(width, num_experts)
        self.calls = 0

    def forward(self, hidden):
        self.calls += 1
        return super().forward(hidden)


class Listing(nn.Module):
    """Experts that are modules of their own; of which no token ever chooses the last."""

    def __init__(self, width, num_experts):
        super().__init__()
        self.norm, self.mixture = nn.LayerNorm(width), expert_models.LoopBlock(width, num_experts)
        with torch.no_grad():
            self.mixture.router.weight.abs_()[-1] = -1
        self.mixture.router.weight.requires_grad_(False)

    def forward(self, hidden):
        return hidden + self.mixture(self.norm(hidden).square())[0]


class Lopsided(Listing):
    """No token ever chooses the first half, so that a rank of two serves no rows; experts have a parameter that they never use."""

    def __init__(self, width, num_experts):
        super().__init__(width, num_experts)
        with torch.no_grad():
            self.mixture.router.weight.abs_()[: num_experts // 2] = -1
        for expert in self.mixture.experts:
            expert.spare = nn.Parameter(torch.ones(3))


class Sorting(nn.Module):
    """Experts that are modules of their own, all of them called, though it be without rows; no token ever chooses the last."""

    def __init__(self, width, num_experts):
        super().__init__()
        self.mixture = expert_models.SortedBlock(width, num_experts)
        with torch.no_grad():
            self.mixture.weight.abs_()[:, -1] = -1
        self.mixture.weight.requires_grad_(False)

    def forward(self, hidden):
        return hidden + self.mixture(hidden.square())


class Output(dict):
    loss = property(lambda self: self["loss"])


class ByHand(nn.Module):
    def __init__(self, num_experts=4, block=Block):
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY)
        self.blocks = nn.ModuleList(block(16, num_experts) for _ in range(2))

    def forward(self, input_ids, labels, attention_mask=None):
        hidden = self.embedding(input_ids)
        if attention_mask is not None:
            hidden = hidden * attention_mask.unsqueeze(-1)
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(hidden)
        return Output(loss=F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100), logits=logits)


def made(name, dtype=torch.float32):
    torch.manual_seed(5)
    if name == "by hand":
        return ByHand().to(dtype)
    block = {"listed": Listing, "sorted": Sorting, "lopsided": Lopsided, "counting": Counting}.get(name)
    if block is not None:
        return ByHand(block=block).to(dtype)
    plain = name.removesuffix(BALANCED)
    more = {} if plain == name else {"output_router_logits": True, "router_aux_loss_coef": 0.3}
    return expert_models.hugging_face(plain, dtype, **more)


def batch_of(step, part):
    """One data rank's batch: with padding, lengths and numbers of labels of its own."""
    generator = torch.Generator().manual_seed(10 * step + part)
    length = 8 + 2 * ((step + part) % 2)
    ids = torch.randint(3, VOCABULARY, (2 * MB, length), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(2 * MB):
        mask[row, length - (part + row + step) % 4 :] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


@smp.step
def train_step(model, batch):
    loss = model(**batch).loss
    model.backward(loss)
    return loss
