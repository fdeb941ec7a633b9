"""A training script of two ranks in which rank 1 does not come to where rank 0 waits for it, before the first step. Argument: the case."""

import sys
import time

import torch
import torch.distributed as dist
from torch import nn

import smpc.v1 as smp
from smpc.v1.session.step_messages import Control

START_TIMEOUT = 3.0
# case -> what is told of rank 1; the other timeouts are half an hour.
BEFORE_MODEL = "after smp.init, before smp.DistributedModel"
BEFORE_STEP = "after smp.DistributedModel, before its first step"
CASES = {
    "barrier": BEFORE_MODEL,
    "allgather": BEFORE_MODEL,
    "recv_from": BEFORE_MODEL,
    "torch's barrier": BEFORE_MODEL,
    "torch's new_group": BEFORE_MODEL,
    "groups in another order": BEFORE_MODEL,
    "no model": BEFORE_MODEL,
    "no model, replicas": BEFORE_MODEL,
    "no model, slices": BEFORE_MODEL,
    "no optimizer": BEFORE_STEP,
    "no loading": BEFORE_STEP,
    "no step": BEFORE_STEP,
    "no step, replicas": BEFORE_STEP,
    "barrier for a step": BEFORE_STEP,
}


def forever():
    while True:
        time.sleep(1)


def at_once(case, rank):
    """The cases before the model."""
    calls = {
        "barrier": smp.barrier,
        "allgather": lambda: smp.allgather(1, smp.WORLD),
        "recv_from": lambda: smp.recv_from(1, smp.RankType.WORLD_RANK),
        "torch's barrier": dist.barrier,
        "torch's new_group": lambda: dist.new_group([0, 1]),
    }
    if case in calls:
        calls[case]() if rank == 0 else forever()
    if case == "groups in another order":
        dist.new_group([0, 1]) if rank == 0 else smp.barrier()
    if case.startswith("no model") and rank == 1:
        forever()


def end_late():
    """Have this rank come to the end of its step after the other one's process has ended."""
    acknowledge = Control.acknowledge

    def late(control, source):
        time.sleep(3)
        acknowledge(control, source)

    Control.acknowledge = late


def main(case):
    config = {"pipeline_parallel_degree": 2, "microbatches": 2, "start_timeout": START_TIMEOUT}
    if case.endswith(("replicas", "optimizer")):
        config |= {"pipeline_parallel_degree": 1, "ddp": True, "shard_optimizer_state": case.endswith("optimizer")}
    if case.endswith("slices"):
        config |= {"pipeline_parallel_degree": 1, "tensor_parallel_degree": 2, "ddp": True}
    if case == "slow":
        config["start_timeout"] = 60.0
    smp.init(config)
    at_once(case, smp.rank())
    if case == "slow" and smp.rank() == 1:
        time.sleep(6)
    model = smp.DistributedModel(nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))))
    if case == "no optimizer" and smp.rank() == 1:
        forever()
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    if case == "no loading":
        smp.resume_from_checkpoint("nothing") if smp.rank() == 0 else forever()

    @smp.step
    def train(model, x):
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    if case.startswith("no step") and smp.rank() == 1:
        forever()
    if case == "barrier for a step" and smp.rank() == 1:
        smp.barrier()
    for step in range(2):
        if case == "late" and smp.rank() == 1 and step == 1:
            end_late()
        optimizer.zero_grad()
        train(model, torch.ones(4, 4))
        optimizer.step()
    print("trained")


if __name__ == "__main__":
    main(sys.argv[1])
