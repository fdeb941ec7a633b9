"""Tensor parallelism in training scripts: every arrangement of ranks trains as one process does."""

import warnings

import pytest
import torch
from executor_harness import run_workers
from torch import nn

import smpc.v1 as smp
from smpc.errors import SmpcError

STEPS, SAMPLES, MB, LENGTH, VOCABULARY = 20, 16, 2, 6, 18


class Model(nn.Module):
    """Plain modules around a transformer that is always distributed."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.before = nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16))
        self.transformer = smp.nn.DistributedTransformer(
            num_layers=2,
            num_attention_heads=4,
            attention_head_size=4,
            hidden_size=16,
            intermediate_size=32,
            attention_dropout_prob=0.0,
            hidden_dropout_prob=0.0,
            causal_mask_size=LENGTH,
        )
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, VOCABULARY, bias=False)

    def forward(self, ids):
        hidden = self.embedding(ids)
        hidden = hidden + self.before(hidden)
        return self.head(self.norm(self.transformer((hidden, None))[0]))


@smp.step
def train_step(model, ids):
    logits = model(ids)
    loss = nn.functional.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), ids[:, 1:].reshape(-1))
    model.backward(loss)
    return loss


def train(rank, folder, tp, pp, config):
    smp.init({"tensor_parallel_degree": tp, "pipeline_parallel_degree": pp, "microbatches": MB, "ddp": True, **config})
    torch.manual_seed(1)
    with smp.tensor_parallelism():
        model = Model()
    model = smp.DistributedModel(model)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    prescaled = config.get("prescaled_batch", False)
    share, shares = (smp.rdp_rank(), smp.rdp_size()) if prescaled else (smp.dp_rank(), smp.dp_size())
    losses = []
    for batch in batches():
        optimizer.zero_grad()
        own = batch.view(shares, -1, LENGTH)[share]
        loss = train_step(model, own).reduce_mean()
        optimizer.step()
        losses.append(torch.stack(smp.allgather(loss, smp.WORLD)).mean().item())
    kinds = {type(module).__name__ for module in model.distributed_modules()}
    assert {"DistributedLinear", "DistributedEmbedding", "DistributedTransformerLayer"} <= kinds
    torch.save(losses, folder / f"losses{rank}.pt")
    smp.shutdown()


def batches():
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, VOCABULARY, (SAMPLES, LENGTH), generator=generator) for _ in range(STEPS)]


ARRANGEMENTS = [
    (2, 1, 1, {}),
    (2, 1, 1, {"prescaled_batch": True, "optimize": "speed"}),
    (2, 2, 1, {"prescaled_batch": True}),
    pytest.param(1, 2, 2, {}, marks=pytest.mark.slow),
    pytest.param(2, 2, 2, {"optimize": "speed"}, marks=pytest.mark.slow),
]


@pytest.mark.long
@pytest.mark.matrix(1)
@pytest.mark.parametrize(("tp", "pp", "rdp", "config"), ARRANGEMENTS)
def test_twenty_steps_follow_one_process(tmp_path, tp, pp, rdp, config):
    def losses_of(name, world, *args):
        folder = tmp_path / name
        folder.mkdir()
        run_workers(train, world, folder, *args)
        return torch.load(folder / "losses0.pt")

    alone = losses_of("alone", 1, 1, 1, {})
    together = losses_of("together", tp * pp * rdp, tp, pp, config)
    assert together[-1] < together[0]
    assert together == pytest.approx(alone, rel=1e-4)


def give_different_batches(rank, folder):
    smp.init({"tensor_parallel_degree": 2, "pipeline_parallel_degree": 1, "ddp": True, "prescaled_batch": True})
    model = smp.DistributedModel(Model())
    # A PeerError on the rank that hears of the other's first.
    with pytest.raises(SmpcError, match=r"different values of ids; shard the data by smp.rdp_rank\(\)"):
        train_step(model, batches()[rank])
    smp.shutdown()


def test_different_batches_with_prescaled_batch_are_refused(tmp_path):
    assert run_workers(give_different_batches, 2, tmp_path) == [None] * 2


@smp.step
def other_step(model, ids):
    loss = model(ids).square().mean()
    model.backward(loss)
    return loss


def run_different_functions(rank, folder):
    smp.init({"tensor_parallel_degree": 2, "pipeline_parallel_degree": 1, "microbatches": MB, "ddp": True})
    with smp.tensor_parallelism():
        model = smp.DistributedModel(nn.Sequential(nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY)))
    ids = batches()[0][:4]
    functions = (train_step, other_step) if smp.rdp_rank() else (other_step, train_step)
    for function in functions:  # replicas may differ
        function(model, ids)
    mine = functions[smp.tp_rank() if smp.rdp_rank() else 0]
    with pytest.raises(
        SmpcError, match=r"run the same step function, found .*train_step on rank .*other_step on rank"
    ) as error:
        mine(model, ids)
    assert f"{mine._body.name} on rank {rank}" in str(error.value)
    smp.shutdown()


def test_different_step_functions_in_a_tensor_parallel_group_are_refused(tmp_path):
    """Of equal shapes, they used to train on a mixture of both losses without a word."""
    assert run_workers(run_different_functions, 4, tmp_path) == [None] * 4


def warn_of_what_stays(rank, folder):
    smp.init({"tensor_parallel_degree": 2, "pipeline_parallel_degree": 1, "ddp": True})
    with smp.tensor_parallelism():
        tied = nn.Sequential(nn.Embedding(8, 6), nn.Linear(6, 8, bias=False), nn.Linear(7, 4))
    tied[1].weight = tied[0].weight
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = smp.DistributedModel(tied)
    texts = [str(warning.message) for warning in caught]
    assert [type(module) for module in model.get_module()] == [nn.Embedding, nn.Linear, nn.Linear]
    assert any("0 (Embedding) is not distributed" in text and "shares weight" in text for text in texts)
    assert any("in_features divisible by tensor_parallel_degree 2, found 7" in text for text in texts)
    smp.shutdown()


def test_shared_weights_and_indivisible_sizes_are_left_alone_with_a_warning(tmp_path):
    assert run_workers(warn_of_what_stays, 2, tmp_path) == [None] * 2
