"""A training script, two stages of two tensor-parallel ranks each: in the first stage one rank does something bad while the other one
waits for it in a collective.

Its arguments: what that is, and the file that gets who does it, and when.
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn

import smpc.v1 as smp

WIDTH = 8
MICROBATCHES = 4
BAD_STEP, BAD_MICROBATCH = 1, 2


class Layer(nn.Module):
    def __init__(self, action, moment):
        super().__init__()
        self.linear = smp.nn.DistributedLinear(WIDTH, WIDTH)
        self.action, self.moment = action, moment
        self.step, self.calls = 0, 0

    def forward(self, x):
        if not smp.is_tracing():
            self.calls += 1
            is_bad = (smp.pp_rank(), smp.tp_rank()) == (0, 1)
            if is_bad and (self.step, self.calls) == (BAD_STEP, BAD_MICROBATCH + 1):
                self.fire()
        return torch.tanh(self.linear(x))

    def fire(self):
        assert "/memfd:smpc-" in Path("/proc/self/maps").read_text()
        time.sleep(0.2)  # the other one waits by now
        Path(self.moment).write_text(f"{smp.rank()} {time.time()}")
        if self.action == "raise":
            raise ArithmeticError("bomb")
        if self.action == "sleep":
            time.sleep(1000)
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[self.action])


def main(action, moment):
    timeout = 3.0 if action in ("sleep", "stop") else 100.0
    smp.init({
        "pipeline_parallel_degree": 2, "tensor_parallel_degree": 2, "ddp": True, "microbatches": MICROBATCHES,
        "prescaled_batch": True, "step_timeout": timeout, "start_timeout": 200.0,
    })  # fmt: skip
    torch.manual_seed(0)
    layers = [Layer(action, moment) for _ in range(2)]
    model = smp.DistributedModel(nn.Sequential(*layers))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01))

    @smp.step
    def train(model, x):
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    for step in range(3):
        for layer in layers:
            layer.step, layer.calls = step, 0
        optimizer.zero_grad()
        train(model, torch.randn(2 * MICROBATCHES, WIDTH))
        optimizer.step()
    print("survived")


if __name__ == "__main__":
    main(*sys.argv[1:])
