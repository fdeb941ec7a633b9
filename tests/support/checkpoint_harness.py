"""Starts real ranks that save and load checkpoints, and has the states that they hold.

Ranks are forked from a server that has imported torch already, meet in a file, and speak gloo over loopback.
"""

import dataclasses
import datetime
import os
import signal
import sys
import threading
import time
import traceback
import warnings

import server
import torch
import torch.distributed as dist

from smpc.checkpoint import Content, GroupChannel, Shard

TIMEOUT = datetime.timedelta(seconds=20)
END_LIMIT = 3600.0  # seconds for ranks to end: longer than pytest lets a test run

NAMES = [f"layer{i}.weight" for i in range(6)]


@dataclasses.dataclass
class Outcome:
    """What one rank did: its value, or its error's text and classes; `exitcode` is minus the signal if it was killed."""

    value: object
    error: str | None
    classes: list
    exitcode: int


def run_ranks(size, function, folder, *arguments, timeout=END_LIMIT, patience=TIMEOUT, during=None):
    """Run `function(rank, channel, *arguments)` on ranks that rendezvous in `folder`. `patience`: the
    channel's. `during(processes)` runs meanwhile."""
    rendezvous = str(folder / f"rendezvous{time.monotonic_ns()}")
    context = server.context()
    pipes = [context.Pipe(duplex=False) for _ in range(size)]
    ranks = [
        context.Process(target=_rank, args=(function, rank, size, rendezvous, pipes[rank][1], patience, arguments))
        for rank in range(size)
    ]
    try:
        for rank in ranks:
            rank.start()
        for _, mine in pipes:
            mine.close()
        if during is not None:
            during(ranks)
        deadline = time.monotonic() + timeout
        return [_outcome(rank, pipe, deadline) for rank, (pipe, _) in zip(ranks, pipes, strict=True)]
    finally:
        for rank in ranks:
            if rank.is_alive():
                rank.kill()
            rank.join(10)
        for pipe, _ in pipes:
            pipe.close()


def values_of(outcomes):
    """The values of ranks that must all have succeeded."""
    assert [outcome.error for outcome in outcomes] == [None] * len(outcomes)
    assert [outcome.exitcode for outcome in outcomes] == [0] * len(outcomes)
    return [outcome.value for outcome in outcomes]


def _outcome(process, pipe, deadline):
    value, error, classes = None, "ended without a word", []
    try:  # before its end: a rank waits while the pipe is full
        if pipe.poll(max(0.0, deadline - time.monotonic())):
            value, error, classes = pipe.recv()
    except EOFError:
        pass
    process.join(max(0.0, deadline - time.monotonic()))
    assert not process.is_alive(), "a rank hangs"
    return Outcome(value, error, classes, process.exitcode)


def _rank(function, rank, size, rendezvous, pipe, patience, arguments):
    warnings.simplefilter("ignore")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size, timeout=patience)
    try:
        channel = GroupChannel(dist.group.WORLD, patience)
        message = (function(rank, channel, *arguments), None, [])
    except BaseException as error:
        if "SMPC_TEST_TRACE" in os.environ:
            traceback.print_exc()
        message = (None, str(error), [cls.__name__ for cls in type(error).__mro__])
    pipe.send(message)
    pipe.close()


def state(step, numel=3000):
    """Global tensors by kind and name: a model, and an optimizer's state of it."""
    generator = torch.Generator().manual_seed(step)
    found = {}
    for index, name in enumerate(NAMES):
        rows = 8 * (index + 1)
        tensor = torch.randn(rows, max(1, numel // rows), generator=generator)
        found["model", name] = tensor.bfloat16() if index == 5 else tensor
        found["optimizer", f"{name}::exp_avg"] = torch.randn(tensor.shape, generator=generator)
    found["optimizer", "layer0.weight::step"] = torch.tensor(float(step))
    return found


def shards(tensors, layout, rank, size):
    """A rank's shards. layout: "pp" tensors dealt out, "rows" or "columns" split, "dp" replicas, "pp2tp" both halves."""
    found = []
    for index, ((kind, name), tensor) in enumerate(tensors.items()):
        if layout == "dp" or tensor.dim() == 0:
            found.append(Shard.whole(kind, name, tensor.clone()))
        elif layout == "pp":
            if index % size == rank:
                found.append(Shard.whole(kind, name, tensor.clone()))
        elif layout == "pp2tp":
            if index % 2 == rank % 2:
                found.append(_part(kind, name, tensor, 1, rank // 2, size // 2))
        else:
            found.append(_part(kind, name, tensor, 0 if layout == "rows" else 1, rank, size))
    return found


def _part(kind, name, tensor, dim, index, count):
    bounds = [tensor.shape[dim] * i // count for i in range(count + 1)]
    offsets = [0] * tensor.dim()
    offsets[dim] = bounds[index]
    part = tensor.narrow(dim, bounds[index], bounds[index + 1] - bounds[index]).clone()
    return Shard.of(kind, name, part, tensor.shape, offsets)


def content(step, layout, rank, size, numel=3000):
    """What a rank brings to save `state(step)`."""
    return Content(
        shards(state(step, numel), layout, rank, size),
        metadata={"step": step},
        rank_state={"rng": torch.full((4,), rank)},
        user={"epoch": (step, torch.tensor([step]))},
        plan='{"plan": 1}',
    )


def empty(found):
    """The same shards, with other values."""
    return [dataclasses.replace(shard, values=torch.full_like(shard.tensor, 7)) for shard in found]


def peak_of(function):
    """What `function` adds to this process's peak of private memory, in bytes."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak starts again at what is used now
    before = _status("VmRSS")
    function()
    return _status("VmHWM") - before


def _status(field):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field))


class KillAt:
    """SIGKILL for this process at the n-th call of a C function (write, fsync, rename, ...) that the checkpoint code makes."""

    def __init__(self, point):
        self.point, self.count = point, 0

    def arm(self):
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)

    def disarm(self):
        sys.setprofile(None)
        threading.setprofile(None)

    def _profile(self, frame, event, argument):
        if event == "c_call" and "/smpc/checkpoint/" in frame.f_code.co_filename:
            if self.count == self.point:
                os.kill(os.getpid(), signal.SIGKILL)
            self.count += 1
