"""The processes that measure at once: one alone, or all processes of a job on one or several hosts."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as torch_dist

from smpc import dist
from smpc.errors import ConfigError
from smpc.executor.host_memory.freed_memory import keep_freed_memory


@dataclass(frozen=True)
class CalibrationRanks:
    """This process among them, and where it computes. What they do together is collective over all of them."""

    rank: int
    size: int
    per_host: int
    device: torch.device

    @classmethod
    def here(cls) -> CalibrationRanks:
        """The ranks of the launcher's environment; alone without one. Makes their process group, and has memory as ranks in training."""
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if device.type == "cpu":
            keep_freed_memory()
        if dist.get_world_size() > 1:
            dist.initialize_dist("gpu" if device.type == "cuda" else "cpu")
        if device.type == "cuda":
            device = torch.device("cuda", dist.get_local_rank() % torch.cuda.device_count())
            torch.cuda.set_device(device)
        size, per_host = dist.get_world_size(), dist.get_local_world_size()
        if size % per_host:
            raise ConfigError(f"calibrate: expected as many ranks on each host, found {per_host} of {size} here")
        return cls(dist.get_global_rank(), size, per_host, device)

    def together(self) -> None:
        """Wait for all."""
        if self.size > 1:
            torch_dist.barrier()

    def most(self, value: float) -> float:
        """The largest value of all ranks."""
        return self._reduced([value], torch_dist.ReduceOp.MAX)[0]

    def mean(self, values: list[float]) -> list[float]:
        """The means over the ranks."""
        return [value / self.size for value in self._reduced(values, torch_dist.ReduceOp.SUM)]

    def _reduced(self, values: list[float], operation: torch_dist.ReduceOp.RedOpType) -> list[float]:
        if self.size == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.float64)
        torch_dist.all_reduce(tensor, operation)
        found: list[float] = tensor.tolist()
        return found

    def timer(self) -> Callable[[], float]:
        """What work on this device is timed by, in seconds: this thread's processor time where there is no more to it, else the wall clock.

        With one thread a rank, and a core for each, what other programs do meanwhile counts for nothing then.
        """
        cores = len(os.sched_getaffinity(0))
        is_alone = self.device.type == "cpu" and torch.get_num_threads() == 1 and self.per_host <= cores
        return time.thread_time if is_alone else time.perf_counter

    def wait(self) -> None:
        """Until the device has done what it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def end(self) -> None:
        """Leave the others, once all are done."""
        if self.size > 1:
            torch_dist.barrier()
            torch_dist.destroy_process_group()
