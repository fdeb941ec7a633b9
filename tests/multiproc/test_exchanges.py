"""What ranks with parameters in parts gather and sum in a step of a script is as often as plans price it."""

import dataclasses
import math

import pytest
import torch
import torch.distributed.fsdp._fully_shard._fsdp_param_group as fsdp
from executor_harness import run_workers
from torch import nn

import smpc.v1 as smp
from smpc.compile import PipelineOptions, Traced, plan_trace
from smpc.config import Config
from smpc.partitioner.costs.device import Device, Wire
from smpc.tracer import record

MICROBATCHES = 3
ALL = {"ddp": True, "fully_shard": True}
KEPT = {"sdp_param_persistence_threshold": 0}
NEVER = {**KEPT, "sdp_max_live_parameters": 1}
SOME = {"ddp": True, "sharded_data_parallel_degree": 2, "sdp_gradient_clipping": 0.0}
CASES = [  # ranks, configuration, gathers and sums of a rank
    (2, ALL, (5, 5)),
    (2, ALL | KEPT, (15, 15)),
    (2, ALL | NEVER, (30, 15)),
    (4, SOME | KEPT, (15, 15)),
    (4, ALL | {"pipeline_parallel_degree": 2}, (1, 1)),
    (4, ALL | {"pipeline_parallel_degree": 2, "virtual_pipeline_degree": 2, "schedule": "interleaved-1f1b"}, (2, 2)),
]


class Stack(nn.Module):
    """Four blocks, and a layer in front of them."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(4))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@smp.step
def exchange_step(model, x):
    loss = model(x)
    model.backward(loss)
    return loss


def counted(rank, folder, cases):
    """(gathers, sums) of the second step of each case, as torch makes them."""
    found = []
    for config in cases:
        calls = {"foreach_all_gather": 0, "foreach_reduce": 0}
        with pytest.MonkeyPatch.context() as patched:
            for name in calls:
                patched.setattr(fsdp, name, counting(calls, name, getattr(fsdp, name)))
            smp.init({"microbatches": MICROBATCHES, "memory_weight": 0.0, **config})
            model = smp.DistributedModel(Stack())
            for _ in range(2):
                calls.update(dict.fromkeys(calls, 0))
                exchange_step(model, torch.ones(2 * MICROBATCHES, 8))
                model.zero_grad()
            smp.shutdown()
        found.append(tuple(calls.values()))
    return found


def counting(calls, name, once):
    def call(*args, **kwargs):
        calls[name] += 1
        return once(*args, **kwargs)

    return call


def priced(ranks, config):
    """How many messages a rank waits for in a plan's step, on wires on which each takes a second, and words about blocks nothing."""
    wire = Wire(1e3, 1.0)
    device = Device("d", {"float32": 1e3}, math.inf, 1, ranks, wire, wire, transport="gloo")
    settings = Config.parse({"microbatches": MICROBATCHES, "memory_weight": 0.0, **config}, origin="test")
    replicas = ranks // settings.pipeline_parallel_degree
    options = PipelineOptions.of(settings, device=device, data_parallel_degree=replicas)
    limits = settings.sdp_param_persistence_threshold, settings.sdp_max_live_parameters
    traced = dataclasses.replace(Traced(record(Stack(), (torch.zeros(2, 8),))), units=limits)
    plan = plan_trace(traced, options).plan
    return [
        sum(stage.exchange.in_step(MICROBATCHES) for stage in plan.stages if stage.rank == rank)
        for rank in range(settings.pipeline_parallel_degree)
    ]


@pytest.mark.long
def test_plans_price_as_many_gathers_and_sums_as_torch_makes(tmp_path, monkeypatch):
    """Without a pipeline one gather and one sum were priced for a step: blocks have one in each microbatch, or two."""
    monkeypatch.setattr("smpc.compile.replica_traffic._TOLD", 0)
    for ranks in (2, 4):
        cases = [(config, expected) for number, config, expected in CASES if number == ranks]
        for found in run_workers(counted, ranks, tmp_path, [config for config, _ in cases]):
            assert found == [expected for _, expected in cases]
        for config, (gathers, sums) in cases:
            apart = MICROBATCHES * 5 if "sharded_data_parallel_degree" in config else 0  # sums over copies
            for seconds in priced(ranks, config):
                assert gathers + sums + apart <= seconds < (gathers + sums + apart) * 1.5
