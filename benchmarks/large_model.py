"""A Llama of 405 billion parameters, from trace to report, beside what torch.export takes for tracing it alone.

    python benchmarks/large_model.py [--layers 126]

Both run on meta tensors, each in a process of its own, one after the other. Ours records, cuts in 16 x 4 stages, writes and verifies the
programs of all ranks, and renders the report; times are wall clock without imports and without making the model. Memory is the most that
the process held. The last line is the ratio of the times.
"""

from __future__ import annotations

import argparse
import io
import multiprocessing as mp
import resource
import time
import warnings

import torch
from transformers import LlamaConfig, LlamaForCausalLM

RANKS, PIECES, MICROBATCHES, LENGTH = 16, 4, 64, 4096


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


def ours(layers: int) -> tuple[float, str]:
    """Seconds from trace to report, and what was found."""
    from rich.console import Console

    from smpc.compile import compile_model
    from smpc.report import print_report

    model = build(layers)
    ids = torch.zeros(MICROBATCHES, LENGTH, dtype=torch.int64, device="meta")
    start = time.perf_counter()
    found = compile_model(
        model,
        {"input_ids": ids, "labels": ids},
        pipeline_parallel_degree=RANKS,
        virtual_pipeline_degree=PIECES,
        microbatches=MICROBATCHES,
        schedule="interleaved-1f1b",
    )
    print_report(found.plan, found.timeline(), Console(file=io.StringIO()))
    return time.perf_counter() - start, f"{len(found.plan.stages)} stages, gap {found.plan.objective.gap:.1%}"


def export(layers: int) -> tuple[float, str]:
    """Seconds of torch.export's faster way on one microbatch."""
    model = build(layers)
    ids = torch.zeros(1, LENGTH, dtype=torch.int64, device="meta")
    start = time.perf_counter()
    found = torch.export.export(model, (), {"input_ids": ids, "labels": ids}, strict=False)
    return time.perf_counter() - start, f"{len(found.graph.nodes)} nodes"


def measured(name: str, layers: int, queue: mp.SimpleQueue[tuple[float, str, float]]) -> None:
    warnings.simplefilter("ignore")
    seconds, what = {"smpc": ours, "torch.export": export}[name](layers)
    queue.put((seconds, what, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=126)
    layers = parser.parse_args().layers
    context, seconds = mp.get_context("spawn"), {}
    for name in ("smpc", "torch.export"):
        queue: mp.SimpleQueue[tuple[float, str, float]] = context.SimpleQueue()
        process = context.Process(target=measured, args=(name, layers, queue))
        process.start()
        process.join()
        if process.exitcode:
            raise SystemExit(f"{name}: ended with status {process.exitcode}")
        seconds[name], what, gigabytes = queue.get()
        print(f"{name:<13} {seconds[name]:6.1f} s {gigabytes:6.2f} GB   {what}")
    print(f"ratio {seconds['smpc'] / seconds['torch.export']:.2f}")


if __name__ == "__main__":
    main()
