"""Experts of a script's own in `smpc.v2`: beside slices of weights, and where other code than the experts uses their parameters."""

import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from executor_harness import run_workers
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import smpc.v2 as tsm
from smpc.errors import UsageError
from smpc.expert_parallel import register_experts
from smpc.v2.grad_norm import clip_grad_norm_

WIDTH, EXPERTS, WORDS = 12, 4, 32


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) * 0.2)
        self.down = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) * 0.2)

    def forward(self, hidden, index, weights):
        found = torch.zeros_like(hidden)
        for expert in range(self.up.shape[0]):
            token, slot = (index == expert).nonzero(as_tuple=True)
            if len(token):
                rows = F.silu(hidden[token] @ self.up[expert]) @ self.down[expert]
                found = found.index_add(0, token, rows * weights[token, slot, None])
        return found


class Block(nn.Module):
    def __init__(self, penalty):
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS, bias=False), Experts()
        self.penalty = penalty

    def forward(self, x):
        rows = x.reshape(-1, WIDTH)
        weights, index = self.router(rows).softmax(-1).topk(2, -1)
        x = x + self.experts(rows, index, weights).view_as(x)
        return x * self.experts.up.square().mean() if self.penalty else x


class Mixture(nn.Module):
    def __init__(self, *, penalty=False):
        super().__init__()
        self.embed, self.block, self.head = nn.Embedding(WORDS, WIDTH), Block(penalty), nn.Linear(WIDTH, WORDS)

    def forward(self, ids, labels):
        return F.cross_entropy(self.head(self.block(self.embed(ids))).flatten(0, 1), labels.flatten())


def built(*, penalty=False):
    torch.manual_seed(0)
    return Mixture(penalty=penalty).double()


def batch():
    ids = torch.randint(WORDS, (2, 4, 8), generator=torch.Generator().manual_seed(1))
    return {"ids": ids[0], "labels": ids[1]}


def beside_slices(rank, folder):
    tsm.init({"tensor_parallel_degree": 2})
    model = tsm.transform(built(), config={"sample_inputs": batch()})
    loss = model(**batch())
    loss.backward()
    tsm.state.reset()
    return loss.item(), {name: (tuple(p.shape), p.grad) for name, p in model.named_parameters()}


def test_experts_of_which_tensor_parallel_ranks_have_some(tmp_path):
    """The call of the experts was that of all of them: a program's view of a module had another forward, and the module its own."""
    model = built()
    loss = model(**batch())
    loss.backward()
    for rank, (found, gradients) in enumerate(run_workers(beside_slices, 2, tmp_path)):
        assert found == pytest.approx(loss.item(), rel=1e-12)
        for name in ("block.experts.up", "block.experts.down"):
            shape, gradient = gradients[name]
            assert shape[0] == EXPERTS // 2
            torch.testing.assert_close(gradient, model.get_parameter(name).grad[2 * rank : 2 * rank + 2])
        torch.testing.assert_close(gradients["block.router.weight"][1], model.block.router.weight.grad)


def wrapped(model, way):
    if way == "fully_shard":
        return fully_shard(model)
    policy = ModuleWrapPolicy({Block})
    flat = {"use_orig_params": way == "original", "device_id": torch.device("cpu")}
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, **flat)


def used_outside(rank, folder):
    found = []
    for way in ("fully_shard", "original", "flat"):
        for penalty in (False, True):
            tsm.init({"hybrid_shard_degree": 2, "expert_parallel_degree": 2})
            model = wrapped(tsm.transform(built(penalty=penalty)), way)
            try:
                for _ in range(2):
                    model(**batch()).backward()
            except UsageError as error:
                found.append((way, str(error)))
            tsm.state.reset()
    return found


def test_uses_of_experts_parameters_elsewhere_are_refused(tmp_path):
    """FSDP1 computed the penalty of this rank's part of this rank's experts; `fully_shard` ended in an error of DTensor's."""
    for found in run_workers(used_outside, 2, tmp_path):
        assert [way for way, _ in found] == ["fully_shard", "original", "flat"]
        assert all(text.startswith("block.experts.up: expected the experts alone") for _, text in found)


@partial(register_experts, parameters=("up", "down"))
class SharedScale(Experts):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, hidden, index, weights):
        return super().forward(hidden, index, weights) * self.scale


def partly():
    model = built()
    model.block = nn.Sequential(model.block, Block(False))
    model.block[1].experts = SharedScale()
    return model.double()


def updated(model, clip):
    """Norms of gradients, after which the weights have changed."""
    optimizer, norms = torch.optim.AdamW(model.parameters(), lr=0.1), []
    for _ in range(2):
        optimizer.zero_grad()
        model(**batch()).backward()
        norms.append(clip(model).item())
        optimizer.step()
    return norms


def divides_some(rank, folder):
    tsm.init({"hybrid_shard_degree": 2, "expert_parallel_degree": 2})
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        model = fully_shard(tsm.transform(partly()))
    norms = updated(model, lambda each: clip_grad_norm_(each, 0.5))
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    tsm.state.reset()
    return [str(each.message) for each in told if each.category is UserWarning], norms, whole


@pytest.mark.long
def test_experts_that_stay_whole_are_named(tmp_path):
    reference = partly()
    norms = updated(reference, lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.5))
    for rank, (told, found, whole) in enumerate(run_workers(divides_some, 2, tmp_path)):
        assert ["block.1.experts: all experts share scale" in text for text in told] == [True] * (rank == 0)
        assert found == pytest.approx(norms, rel=1e-9)
        for name, value in reference.state_dict().items():
            torch.testing.assert_close(whole[name], value, rtol=1e-9, atol=1e-11, msg=name)
