"""A 2-rank GPT-2 pipeline on gloo: smpc against torch.distributed.pipelining, step by step in the same processes.

    make bench          or: python benchmarks/pipeline.py [--steps 30]

Both run 1F1B over the same stage modules, the same microbatches and the same loss, one thread a process. Steps alternate, so
that whatever else the machine does hits both; the ratio is that of the medians (below 1 is faster than torch).
Then the interpreter's own cost: see interpreter.py.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from transformers import GPT2Config, GPT2Model

from smpc.compile import Compilation, PipelineOptions, compile_trace
from smpc.executor.transport import GlooTransport
from smpc.partitioner.manual import ManualPartition
from smpc.runtime import Runtime
from smpc.tracer import record

WIDTH, LAYERS, LENGTH, VOCABULARY = 256, 8, 64, 256
SIZES = {"launch-bound": (8, 8), "balanced": (32, 8), "compute-bound": (64, 4)}  # batch size, microbatches


class Half(nn.Module):
    """Half of the blocks, with the embeddings in front or the head behind."""

    def __init__(self, gpt: GPT2Model, is_first: bool) -> None:
        super().__init__()
        middle = len(gpt.h) // 2
        self.is_first = is_first
        self.blocks = nn.ModuleList(gpt.h[:middle] if is_first else gpt.h[middle:])
        if is_first:
            self.tokens, self.positions = gpt.wte, gpt.wpe
        else:
            self.norm, self.head = gpt.ln_f, nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_first:
            x = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        return x if self.is_first else self.head(self.norm(x))


class Whole(nn.Module):
    """Both halves."""

    def __init__(self) -> None:
        super().__init__()
        config = GPT2Config(
            n_embd=WIDTH, n_layer=LAYERS, n_head=4, vocab_size=VOCABULARY, n_positions=LENGTH, bos_token_id=0, eos_token_id=0,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
        )  # fmt: skip
        gpt = GPT2Model(config)
        self.first, self.second = Half(gpt, True), Half(gpt, False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def compile_halves(model: Whole, ids: torch.Tensor, microbatches: int) -> Compilation:
    """Our programs for the very stages that torch runs."""
    halves = ManualPartition((("first", 0), ("second", 1)), 0)
    options = PipelineOptions(2, microbatches, manual=halves)
    return compile_trace(record(model, (ids[: len(ids) // microbatches],)), options)


def worker(rank: int, folder: str, steps: int) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    for name, (batch_size, microbatches) in SIZES.items():
        torch.manual_seed(0)
        model = Whole()
        ids = torch.randint(0, VOCABULARY, (batch_size, LENGTH))
        ours = our_step(copy.deepcopy(model), ids, microbatches, rank)
        theirs = torchs_step(copy.deepcopy(model), ids, microbatches, rank)
        times: dict[str, list[float]] = {"ours": [], "torch": []}
        losses = {}
        for step in range(steps + 3):
            for label, run in (("ours", ours), ("torch", theirs)):
                dist.barrier()
                start = time.perf_counter()
                losses[label] = run()
                dist.barrier()
                if step >= 3:
                    times[label].append(time.perf_counter() - start)
        if rank == 1:
            assert losses["ours"] == losses["torch"], losses
        if rank == 0:
            medians = {label: statistics.median(values) for label, values in times.items()}
            print(
                f"{name:14} batch {batch_size:3}, {microbatches} microbatches: smpc {1e3 * medians['ours']:7.1f} ms, "
                f"torch {1e3 * medians['torch']:7.1f} ms, ratio {medians['ours'] / medians['torch']:.3f}",
                flush=True,
            )
    dist.destroy_process_group()


def our_step(model: Whole, ids: torch.Tensor, microbatches: int, rank: int):  # noqa: ANN201
    runtime = Runtime(model, rank=rank, transport=GlooTransport(dist.group.WORLD))
    program = runtime.install(compile_halves(model, ids, microbatches))
    parts = [((part,), {}) for part in ids.chunk(microbatches)]
    targets = ids.chunk(microbatches)

    def step() -> list[float]:
        model.zero_grad(set_to_none=True)
        losses: list[float] = []

        def on_output(microbatch: int, logits: torch.Tensor) -> list[tuple[torch.Tensor, None]]:
            loss = loss_of(logits, targets[microbatch])
            losses.append(loss.item())
            return [(loss / microbatches, None)]

        runtime.run(program, parts if rank == 0 else None, on_output if rank == 1 else None, training=True)
        return losses

    return step


def torchs_step(model: Whole, ids: torch.Tensor, microbatches: int, rank: int):  # noqa: ANN201
    half = model.first if rank == 0 else model.second
    stage = PipelineStage(half, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, microbatches, loss_fn=loss_of)

    def step() -> list[float]:
        model.zero_grad(set_to_none=True)
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(ids)
        else:
            schedule.step(target=ids, losses=losses)
        return [loss.item() for loss in losses]

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, (folder, args.steps), nprocs=2)
    sys.path.insert(0, str(Path(__file__).parent))
    import interpreter

    interpreter.main()


if __name__ == "__main__":
    main()
