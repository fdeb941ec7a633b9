"""torch as a judge: its runtime executes our schedules, from our CSV files, on real processes: gradients equal to eager."""

import pytest
import torch
import torch.distributed as dist
from executor_harness import run_workers
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from smpc.codegen.schedules.csv_file import to_csv
from smpc.codegen.schedules.named import choose
from smpc.codegen.simulate import Costs, chain

MICROBATCHES, WIDTH = 8, 6
SETTINGS = {
    "gpipe": {},
    "1f1b": {},
    "interleaved-1f1b": {},
    "zb-h1": {},
    "zb-h2": {},
    "zb-v": {},
    "list": {},
    "list, two pieces": {"schedule": "list", "num_pieces": 2},
}


def layers(num_stages):
    """The model, a module for each stage."""
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(num_stages)]


def batch():
    torch.manual_seed(1)
    return torch.randn(2 * MICROBATCHES, WIDTH), torch.randn(2 * MICROBATCHES, WIDTH)


def loss_of(output, target):
    return ((output - target) ** 2).sum() / MICROBATCHES


def judge(rank, folder, files):
    """A step of each file by torch's runtime; the gradients of this rank's stages, by file."""
    found = {}
    x, target = batch()
    for name, (path, placement) in files.items():
        modules = layers(len(placement))
        own = [stage for stage, holder in enumerate(placement) if holder == rank]
        stages = [PipelineStage(modules[stage], stage, len(placement), torch.device("cpu")) for stage in own]
        schedule = _PipelineScheduleRuntime(stages, MICROBATCHES, loss_fn=loss_of, scale_grads=False)
        schedule._load_csv(path)
        losses = []
        schedule.step(*([x] if 0 in own else []), target=target if len(placement) - 1 in own else None, losses=losses)
        gradients = {stage: [p.grad for p in modules[stage].parameters()] for stage in own}
        found[name] = [loss.detach() for loss in losses], gradients
        dist.barrier()
    return found


def eager(num_stages):
    modules = layers(num_stages)
    losses = []
    for part, target in zip(*(tensor.chunk(MICROBATCHES) for tensor in batch()), strict=True):
        loss = loss_of(nn.Sequential(*modules)(part), target)
        losses.append(loss.detach())
        loss.backward()
    return losses, [[p.grad for p in module.parameters()] for module in modules]


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_torch_executes_our_schedules(tmp_path, num_ranks):
    files = {}
    for name, settings in SETTINGS.items():
        choice = choose(num_ranks, MICROBATCHES, **{"schedule": name, **settings})
        num_stages = len(choice.placement)
        path = tmp_path / f"{name}.csv"
        path.write_text(to_csv(choice.build(chain(num_stages), Costs.uniform(num_stages))))
        files[name] = str(path), choice.placement
    results = run_workers(judge, num_ranks, tmp_path, files)
    for name, (_, placement) in files.items():
        losses, gradients = eager(len(placement))
        assert [loss for found in results for loss in found[name][0]] == losses, name
        seen = {stage: grads for found in results for stage, grads in found[name][1].items()}
        assert sorted(seen) == list(range(len(placement)))
        for stage, grads in seen.items():
            for ours, expected in zip(grads, gradients[stage], strict=True):
                torch.testing.assert_close(
                    ours, expected, rtol=1e-6, atol=1e-6, msg=lambda text, n=name, s=stage: f"{n} {s}: {text}"
                )
