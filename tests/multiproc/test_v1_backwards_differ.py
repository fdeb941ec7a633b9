"""Sharded parameters of blocks that all replicas call, but that not all of them differentiate."""

import pytest
import torch
from executor_harness import run_workers
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from v1_harness import FOR_A_MICROBATCH, FOR_THE_STEP, WHILE_RUNNING, Block

import smpc.v1 as smp
from smpc.errors import PeerError, StepError

STEPS, MB, REPLICAS = 3, 2, 2


class Branches(nn.Module):
    """A body, two branches of blocks of one size, and a block that is shared by both. What is stashed is no output of the model. `call`:
    how a block is called; `borrows`: how the second branch uses a weight of a block that it does not call."""

    def __init__(self, call=lambda block, x: block(x), borrows=None):
        super().__init__()
        self.call, self.borrows = call, borrows
        self.embed, self.head = nn.Embedding(9, 6), nn.Linear(6, 9)
        self.blocks = nn.ModuleList([Block() for _ in range(6)])

    def forward(self, ids):
        x = self.call(self.blocks[0], self.embed(ids))
        first = self.call(self.blocks[1], x)
        second = self.call(self.blocks[3], self.call(self.blocks[2], x))
        if self.borrows:
            second = self.borrows(self.blocks[1], second)
        self.stash = self.blocks[4](x.detach()).pow(2).mean()
        first, second = self.blocks[5](first), self.blocks[5](second)
        return nn.functional.cross_entropy(self.head(first).flatten(0, 1), ids.flatten()), second.pow(2).mean()


def recomputed(block, x):
    return checkpoint(block, x, use_reentrant=False)


def recomputed_anew(block, x):
    return checkpoint(block, x, use_reentrant=True)


def borrowed(block, x):
    return nn.functional.linear(x, block.down.weight[:, :6])


def borrowed_again(block, x):
    return checkpoint(lambda x: nn.functional.linear(x, block.up.weight)[..., :6], x, use_reentrant=False)


def borrowed_anew(block, x):
    return checkpoint(lambda x: nn.functional.linear(x, block.up.weight)[..., :6], x, use_reentrant=True)


def made_again(block, x):
    return checkpoint(borrowed, block, x, use_reentrant=False)


def make(options):
    torch.manual_seed(3)
    return Branches(**options).double()


def kinds(step, part, microbatch):
    """Which parts of the loss a microbatch has; in the last step, all replicas the same."""
    table = [["ab", "a"], ["b", "a"], ["as", "b"], ["a", "abs"], ["a", "a"], ["ab", "ab"]]
    return table[(2 * step + microbatch) % 6][part if step < 2 else 0]


def loss_of(model, ids, kind):
    first, second = model(ids)
    loss = ids.new_zeros((), dtype=torch.float64)
    if "a" in kind:
        loss = loss + first
    if "b" in kind:
        loss = loss + second
    if "s" in kind:
        loss = loss + unwrapped(model).stash
    return loss


def unwrapped(model):
    while not isinstance(model, Branches):
        model = model.module
    return model


def batch(step, part):
    return torch.randint(9, (2 * MB, 8), generator=torch.Generator().manual_seed(10 * step + part))


def optimizer_of(parameters):
    return torch.optim.AdamW(parameters, lr=0.1, eps=1.0)  # whose decay tells a gradient of zero from none


def expected(microbatches, options):
    """Losses, parameters after each step, and who has a gradient, of one process over all samples; it clears every other step."""
    model = make(options)
    optimizer, losses, states, reached = optimizer_of(model.parameters()), [], [], []
    for step in range(STEPS):
        if step % 2 == 0:
            optimizer.zero_grad()
        found = []
        for part in range(REPLICAS):
            for i, ids in enumerate(batch(step, part).chunk(microbatches)):
                found.append(loss_of(model, ids, kinds(step, part, i)))
                (found[-1] / (REPLICAS * microbatches)).backward()
        optimizer.step()
        losses.append((sum(found) / len(found)).item())
        states.append({name: value.clone() for name, value in model.state_dict().items()})
        reached.append({name for name, p in model.named_parameters() if p.grad is not None})
    return losses, states, reached


@smp.step
def train_step(model, ids, kind):
    loss = loss_of(model, ids, "".join(chr(k) for k in kind[0].tolist() if k))
    model.backward(loss)
    return loss.detach()


def in_steps(model, step, part):
    kind = torch.tensor([[ord(c) for c in kinds(step, part, i).ljust(3, "\0")] for i in range(MB)])
    return train_step(model, batch(step, part), kind.repeat_interleave(2, 0)).reduce_mean()


def without_steps(model, step, part):
    loss = loss_of(model, batch(step, part), kinds(step, part, 0))
    loss.backward()
    return loss.detach()


def trained(rank, folder, cases, options):
    found = []
    for config, way in cases:
        smp.init({"microbatches": MB if way is in_steps else 1, "ddp": True, **config})
        model = smp.DistributedModel(make(options))
        optimizer = smp.DistributedOptimizer(optimizer_of(model.parameters()))
        losses, states, reached = [], [], []
        for step in range(STEPS):
            if step % 2 == 0:
                optimizer.zero_grad()
            loss = way(model, step, smp.data_rank())
            optimizer.step()
            losses.append(torch.stack(smp.allgather(loss, smp.WORLD)).mean().item())
            states.append(model.state_dict())
            reached.append({name for name, p in model.named_parameters() if p.grad is not None})
            assert all(isinstance(p, DTensor) for p in model.local_parameters())
        found.append((losses, states, reached))
        smp.shutdown()
    return found


@pytest.mark.long
@pytest.mark.parametrize("way", [in_steps, without_steps])
def test_replicas_may_differentiate_different_blocks(tmp_path, way):
    """A rank that left a block out of its loss hung, or gave its gradients of the next block for those of this one."""
    check(tmp_path, [(config, way) for config in (FOR_THE_STEP, FOR_A_MICROBATCH, WHILE_RUNNING)], {})


@pytest.mark.parametrize(
    "options",
    [
        {"call": recomputed},
        {"call": recomputed_anew},
        {"borrows": borrowed},
        {"borrows": borrowed_again},
        {"borrows": borrowed_anew},
    ],
    ids=["recomputed", "recomputed anew", "borrows", "borrows again", "borrows anew"],
)
def test_blocks_that_are_computed_again_and_weights_that_others_use(tmp_path, options):
    """Which of them a rank reaches is not known from its graph alone; a weight's own block may not be reached."""
    check(tmp_path, [(WHILE_RUNNING, in_steps)], options)


def check(folder, cases, options):
    reference = expected(MB if cases[0][1] is in_steps else 1, options)
    for results in run_workers(trained, REPLICAS, folder, cases, options):
        for *numbers, reached in results:
            torch.testing.assert_close(numbers, list(reference[:2]), rtol=1e-10, atol=1e-11)
            assert reached == reference[2]


def without_a_backward(rank, folder, config, way):
    smp.init({"microbatches": 1, "ddp": True, **config})
    model = smp.DistributedModel(make({}))
    errors = []
    for step in range(2):
        try:
            if way is in_steps:
                train_or_not(model, batch(step, rank), smp.data_rank() == 0 or step == 0)
            else:
                loss = loss_of(model, batch(step, rank), "a")
                if smp.data_rank() == 0 or step == 0:
                    loss.backward()
                loss_of(model, batch(step, rank), "a")
        except (StepError, PeerError) as error:
            errors.append(f"{step}: {error}")
            break
    return errors


@smp.step
def train_or_not(model, ids, trains):
    loss = loss_of(model, ids, "a")
    if trains:
        model.backward(loss)
    return loss.detach()


@pytest.mark.parametrize("config", [FOR_THE_STEP, WHILE_RUNNING])
@pytest.mark.parametrize("way", [in_steps, without_steps])
def test_a_replica_without_a_backward_is_told(tmp_path, config, way):
    """The others waited for it."""
    for errors in run_workers(without_a_backward, REPLICAS, tmp_path, config, way):
        (text,) = errors
        assert text.startswith("1: ")
        assert "rank 0: " in text
        assert "a backward" in text


def train_of(model, rank, kinds, way):
    for kind in kinds:
        if way is in_steps:
            train_step(model, batch(0, rank)[:2], torch.tensor([[ord(c) for c in kind.ljust(2, "\0")]] * 2))
        else:
            loss_of(model, batch(0, rank), kind).backward()


def makes_again(rank, folder, way):
    """The first two steps reach the same on both replicas, and show that there are such uses."""
    smp.init({"microbatches": 1, "ddp": True, **WHILE_RUNNING})
    model = smp.DistributedModel(make({"borrows": made_again}))
    with pytest.raises((StepError, PeerError)) as error:
        train_of(model, rank, ["ab", "ab", "ab" if rank == 0 else "a"], way)
    return str(error.value)


@pytest.mark.parametrize("way", [in_steps, without_steps])
def test_replicas_that_cannot_repeat_a_use_together_are_told(tmp_path, way):
    """Only who repeats it has what was made of the parameter. The other replica was left to what gloo says of a closed connection."""
    for text in run_workers(makes_again, REPLICAS, tmp_path, way):
        assert "one computes again what uses values made of a parameter outside of its block" in text
