"""`smp.optimizers` in training scripts: with slices and stages, norms and updates equal one process's."""

import pytest
import torch
from executor_harness import run_workers
from torch import distributed as dist
from torch import nn

import smpc.v1 as smp
from smpc.errors import ConfigError

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


@pytest.mark.long
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


class ByTheNormOfAll(torch.optim.SGD):
    """Divides by the norm of all gradients that it sees."""

    def norm(self, held):
        return torch.stack([p.grad.norm() for p in held]).norm()

    @torch.no_grad()
    def step(self, closure=None):
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = self.norm(held)
        for parameter in held:
            parameter.grad.div_(norm)
        super().step()


class OfAllRanks(ByTheNormOfAll):
    """Asks the other ranks."""

    def norm(self, held):
        square = super().norm(held).square()
        dist.all_reduce(square)
        return square.sqrt()


class Clipping(torch.optim.SGD):
    """Clips by torch's function, which counts all ranks."""

    def step(self, closure=None):
        torch.nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.1)
        super().step()


def plain_model():
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))


def own_norms(rank, folder):
    found = {}
    x = torch.linspace(-1, 1, 16).view(4, 4)
    for kind in (ByTheNormOfAll, OfAllRanks, Clipping):
        smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
        model = smp.DistributedModel(plain_model())
        optimizer = smp.DistributedOptimizer(kind(model.parameters(), lr=0.1))
        for _ in range(2):
            optimizer.zero_grad()
            square_step(model, x)
            if kind is ByTheNormOfAll:
                with pytest.raises(ConfigError, match="ByTheNormOfAll, in which the gradient of one parameter changes"):
                    optimizer.step()
                break
            optimizer.step()
        found[kind.__name__] = model.state_dict()
        smp.shutdown()
    return found


@smp.step
def square_step(model, x):
    loss = (model(x) - 1).square().mean()
    model.backward(loss)
    return loss


@pytest.mark.long
def test_optimizers_that_look_at_all_gradients_are_refused_unless_they_see_those_of_all_ranks(tmp_path):
    """Each rank divided by the norm of its own stage, without a word."""
    found = run_workers(own_norms, 2, tmp_path)
    x = torch.linspace(-1, 1, 16).view(4, 4)
    for name, kind in (("OfAllRanks", ByTheNormOfAll), ("Clipping", Clipping), ("ByTheNormOfAll", None)):
        plain = plain_model()
        optimizer = None if kind is None else kind(plain.parameters(), lr=0.1)
        for _ in range(2 if optimizer is not None else 0):
            optimizer.zero_grad()
            for part in x.chunk(2):
                ((plain(part) - 1).square().mean() / 2).backward()
            optimizer.step()
        for states in found:
            for key, expected in plain.state_dict().items():
                torch.testing.assert_close(states[name][key], expected)
