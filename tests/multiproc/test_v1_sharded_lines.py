"""What scripts do beside steps while parameters are in parts: optimizers made before, calls without steps, views, evaluation, names."""

import pytest
import torch
from executor_harness import run_workers
from torch import nn
from torch.distributed.tensor import DTensor

import smpc.v1 as smp

CONFIG = {
    "ddp": True,
    "sharded_data_parallel_degree": 2,
    "sdp_param_persistence_threshold": 0,
    "sdp_max_live_parameters": 1,
}


class Block(nn.Module):
    """Returns a view, on which the model works in place."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x))).view(-1, 6)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.norm = nn.ModuleList([Block() for _ in range(3)]), nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 5)

    def forward(self, x):
        for block in self.blocks:
            y = block(x)
            y += x
            x = y
        return self.head(self.norm(x))


def make():
    torch.manual_seed(3)
    return Model()


def data(step, part):
    generator = torch.Generator().manual_seed(10 * step + part)
    return torch.randn(4, 6, generator=generator), torch.randint(5, (4,), generator=generator)


def optimizer_of(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)


def alone(microbatches, steps=3):
    """Replica 0's statistics count; each part is normalized by itself."""
    model = make()
    optimizer = optimizer_of(model)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        kept = None
        for part in range(2):
            x, y = data(step, part)
            before = {name: b.clone() for name, b in model.named_buffers()}
            for xs, ys in zip(x.chunk(microbatches), y.chunk(microbatches), strict=True):
                loss = nn.functional.cross_entropy(model(xs), ys)
                (loss / microbatches / 2).backward()
                losses.append(loss.item())
            if part == 0:
                kept = {name: b.clone() for name, b in model.named_buffers()}
            for name, b in model.named_buffers():
                b.copy_(before[name] if part == 0 else kept[name])
        optimizer.step()
    return losses, model.state_dict()


@smp.step
def train_step(model, x, y):
    loss = nn.functional.cross_entropy(model(x), y)
    model.backward(loss)
    return loss


def trained(rank, folder):
    found = []
    for microbatches, is_early in ((2, True), (1, False)):
        smp.init({**CONFIG, "microbatches": microbatches, "sdp_gradient_clipping": 0.0})
        module = make()
        base = optimizer_of(module) if is_early else None
        model = smp.DistributedModel(module)
        optimizer = smp.DistributedOptimizer(base if is_early else optimizer_of(model))
        losses = []
        for step in range(3):
            optimizer.zero_grad()
            x, y = data(step, rank)
            if microbatches == 2:
                losses += [loss.item() for loss in train_step(model, x, y).outputs]
            else:  # without steps
                loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()
                losses.append(loss.item())
            optimizer.step()
            model.eval()
            with torch.no_grad():
                model(x)
            model.train()
            assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        found.append((losses, model.state_dict(), len(optimizer.fp32_partitioned_groups_flat)))
        smp.shutdown()
    return found


def test_steps_and_calls_without_steps(tmp_path):
    results = run_workers(trained, 2, tmp_path)
    for case, microbatches in enumerate((2, 1)):
        losses, state = alone(microbatches)
        for rank, found in enumerate(results):
            own, values, groups = found[case]
            mine = [losses[(2 * step + rank) * microbatches + i] for step in range(3) for i in range(microbatches)]
            assert own == pytest.approx(mine, rel=2e-6)
            assert groups == 1
            for name, value in state.items():
                if (
                    "running" not in name and "tracked" not in name
                ):  # replicas have statistics of their own between steps
                    torch.testing.assert_close(
                        values[name], value, rtol=1e-5, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}"
                    )


def with_calls_between(rank, folder):
    """Validation that forgets no_grad, between a backward and the update, and before the next step."""
    found = []
    for more in ({}, {"sdp_param_persistence_threshold": 0}):  # whole for the step, and from forward to backward
        smp.init({"ddp": True, "fully_shard": True, "microbatches": 2, **more})
        model = smp.DistributedModel(make().eval())
        optimizer = smp.DistributedOptimizer(optimizer_of(model))
        outputs = []
        for step in range(3):
            optimizer.zero_grad()
            train_step(model, *data(step, rank))
            model(data(7, rank)[0])
            assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
            optimizer.step()
            with torch.no_grad():
                outputs.append(model(data(8, 0)[0]))
            outputs.append(model(data(9, 0)[0]).detach())
            model.zero_grad()
        found.append(outputs)
        smp.shutdown()
    return found


@pytest.mark.long
def test_calls_without_a_backward_leave_nothing_whole(tmp_path):
    model = make().eval()
    optimizer, expected = optimizer_of(model), []
    for step in range(3):
        optimizer.zero_grad()
        for part in range(2):
            x, y = data(step, part)
            (nn.functional.cross_entropy(model(x), y) / 2).backward()
        optimizer.step()
        expected += [model(data(8, 0)[0]).detach(), model(data(9, 0)[0]).detach()]
    for found in run_workers(with_calls_between, 2, tmp_path):
        for outputs in found:
            torch.testing.assert_close(outputs, expected, rtol=1e-5, atol=2e-6)
