"""Pipelines on gloo: smpc against torch.distributed.pipelining, step by step in the same processes.

    make bench          or: python benchmarks/pipeline.py [--steps 30] [--schedules 1f1b zb-v ...] [--sizes balanced ...]

Two ranks, one thread a process. Both run the same schedule over the same stage modules (equal stages: four blocks of GPT-2 a rank,
with the embeddings in front of the first and the head behind the last), the same microbatches and the same loss. Steps
alternate, so that whatever else the machine does hits both; the ratio is the median of those of neighbouring steps (below 1 is faster
than torch). `cpu` is the same of the processor time of rank 0, which says more where other programs run.

    schedule            torch's class               pieces per rank
    gpipe               ScheduleGPipe               1
    1f1b                Schedule1F1B                1
    interleaved-1f1b    ScheduleInterleaved1F1B     2
    zb-v                ScheduleZBVZeroBubble       2

The measured bubble is that of further steps of ours in which every instruction is timed: 1 - (time in F, B and W on all ranks) / (ranks x
time from the first of them to the end of the last instruction), the median. The simulated one is what the simulator makes of the same
schedule from the parts that those steps had: `schedule` is what the order alone leaves idle with even times, `uneven` and `messages` are
what the true time of each action and what messages cost add to it, `keeping` what a rank does besides (see
`smpc.report.measured`). What a busy machine does to a process counts as its computing, and a rank that is not run when its message
comes as its bubble: with more programs than cores the measured one is higher. The last ratio, measured to simulated, is the executor's:
what it makes ranks wait for beyond all that.
A step of `compute-bound` takes seconds; the median needs all of them, for a pair's ratio is off by several percent on a machine that is
shared.
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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)
from transformers import GPT2Config, GPT2Model

from smpc.codegen.schedules.named import choose
from smpc.compile import Compilation, compile_plan
from smpc.executor.transport import GlooTransport
from smpc.observe.observer import RankRecord
from smpc.partitioner.graph.plan import ScheduleSummary
from smpc.partitioner.planner import plan_from_assignment
from smpc.report.measured import explain, pipeline_steps
from smpc.report.predict import plan_links
from smpc.runtime import Runtime
from smpc.tracer import NodeKind, record

RANKS, VOCABULARY, BLOCKS = 2, 256, 2


@dataclass(frozen=True, slots=True)
class Size:
    """A batch of `samples` sequences of `length` tokens, in so many microbatches, through blocks of `width`."""

    width: int
    length: int
    samples: int
    microbatches: int


SIZES = {
    "launch-bound": Size(64, 16, 8, 8),  # 4/5 of a block's time passes before and between its kernels
    "balanced": Size(256, 64, 8, 8),
    "compute-bound": Size(256, 64, 64, 4),
}
THEIRS = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved-1f1b": ScheduleInterleaved1F1B,
    "zb-v": ScheduleZBVZeroBubble,
}
WARM_UP = 3
Step = Callable[[], list[float]]


class Piece(nn.Module):
    """Some blocks, with the embeddings in front of the first ones and the head behind the last ones."""

    def __init__(self, gpt: GPT2Model, index: int, num_pieces: int, width: int) -> None:
        super().__init__()
        self.is_first, self.is_last = index == 0, index == num_pieces - 1
        share = len(gpt.h) // num_pieces
        self.blocks = nn.ModuleList(gpt.h[index * share : (index + 1) * share])
        if self.is_first:
            self.tokens, self.positions = gpt.wte, gpt.wpe
        if self.is_last:
            self.norm, self.head = gpt.ln_f, nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_first:
            x = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) if self.is_last else x


class Whole(nn.Module):
    """All pieces, one after the other."""

    def __init__(self, num_pieces: int, size: Size) -> None:
        super().__init__()
        config = GPT2Config(
            n_embd=size.width, n_layer=2 * RANKS * BLOCKS, n_head=4, vocab_size=VOCABULARY, n_positions=size.length,
            bos_token_id=0, eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
        )  # fmt: skip
        gpt = GPT2Model(config)
        self.pieces = nn.ModuleList(Piece(gpt, index, num_pieces, size.width) for index in range(num_pieces))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for piece in self.pieces:
            x = piece(x)
        return x


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def compile_pieces(model: Whole, ids: torch.Tensor, microbatches: int, name: str) -> Compilation:
    """Our programs for the very stages that torch runs."""
    choice = choose(RANKS, microbatches, schedule=name)
    trace = record(model, (ids[: len(ids) // microbatches],))
    assignment, piece = {}, 0
    for node in trace.nodes:
        call = trace.calls[node.call]
        while call.parent >= 0 and not call.fqn.startswith("pieces."):
            call = trace.calls[call.parent]
        piece = int(call.fqn.split(".")[1]) if call.fqn.startswith("pieces.") else piece
        if node.kind in (NodeKind.CALL_FUNCTION, NodeKind.CALL_MODULE):
            assignment[node.name] = piece
    plan = plan_from_assignment(
        trace,
        assignment,
        num_stages=len(choice.placement),
        in_flight=choice.in_flight,
        placement=choice.placement,
        schedule=ScheduleSummary(choice.name, microbatches, choice.active_microbatches, 0.0, 0.0),
    )
    return compile_plan(trace, plan)


def our_step(
    model: Whole, compilation: Compilation, ids: torch.Tensor, microbatches: int, rank: int
) -> tuple[Step, Runtime]:
    runtime = Runtime(model, rank=rank, transport=GlooTransport(dist.new_group()))
    program = runtime.install(compilation)
    parts, targets = [((part,), {}) for part in ids.chunk(microbatches)], ids.chunk(microbatches)
    has_loss = compilation.plan.stages[-1].rank == rank

    def step() -> list[float]:
        model.zero_grad(set_to_none=True)
        losses: list[float] = []

        def on_output(microbatch: int, logits: torch.Tensor) -> list[tuple[torch.Tensor, None]]:
            loss = loss_of(logits, targets[microbatch])
            losses.append(loss.item())
            return [(loss / microbatches, None)]

        runtime.run(program, parts if rank == 0 else None, on_output if has_loss else None, training=True)
        return losses

    return step, runtime


def torchs_step(model: Whole, placement: tuple[int, ...], name: str, ids: torch.Tensor, num: int, rank: int) -> Step:
    own = [index for index, holder in enumerate(placement) if holder == rank]
    stages = [PipelineStage(model.pieces[i], i, len(placement), torch.device("cpu")) for i in own]
    is_single = len(placement) == RANKS
    schedule = THEIRS[name](stages[0] if is_single else stages, num, loss_fn=loss_of)

    def step() -> list[float]:
        model.zero_grad(set_to_none=True)
        losses: list[torch.Tensor] = []
        has_loss = placement[-1] == rank
        args = (ids,) if rank == placement[0] else ()
        schedule.step(*args, **({"target": ids, "losses": losses} if has_loss else {}))
        return [loss.item() for loss in losses]

    return step


def worker(rank: int, folder: str, steps: int, schedules: list[str], sizes: list[str]) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", RANKS), rank=rank, world_size=RANKS)
    if rank == 0:
        print(
            f"{'size':14} {'schedule':17} {'smpc':>9} {'torch':>9} {'ratio':>6} {'cpu':>6} "
            f"{'bubble':>7} {'simulated':>9} {'ratio':>6} {'schedule':>8} {'uneven':>7} {'messages':>8} {'keeping':>7}",
            flush=True,
        )
    for size in sizes:
        for name in schedules:
            compare(rank, size, name, steps)
    dist.destroy_process_group()


def compare(rank: int, size: str, name: str, steps: int) -> None:
    """A row of the table."""
    shape = SIZES[size]
    num = shape.microbatches
    placement = choose(RANKS, num, schedule=name).placement
    torch.manual_seed(0)
    model = Whole(len(placement), shape)
    ids = torch.randint(0, VOCABULARY, (shape.samples, shape.length))
    compilation = compile_pieces(model, ids, num, name)
    ours, runtime = our_step(copy.deepcopy(model), compilation, ids, num, rank)
    runs = {"ours": ours, "torch": torchs_step(copy.deepcopy(model), placement, name, ids, num, rank)}
    times: dict[str, list[float]] = {"ours": [], "torch": []}
    computed: dict[str, list[float]] = {"ours": [], "torch": []}
    losses = {}
    for step in range(steps + WARM_UP):
        for label, run in list(runs.items())[:: 1 - 2 * (step % 2)]:
            dist.barrier()
            start, used = time.perf_counter(), time.process_time()
            losses[label] = run()
            used = time.process_time() - used
            dist.barrier()
            if step >= WARM_UP:
                times[label].append(time.perf_counter() - start)
                computed[label].append(used)
    assert losses["ours"] == losses["torch"], losses
    runtime.observe(steps)
    for _ in range(steps + 1):  # the first one is not timed
        dist.barrier()
        ours()
    records: list[RankRecord] = [runtime.record] * RANKS
    dist.all_gather_object(records, runtime.record)
    if rank == 0:
        bubble = explain(list(pipeline_steps(records, RANKS)), plan_links(compilation.plan))
        assert bubble is not None
        ratio = statistics.median(a / b for a, b in zip(times["ours"], times["torch"], strict=True))
        cpu = statistics.median(computed["ours"]) / statistics.median(computed["torch"])
        medians = {label: statistics.median(values) for label, values in times.items()}
        print(
            f"{size:14} {name:17} {1e3 * medians['ours']:6.1f} ms {1e3 * medians['torch']:6.1f} ms "
            f"{ratio:6.3f} {cpu:6.3f} {bubble.measured:7.1%} {bubble.simulated:9.1%} {bubble.measured / bubble.simulated:6.3f} "
            f"{bubble.schedule:8.1%} {bubble.uneven:+7.1%} {bubble.messages:+8.1%} {bubble.bookkeeping:+7.1%}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--schedules", nargs="+", choices=list(THEIRS), default=list(THEIRS))
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, (folder, args.steps, args.schedules, args.sizes), nprocs=RANKS)
    sys.path.insert(0, str(Path(__file__).parent))
    import interpreter

    interpreter.main()


if __name__ == "__main__":
    main()
