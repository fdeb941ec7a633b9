"""`smp.optimizers` in training scripts: with slices and stages, norms and updates equal one process's."""

import pytest
import torch
from executor_harness import run_workers
from torch import nn

import smpc.v1 as smp

STEPS, SAMPLES, LENGTH, VOCABULARY, WIDTH = 4, 8, 5, 12, 8


class Model(nn.Module):
    """Linear layers that are distributed, between an embedding and a head that share their weight."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        with smp.tensor_parallelism():
            self.first = nn.Linear(WIDTH, 3 * WIDTH)
            self.second = nn.Linear(3 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        return self.head(self.norm(self.second(self.first(self.embedding(ids)).relu())))


@smp.step
def train_step(model, ids):
    logits = model(ids)
    loss = nn.functional.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), ids[:, 1:].reshape(-1))
    model.backward(loss)
    return loss


def train(rank, folder, tp, pp):
    found = {}
    for kind, options in (
        (smp.optimizers.FusedLamb, {"max_grad_norm": 0.1}),
        (smp.optimizers.FusedNovoGrad, {"weight_decay": 0.01}),
    ):
        smp.init({"tensor_parallel_degree": tp, "pipeline_parallel_degree": pp, "microbatches": 2, "ddp": True})
        torch.manual_seed(1)
        model = smp.DistributedModel(Model())
        optimizer = smp.DistributedOptimizer(kind(model.parameters(), lr=1e-2, **options))
        generator = torch.Generator().manual_seed(3)
        losses, norms = [], []
        for _ in range(STEPS):
            batch = torch.randint(0, VOCABULARY, (SAMPLES, LENGTH), generator=generator)
            optimizer.zero_grad()
            own = batch.view(smp.dp_size(), -1, LENGTH)[smp.dp_rank()]
            loss = train_step(model, own).reduce_mean()
            norms.append(float(smp.optimizers.clip_grad_norm_(model.parameters(), float("inf"))))
            optimizer.step()
            losses.append(torch.stack(smp.allgather(loss, smp.WORLD)).mean().item())
        found[kind.__name__] = (losses, norms)
        smp.shutdown()
    torch.save(found, folder / f"found{rank}.pt")


def test_slices_and_stages_train_as_one_process(tmp_path):
    def trained(name, world, *args):
        folder = tmp_path / name
        folder.mkdir()
        run_workers(train, world, folder, *args)
        return [torch.load(folder / f"found{rank}.pt") for rank in range(world)]

    (alone,) = trained("alone", 1, 1, 1)
    for together in trained("together", 4, 2, 2):
        for kind, (losses, norms) in alone.items():
            assert together[kind][0] == pytest.approx(losses, rel=1e-4)
            assert together[kind][1] == pytest.approx(norms, rel=1e-4)
            assert losses[-1] != pytest.approx(losses[0], rel=1e-3)
