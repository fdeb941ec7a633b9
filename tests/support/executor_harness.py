"""Starts real gloo processes on loopback for the executor's tests, and has the programs that they run."""

import datetime
import itertools
import os
import time
from pathlib import Path

import server
import torch
import torch.distributed as dist
from torch import nn

from smpc.codegen.program import Channel, Instruction, RankProgram, StageCode
from smpc.tracer.ir import TensorSpec

MB = 4
END_LIMIT = 3600.0  # seconds for ranks to end: longer than pytest lets a test run
PATIENCE = datetime.timedelta(seconds=7200)  # of their groups: who waits in vain until then hangs
INPUT = TensorSpec((3, 8), "float32", (8, 1))
GRAD = TensorSpec((3, 8), "float32", (8, 1), True)

ONE_F_ONE_B = (
    """
    MOVE e0 m0, F s0 m0, SEND e1 m0 r1, MOVE e0 m1, F s0 m1, SEND e1 m1 r1
    RECV_GRAD e1 m0 r1, B s0 m0, MOVE e0 m2, F s0 m2, SEND e1 m2 r1
    RECV_GRAD e1 m1 r1, B s0 m1, MOVE e0 m3, F s0 m3, SEND e1 m3 r1
    RECV_GRAD e1 m2 r1, B s0 m2, RECV_GRAD e1 m3 r1, B s0 m3
    """,
    """
    RECV e1 m0 r0, F s1 m0, B s1 m0, SEND_GRAD e1 m0 r0, RECV e1 m1 r0, F s1 m1, B s1 m1, SEND_GRAD e1 m1 r0
    RECV e1 m2 r0, F s1 m2, B s1 m2, SEND_GRAD e1 m2 r0, RECV e1 m3 r0, F s1 m3, B s1 m3, SEND_GRAD e1 m3 r0
    """,
)


class Stage(nn.Module):
    """One linear layer and a function of (self, *inputs)."""

    def __init__(self, function, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.linear = nn.Linear(8, 8)
        self.function = function

    def forward(self, *inputs):
        return self.function(self, *inputs)


def layer(self, h):
    return (torch.relu(self.linear(h)),)


def microbatches(seed):
    torch.manual_seed(seed)
    return [{"x": torch.randn(3, 8)} for _ in range(MB)]


def two_stage_program(rank, values=None, shared=()):
    """1F1B over 4 microbatches; `values` cross from stage 0 to stage 1."""
    values = values or {"h": GRAD}
    channels = (
        Channel(0, -1, 0, 0, 0, ("x",), (INPUT,)),
        Channel(1, 0, 1, 0, 1, tuple(values), tuple(values.values())),
    )
    codes = (
        StageCode(0, "Stage0", ("x",), tuple(values), "", (), ()),
        StageCode(1, "Stage1", tuple(values), ("out",), "", (), ()),
    )
    parts = [part.strip() for line in ONE_F_ONE_B[rank].strip().splitlines() for part in line.split(",")]
    parts += [f"REDUCE p{p}" for p in range(len(shared))]
    instructions = tuple(Instruction.parse(part) for part in parts)
    return RankProgram(rank, 2, MB, True, instructions, channels, (codes[rank],), shared, "1f1b", "")


_numbers = itertools.count()


class Launch:
    """Processes under way. `wait` returns (exit status, output) of each; none outlives it."""

    def __init__(self, worker, num_processes, folder: Path, *args):
        context = server.context()
        self.folder = folder
        store = folder / f"store{next(_numbers)}"  # another launch in this folder may have left its addresses
        self.processes = [
            context.Process(target=_main, args=(worker, rank, num_processes, folder, store, args))
            for rank in range(num_processes)
        ]
        for process in self.processes:
            process.start()

    def wait(self, timeout=END_LIMIT):
        deadline = time.monotonic() + timeout
        try:
            for process in self.processes:
                process.join(max(0.0, deadline - time.monotonic()))
        except BaseException:  # pytest's own limit
            self._end_with_logs()
            raise
        results = []
        for rank, process in enumerate(self.processes):
            hung = process.is_alive()
            if hung:
                process.kill()
                process.join()
            results.append(("hung" if hung else process.exitcode, (self.folder / f"{rank}.log").read_text()))
        return results

    def _end_with_logs(self):
        for rank, process in enumerate(self.processes):
            print(f"rank {rank}, {process.exitcode}:\n{(self.folder / f'{rank}.log').read_text()}")
            process.kill()
            process.join()


def run_workers(worker, num_processes, folder, *args):
    """Run to the end and expect success; what worker r returned."""
    for rank, (status, log) in enumerate(Launch(worker, num_processes, folder, *args).wait()):
        assert status == 0, f"rank {rank} ended with {status}:\n{log}"
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(num_processes)]


def _main(worker, rank, num_processes, folder, store, args):
    with open(folder / f"{rank}.log", "w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    file = dist.FileStore(str(store), num_processes)
    dist.init_process_group("gloo", store=file, rank=rank, world_size=num_processes, timeout=PATIENCE)
    torch.save(worker(rank, folder, *args), folder / f"{rank}.pt")
    dist.destroy_process_group()
