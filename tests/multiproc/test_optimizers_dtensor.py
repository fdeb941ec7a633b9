"""FSDP2's parameters, which are DTensors, train with the fused optimizers as whole parameters do; states are saved and loaded."""

import pytest
import torch
from executor_harness import run_workers
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate

from smpc.errors import CheckpointError, UsageError
from smpc.optimizers import FusedAdamW, FusedLamb, FusedNovoGrad, clip_grad_norm_

RANKS, STEPS = 2, 4
KINDS = (
    (FusedAdamW, {}),
    (FusedLamb, {"max_grad_norm": 0.1}),
    (FusedNovoGrad, {"weight_decay": 0.01}),
)


def check_all(rank, folder):
    for kind, options in KINDS:
        check(kind, options)
    check_refusals()


def made():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1)).double()  # uneven shards, and an empty one


def check(kind, options):
    mesh = init_device_mesh("cpu", (RANKS,))
    whole, sharded = made(), fully_shard(made(), mesh=mesh)
    pairs = [(model, kind(model.parameters(), lr=0.1, **options)) for model in (whole, sharded)]
    for step in range(STEPS):
        x = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        norms = []
        for model, optimizer in pairs:
            optimizer.zero_grad()
            model(x).pow(2).sum().backward()
            norms.append(clip_grad_norm_(model.parameters(), 3.0))
            optimizer.step()
        torch.testing.assert_close(norms[1], norms[0])
        if step == 1:  # continue with another optimizer and a loaded state
            state = get_optimizer_state_dict(sharded, pairs[1][1])
            other = kind(sharded.parameters(), lr=0.1, **options)
            set_optimizer_state_dict(sharded, other, state)
            pairs[1] = (sharded, other)
    for p, q in zip(whole.parameters(), sharded.parameters(), strict=True):
        assert isinstance(q, DTensor)
        assert isinstance(pairs[1][1].state[q]["exp_avg"], DTensor)
        torch.testing.assert_close(q.full_tensor(), p.detach())


def check_refusals():
    sharded = fully_shard(made())
    optimizer = FusedLamb(sharded.parameters())
    weight = next(sharded.parameters())
    whole = {"step": torch.tensor(1.0), "exp_avg": torch.zeros(5, 6), "exp_avg_sq": torch.zeros(5, 6)}
    with pytest.raises(CheckpointError, match="set_optimizer_state_dict"):
        optimizer.load_state_dict({**optimizer.state_dict(), "state": {0: whole}})
    weight.grad = weight.detach().redistribute(placements=[Replicate()])
    with pytest.raises(UsageError, match="expected a gradient placed like its parameter"):
        optimizer.step()


@pytest.mark.slow
def test_fsdp2(tmp_path):
    assert run_workers(check_all, RANKS, tmp_path) == [None] * RANKS
