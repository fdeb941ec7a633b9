"""Sharded models of which ranks' batches take other ways: training is that of one process over all batches, on every surface."""

import os
import warnings

import pytest
import torch
import torch.distributed as dist
from executor_harness import run_workers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import smpc.v2 as tsm
from smpc.composer import ComposerModel, Trainer
from smpc.errors import StepError
from smpc.sharding import Keep, ShardingOptions, find_units, shard
from smpc.sharding.dtensors import whole

STEPS, RANKS = 4, 2
WAYS = (("a0", "b1"), ("b", "a"), ("ab01", "a1s"), ("b", "b"))  # of each rank, in each step; the third head never comes


class Block(nn.Module):
    """Whether its last layer is used depends on the batch."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.more = nn.Linear(6, 10), nn.Linear(10, 6), nn.Linear(6, 6)

    def forward(self, x, uses_more):
        x = x + self.down(torch.tanh(self.up(x)))
        return x + self.more(x) if uses_more else x


def called(block, *args):
    return block(*args)


def recomputed(block, *args):
    return checkpoint(block, *args, use_reentrant=False)


def recomputed_anew(block, *args):
    return checkpoint(block, *args, use_reentrant=True)


class Ways(nn.Module):
    """Blocks that a batch may skip or call twice, heads in a list that are units, a head that is none, a result that is stashed; and
    parameters that have nothing to divide."""

    def __init__(self, call=None):
        super().__init__()
        self.call = call or called
        self.embed, self.blocks = nn.Embedding(9, 6), nn.ModuleList([Block() for _ in range(3)])
        self.heads = nn.ModuleList([nn.Linear(6, 9) for _ in range(3)])
        self.other = nn.Linear(6, 9, bias=False)
        self.scale, self.never, self.none = (nn.Parameter(torch.full(shape, 0.7)) for shape in ((), (), (0, 3)))

    def forward(self, ids, way):
        x = self.call(self.blocks[0], self.embed(ids), "s" in way)
        self.stash = self.blocks[2](x.detach(), False).pow(2).mean()
        for block in (0, 1):
            if str(block) in way:
                x = self.call(self.blocks[1], x, block == 0)
        head = self.heads[0] if "a" in way else self.heads[1]
        losses = [head(x)] + [self.other(x) * self.scale + self.none.sum()] * ("b" in way)
        return [nn.functional.cross_entropy(each.flatten(0, 1), ids.flatten()) for each in losses]


def make(call=None, kind=Ways):
    torch.manual_seed(3)
    return kind(call).double()


def loss_of(model, ids, way):
    """What is computed is not always differentiated."""
    first, *others = model(ids, way)
    loss = first if "a" in way or not others else others[0]
    return loss + model.stash if "s" in way else loss


def batch(step, rank):
    return torch.randint(9, (2, 8), generator=torch.Generator().manual_seed(10 * step + rank))


def optimizer_of(parameters):
    return torch.optim.AdamW(parameters, lr=0.1, eps=1.0)  # whose decay tells a gradient of zero from none


def state_of(model):
    return {name: whole(p.detach()).clone() for name, p in model.named_parameters()}


def grads_of(model):
    return {name: None if p.grad is None else whole(p.grad).clone() for name, p in model.named_parameters()}


def expected(call=None, kind=Ways, ranks=RANKS):
    model = make(call, kind)
    optimizer, states = optimizer_of(model.parameters()), []
    for step in range(STEPS):
        if step % 2 == 0:
            optimizer.zero_grad()
        for rank in range(ranks):
            (loss_of(model, batch(step, rank), WAYS[step][rank % RANKS]) / ranks).backward()
        optimizer.step()
        states.append((grads_of(model), state_of(model)))
    return states


def trained(rank, folder, cases, axes):
    found = []
    for call, keep in cases:
        model = make(call)
        mesh = init_device_mesh("cpu", axes, mesh_dim_names=("replica", "shard")[-len(axes) :])
        shard(model, find_units(model), mesh, ShardingOptions(keep)).settle()
        optimizer, states = optimizer_of(model.parameters()), []
        for step in range(STEPS):
            if step % 2 == 0:
                optimizer.zero_grad()
            loss_of(model, batch(step, rank), WAYS[step][rank % RANKS]).backward()
            optimizer.step()
            states.append((grads_of(model), state_of(model)))
            with torch.no_grad():
                model(batch(step, rank), WAYS[step][1 - rank % RANKS])
            assert keep is Keep.MICROBATCH or all(isinstance(p, DTensor) for p in model.blocks.parameters())
        found.append(states)
    return found


def check(folder, cases, axes=(2,)):
    ranks = torch.Size(axes).numel()
    references = {call: expected(call, ranks=ranks) for call, _ in cases}
    for results in run_workers(trained, ranks, folder, cases, axes):
        for (call, _), states in zip(cases, results, strict=True):
            torch.testing.assert_close(states, references[call], rtol=1e-10, atol=1e-11)


@pytest.mark.long
def test_ranks_may_take_other_ways(tmp_path):
    """They hung, were aborted by gloo, or added one block's gradient to another's, without a word. Of a block that is called twice and
    computed again by reentrant backwards, torch reduces the gradient of one call alone."""
    check(
        tmp_path,
        [(called, Keep.NEVER), (called, Keep.MICROBATCH), (recomputed, Keep.NEVER), (recomputed_anew, Keep.NEVER)],
    )


@pytest.mark.slow
def test_ranks_of_shards_and_replicas_may_take_other_ways(tmp_path):
    check(tmp_path, [(called, Keep.NEVER), (recomputed, Keep.MICROBATCH)], (2, 2))


class OfTrainer(ComposerModel):
    """Children that are sharded by themselves, some of which a batch does not use; in one of them, blocks and heads."""

    def __init__(self):
        super().__init__()
        self.model, self.heads = make(), nn.ModuleList([nn.Linear(1, 1).double() for _ in range(3)])
        self.model.fsdp_wrap_fn = lambda module: isinstance(module, Block | nn.Linear)

    def forward(self, given):
        ids, way = given
        return self.heads["b" in way](loss_of(self.model, ids[0], way).reshape(1, 1)).reshape(())

    def loss(self, outputs, given):
        return outputs


def run_by_trainer(model, rank, **options):
    made = Trainer(
        model=model,
        optimizers=optimizer_of(model.parameters()),
        train_dataloader=[(batch(step, rank)[None], WAYS[step][rank % RANKS]) for step in range(STEPS)],
        max_duration=f"{STEPS}ba",
        device="cpu",
        **options,
    )
    made.fit()


def trained_by_trainer(rank, folder, cases):
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(RANKS), "NODE_RANK": "0"}
    warnings.simplefilter("ignore")
    found = []
    for options in cases:
        torch.manual_seed(5)
        model = OfTrainer()
        run_by_trainer(model, rank, **options)
        found.append(state_of(model))
    return found


@pytest.mark.long
def test_ranks_of_a_trainer_may_take_other_ways(tmp_path):
    """Its children are sharded by themselves: whoever does not call a child takes part in the others' gathers and reductions."""
    torch.manual_seed(5)
    model = OfTrainer()
    optimizer = optimizer_of(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(RANKS):
            (model((batch(step, rank)[None], WAYS[step][rank])) / RANKS).backward()
        optimizer.step()
    cases = [
        {"fsdp_config": {}},
        {"fsdp_config": {"sharding_strategy": "SHARD_GRAD_OP", "forward_prefetch": True}},
        {"fsdp_config": {}, "device_train_microbatch_size": "auto"},
    ]
    for results in run_workers(trained_by_trainer, RANKS, tmp_path, cases):
        for found in results:
            torch.testing.assert_close(found, state_of(model), rtol=1e-5, atol=1e-6)  # gradients in fp32


def train_differently(model, optimizer, rank, differs):
    for step in range(2):
        loss = loss_of(model, batch(step, rank), "a")
        if rank == 0 or step == 0 or differs != "backward":
            loss.backward()
        if rank == 0 or differs != "update":
            optimizer.step()


def refused(rank, folder):
    """What each rank is told: a backward that the other has not; an update that it has not; a rank that has ended."""
    found = []
    for differs in ("backward", "update", "end"):
        model = make()
        shard(model, find_units(model), init_device_mesh("cpu", (2,), mesh_dim_names=("shard",)))
        if differs == "end" and rank == 1:
            break
        with pytest.raises(StepError) as error:
            train_differently(model, optimizer_of(model.parameters()), rank, differs)
        found.append(str(error.value))
    return found


def test_ranks_that_do_not_train_together_are_told(tmp_path):
    """They hung; or one updated its parts without the other, without a word."""
    first, second = run_workers(refused, RANKS, tmp_path)
    assert second == first[:2]
    assert "rank 0: a backward, rank 1: an update of an optimizer" in first[0]
    assert "rank 0: an update of an optimizer, rank 1: a backward" in first[1]
    assert "found no word of some when this one has come to the model" in first[2]


def average_by_hand(parameters):
    for parameter in parameters:
        has = torch.tensor(parameter.grad is not None, dtype=torch.int32)
        dist.all_reduce(has)
        if has:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            dist.all_reduce(parameter.grad)
            parameter.grad /= RANKS


def trained_by_a_script_of_v2(rank, folder, is_one):
    """`is_one`: the whole model is sharded, or its blocks and heads, each by itself."""
    warnings.simplefilter("ignore")
    tsm.init({"hybrid_shard_degree": 2})
    model = make()
    for module in (*model.blocks, *model.heads):
        fully_shard(module)
    wholes = (model.scale, model.never, model.none)  # which FSDP refuses
    for module in [model] if is_one else [model.embed, model.other]:
        fully_shard(module, ignored_params=set(wholes))
    optimizer, states = optimizer_of(model.parameters()), []
    for step in range(STEPS):
        if step % 2 == 0:
            optimizer.zero_grad()
        loss_of(model, batch(step, rank), WAYS[step][rank]).backward()
        average_by_hand(wholes)
        optimizer.step()
        states.append((grads_of(model), state_of(model)))
    tsm.state.reset()
    return states


@pytest.mark.parametrize("is_one", [True, False])
def test_ranks_of_a_script_of_v2_may_take_other_ways(tmp_path, is_one):
    for states in run_workers(trained_by_a_script_of_v2, RANKS, tmp_path, is_one):
        torch.testing.assert_close(states, expected(), rtol=1e-10, atol=1e-11)
