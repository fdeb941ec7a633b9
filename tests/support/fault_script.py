"""A training script in which one rank does something bad, once: what the fault campaign runs. Its argument is a `Fault` as JSON."""

import ctypes
import json
import os
import signal
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from mixtures import Block
from torch import nn

import smpc.v1 as smp
from smpc.v1.session import init as session_init

MICROBATCHES = 4
NUM_STEPS = 3
WIDTH = 6
RAISE, KILL, SEGV, SLEEP, COLLECTIVE, STOP, NATIVE, WIRE = (
    "raise", "kill", "segv", "sleep", "collective", "stop", "native", "wire",
)  # fmt: skip
LOOP, EXIT, LEAVE = "loop", "exit", "leave"
STALLS = (SLEEP, COLLECTIVE, STOP, NATIVE, LOOP)
ENDS = (EXIT, LEAVE)  # with status 0, while the others need the rank
# Before the first step: before smp.init, in it, after it, making the model, in smp.DistributedModel, recording, after the model.
BEFORE, INIT, AFTER, BUILD, MODEL, RECORD, BETWEEN = START = (
    "before", "init", "after", "build", "model", "record", "between",
)  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """What `rank` does in that step, and in that microbatch where `place` is inside the step."""

    action: str
    place: str  # forward, backward, loss, optimizer, data, or one of START
    world: int
    degree: int
    rank: int
    step: int
    microbatch: int
    step_timeout: float
    moment: str = ""  # the file that gets the time at which it happens
    start_timeout: float = 200.0
    experts: int = 1  # ranks that they are divided over

    @classmethod
    def read(cls, text):
        return cls(**json.loads(text))

    def to_json(self):
        return json.dumps(asdict(self))

    @property
    def in_step(self):
        return self.place in ("forward", "backward", "loss")


class Trigger:
    """Counts up to the moment."""

    def __init__(self, fault):
        self.fault = fault
        self.step = -1
        self.calls = 0
        self.first_layer = None

    def begin(self, step):
        self.step, self.calls, self.first_layer = step, 0, None

    def pass_by(self, place):
        """In the start of the job, which has no steps."""
        if self.fault.place == place and int(os.environ["RANK"]) == self.fault.rank:
            self.fire()

    def is_due(self, place):
        fault = self.fault
        return fault.place == place and smp.is_initialized() and (smp.rank(), self.step) == (fault.rank, fault.step)

    def count(self, layer):
        """Whether this call of a layer is the first one of the microbatch on this rank."""
        self.first_layer = self.first_layer or layer
        self.calls += layer is self.first_layer
        return layer is self.first_layer and self.calls == self.fault.microbatch + 1

    def fire(self):
        action, draft = self.fault.action, self.fault.moment + ".new"
        Path(draft).write_text(str(time.time()))
        os.rename(draft, self.fault.moment)
        if action == RAISE:
            raise ArithmeticError("bomb")
        if action in (KILL, SEGV, STOP):
            os.kill(os.getpid(), {KILL: signal.SIGKILL, SEGV: signal.SIGSEGV, STOP: signal.SIGSTOP}[action])
        if action == SLEEP:
            time.sleep(1000)
        while action == LOOP:
            pass
        if action == EXIT:
            sys.exit(0)
        if action == LEAVE:
            os._exit(0)
        if action == COLLECTIVE:
            dist.barrier()
        if action == NATIVE:
            ctypes.PyDLL(None).sleep(1000)  # keeps Python's lock


class Bomb(torch.autograd.Function):
    @staticmethod
    def forward(ctx, trigger, x):
        ctx.trigger = trigger
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.trigger.fire()
        return None, grad


class Layer(nn.Module):
    def __init__(self, trigger, has_experts):
        super().__init__()
        trigger.pass_by(BUILD)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.experts = Block(WIDTH, 4) if has_experts else nn.Identity()
        self.trigger = (trigger,)

    def forward(self, x):
        return self.experts(self.noticed(torch.tanh(self.linear(x))))

    def noticed(self, x):
        """The hidden states, unless the moment has come: ranks with other experts of this layer wait for this one then."""
        (trigger,) = self.trigger
        if smp.is_tracing():
            trigger.pass_by(RECORD)
            return x
        if trigger.is_due("forward") and trigger.count(self):
            if trigger.fault.action == WIRE:
                Path(trigger.fault.moment).write_text(str(time.time()))
                return x[:1]
            trigger.fire()
        if trigger.is_due("backward") and trigger.count(self):
            return Bomb.apply(trigger, x)
        return x


def instrument(trigger):
    """Let the fault happen inside of smp.init and smp.DistributedModel."""
    make_groups = session_init.make_groups

    def groups(*arguments):
        trigger.pass_by(INIT)
        return make_groups(*arguments)

    session_init.make_groups = groups


class Spoiled(nn.Sequential):
    """smp.DistributedModel looks at the parameters of what it is given."""

    def __init__(self, trigger, *layers):
        super().__init__(*layers)
        self.trigger = (trigger,)

    def named_modules(self, *arguments, **options):
        if smp.is_initialized() and smp.state.model is None:
            self.trigger[0].pass_by(MODEL)
        return super().named_modules(*arguments, **options)


def main(fault):
    trigger = Trigger(fault)
    trigger.pass_by(BEFORE)
    instrument(trigger)
    config = {
        "pipeline_parallel_degree": fault.degree,
        "expert_parallel_degree": fault.experts,
        "microbatches": MICROBATCHES,
        "ddp": fault.world > fault.degree,
        "step_timeout": fault.step_timeout,
        "start_timeout": fault.start_timeout,
    }
    smp.init(config)
    trigger.pass_by(AFTER)
    torch.manual_seed(0)
    model = smp.DistributedModel(Spoiled(trigger, *(Layer(trigger, fault.experts > 1) for _ in range(8))))
    trigger.pass_by(BETWEEN)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01))
    seen = []

    @smp.step
    def train(model, x):
        loss = model(x).square().mean()
        if trigger.is_due("loss"):
            seen.append(loss)
            if len(seen) == fault.microbatch + 1:
                trigger.fire()
        model.backward(loss)
        return loss

    for step in range(NUM_STEPS):
        trigger.begin(step)
        batch = torch.randn(2 * MICROBATCHES, WIDTH)
        if trigger.is_due("data"):
            trigger.fire()
        optimizer.zero_grad()
        train(model, batch)
        if trigger.is_due("optimizer"):
            trigger.fire()
        optimizer.step()
    smp.barrier()
    print("survived")


if __name__ == "__main__":
    main(Fault.read(sys.argv[1]))
