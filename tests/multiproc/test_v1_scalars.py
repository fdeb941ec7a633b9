"""Parameters without dimensions (CLIP's `logit_scale`), or without elements, in sharded models: whole on every rank, trained as in one
process, saved once."""

import math

import pytest
import torch
from executor_harness import run_workers
from torch import nn
from torch.distributed.tensor import DTensor

import smpc.v1 as smp

STEPS, HALF, MB, REPLICAS, NORM, GROWTH = 4, 2, 2, 2, 0.05, (0.5, 0.25)
SHARDED = {"sharded_data_parallel_degree": 2, "sdp_gradient_clipping": 0.0}
SEVERAL_GATHERS = {"sdp_max_live_parameters": 1, "sdp_param_persistence_threshold": 0}
CASES = [SHARDED | SEVERAL_GATHERS, {"fully_shard": True}]
FOUR = [
    {"fully_shard": True, "pipeline_parallel_degree": 2},
    {"fully_shard": True, "context_parallel_degree": 2},
    SHARDED,
]
SCALARS = ("logit_scale", "sometimes", "never", "blocks.0.gate", "blocks.1.gate")


class Gated(nn.Module):
    """`gate` alone is a parameter of the block itself."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.gate = nn.Linear(6, 10), nn.Linear(10, 6), nn.Parameter(torch.tensor(0.3))

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x))) * torch.tanh(self.gate)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.blocks = nn.Embedding(9, 6), nn.ModuleList([Gated(), Gated()])
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))
        self.sometimes, self.never = (nn.Parameter(torch.tensor(1.0)) for _ in range(2))
        self.none = nn.Parameter(torch.zeros(0, 3))

    def forward(self, ids, is_used):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        first, last = (nn.functional.normalize(side.mean(1), dim=-1) for side in x.chunk(2, dim=1))
        scores = first @ last.T * self.logit_scale.exp() + self.none.sum()
        if is_used:
            scores = scores * self.sometimes
        return nn.functional.cross_entropy(scores, torch.arange(len(scores)))


@smp.step
def train_step(model, ids, is_used):
    loss = model(ids, is_used)
    model.backward(loss)
    return loss


def make():
    torch.manual_seed(3)
    return Scaled().double()


def batch(step, part):
    return torch.randint(9, (3 * MB, 8), generator=torch.Generator().manual_seed(10 * step + part))


def is_used(step, part):
    """Whether a replica uses a scalar that others may not use; in a pipeline all would need the same program."""
    return (step + part) % 2 == 0


def optimizer_of(parameters):
    return torch.optim.AdamW(parameters, lr=0.1, eps=1.0)


def expected(replicas, always):
    """Losses, norms of gradients and the state at the end of one process, which clears gradients in every other step only."""
    model = make()
    optimizer, losses, norms = optimizer_of(model.parameters()), [], []
    for step in range(STEPS):
        found = []
        if step % 2 == 0:
            optimizer.zero_grad()
        for part in range(replicas):
            for ids in batch(step, part).chunk(MB):
                found.append(model(ids, always or is_used(step, part)))
                (found[-1] / MB / replicas).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), NORM))
        optimizer.step()
        losses.append(torch.stack(found).mean().detach())
    return torch.stack(losses), torch.stack(norms), model.state_dict()


def begin(config):
    smp.init({"microbatches": MB, "ddp": True, **config})
    model = smp.DistributedModel(make())
    return model, smp.DistributedOptimizer(optimizer_of(model.parameters()))


def train(model, optimizer, steps, always):
    losses, norms = [], []
    for step in steps:
        if step % 2 == 0:
            optimizer.zero_grad()
        ids, used = batch(step, smp.data_rank()), always or is_used(step, smp.data_rank())
        loss = train_step(model, ids, used).reduce_mean()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), NORM))
        optimizer.step()
        losses.append(torch.stack(smp.allgather(loss.detach(), smp.WORLD)).mean())
    return losses, norms


def trained(rank, folder, cases):
    """By case: losses, norms, the gathered state, and this rank's scalars; the second half is of another job, which loads the first's."""
    found = []
    for number, case in enumerate(cases):
        always = "pipeline_parallel_degree" in case
        model, optimizer = begin(case)
        losses, norms = train(model, optimizer, range(HALF), always)
        own = dict(model.local_named_parameters())
        assert {name for name, p in own.items() if not isinstance(p, DTensor)} == {*SCALARS, "none"} & {*own}
        if case.get("sharded_data_parallel_degree"):
            assert all(own[name].ds_numel == own[name].ds_tensor.ds_numel == 1 for name in SCALARS)
        smp.save_checkpoint(folder, f"half{number}", model=model, optimizer=optimizer)
        smp.shutdown()
        whole = {
            key: value for key, value in case.items() if key in ("pipeline_parallel_degree", "context_parallel_degree")
        }
        for config in (case, whole):
            model, optimizer = begin(config)
            smp.resume_from_checkpoint(folder, f"half{number}")
            rest = train(model, optimizer, range(HALF, STEPS), always)
            state = model.state_dict()
            for name, value in model.local_named_parameters():
                if name in SCALARS:
                    assert torch.equal(value.detach(), state[name])
            parts = smp.data_size()
            found.append((parts, always, torch.stack(losses + rest[0]), torch.stack(norms + rest[1]), state))
            smp.shutdown()
    return found


def check(folder, world, cases):
    for results in run_workers(trained, world, folder, cases):
        assert len(results) == 2 * len(cases)
        for parts, always, *found in results:
            for value, reference in zip(found, expected(parts, always), strict=True):
                torch.testing.assert_close(value, reference, rtol=1e-10, atol=1e-11)


@pytest.mark.long
def test_scalars_are_trained_and_saved_as_in_one_process(tmp_path):
    """They were refused by name, so that CLIP could not be sharded."""
    check(tmp_path, 2, CASES)


@pytest.mark.slow
def test_scalars_beside_other_degrees(tmp_path):
    check(tmp_path, 4, FOUR)
