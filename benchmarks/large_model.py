"""A Llama of 405 billion parameters, from trace to report, beside what torch.export takes for tracing it alone.

    python benchmarks/large_model.py [--layers 126] [--only "smpc, long"]

All run on meta tensors, each in a process of its own, one after the other. Ours records, cuts in 16 x 4 stages, writes and verifies the
programs of all ranks, and renders the report; "smpc, long" has sequences of 131,072 tokens on 16 x 8 x 16 ranks (pipeline, tensor,
context), and the ring's traffic in its report. Times are wall clock without imports and without making the model, with seconds of the
processor beside them. Memory is the most that the process held. The last line is the ratio of the times of the first and the last row.
"""

from __future__ import annotations

import argparse
import io
import multiprocessing as mp
import resource
import time
import warnings
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

RANKS, PIECES, MICROBATCHES, LENGTH = 16, 4, 64, 4096
LONG = 131072
OPTIONS = {"pipeline_parallel_degree": RANKS, "virtual_pipeline_degree": PIECES, "microbatches": MICROBATCHES}
LONG_OPTIONS = {
    "pipeline_parallel_degree": RANKS, "tensor_parallel_degree": 8, "context_parallel_degree": 16, "microbatches": RANKS,
    "recompute": ("model.layers.*",), "tensor_parallel_outputs": ("loss",),
}  # fmt: skip


def build(layers: int) -> LlamaForCausalLM:
    """The shapes of Llama 3.1 405B; nothing is allocated."""
    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=16384,
        intermediate_size=53248,
        num_hidden_layers=layers,
        num_attention_heads=128,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        use_cache=False,
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config).train()


def ours(layers: int) -> tuple[float, float, str]:
    """Seconds from trace to report, of the wall and of the processor, and what was found."""
    return compiled(layers, LENGTH, {**OPTIONS, "schedule": "interleaved-1f1b"})


def long(layers: int) -> tuple[float, float, str]:
    """The same of long sequences."""
    return compiled(layers, LONG, LONG_OPTIONS)


def compiled(layers: int, length: int, options: dict[str, Any]) -> tuple[float, float, str]:
    """The same with these options."""
    from rich.console import Console

    from smpc.compile import compile_model
    from smpc.report import print_report
    from smpc.report.notebook import sharing_texts

    model = build(layers)
    ids = torch.zeros(options["microbatches"], length, dtype=torch.int64, device="meta")
    start = time.perf_counter(), time.process_time()
    found = compile_model(model, {"input_ids": ids, "labels": ids}, **options)
    print_report(found.plan, found.timeline(), Console(file=io.StringIO()))
    text = "".join(sharing_texts(found).values())
    ring = next((f"; {line.split(maxsplit=1)[1]}" for line in text.splitlines() if "ring_attention" in line), "")
    seconds = time.perf_counter() - start[0], time.process_time() - start[1]
    return *seconds, f"{len(found.plan.stages)} stages, gap {found.plan.objective.gap:.1%}{ring}"


def export(layers: int) -> tuple[float, float, str]:
    """Seconds of torch.export's faster way on one microbatch."""
    model = build(layers)
    ids = torch.zeros(1, LENGTH, dtype=torch.int64, device="meta")
    start = time.perf_counter(), time.process_time()
    found = torch.export.export(model, (), {"input_ids": ids, "labels": ids}, strict=False)
    return time.perf_counter() - start[0], time.process_time() - start[1], f"{len(found.graph.nodes)} nodes"


ROWS = {"smpc": ours, "smpc, long": long, "torch.export": export}


def measured(name: str, layers: int, queue: mp.SimpleQueue[tuple[float, float, str, float]]) -> None:
    warnings.simplefilter("ignore")
    queue.put((*ROWS[name](layers), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=126)
    parser.add_argument("--only", choices=ROWS, action="append", help="rows; by default all")
    given = parser.parse_args()
    layers, chosen = given.layers, given.only or tuple(ROWS)
    context, seconds = mp.get_context("spawn"), {}
    for name in chosen:
        queue: mp.SimpleQueue[tuple[float, float, str, float]] = context.SimpleQueue()
        process = context.Process(target=measured, args=(name, layers, queue))
        process.start()
        process.join()
        if process.exitcode:
            raise SystemExit(f"{name}: ended with status {process.exitcode}")
        seconds[name], processor, what, gigabytes = queue.get()
        print(f"{name:<13} {seconds[name]:6.1f} s {processor:6.1f} s {gigabytes:6.2f} GB   {what}")
    if {"smpc", "torch.export"} <= seconds.keys():
        print(f"ratio {seconds['smpc'] / seconds['torch.export']:.2f}")


if __name__ == "__main__":
    main()
