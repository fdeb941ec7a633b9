"""A one-rank program beside eager training, and both beside their prediction: time of forward and backward, and peak memory.

    python benchmarks/one_rank.py [--models gpt2-xl llama-1b] [--device cuda] [--steps 10] [--describe h200] [--stages 2] [--compiled]

Each model has random weights in bfloat16 and trains on 4 microbatches. `eager` runs the model by itself, `program` the compiled program in
this process; both sum gradients, and neither has an optimizer. The prediction is for the device of `--describe`, by default the one whose
name torch's contains. On a CPU (`--device cpu --models tiny`) there is no memory to measure.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from smpc.compile import Compilation, compile_model
from smpc.partitioner.costs.device import DEVICES
from smpc.runtime import LoopbackRuntime
from smpc.sample_inputs import Inputs

MICROBATCHES = 4


def gpt2(**sizes: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, use_cache=False))


def llama(**sizes: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**sizes, use_cache=False))


# name -> (model, vocabulary, tokens of a sequence, samples of a microbatch)
MODELS: dict[str, tuple[Callable[[], nn.Module], int, int, int]] = {
    "gpt2-xl": (lambda: gpt2(n_embd=1600, n_layer=48, n_head=25), 50257, 1024, 4),
    "llama-1b": (
        lambda: llama(
            hidden_size=2048,
            intermediate_size=8192,
            num_hidden_layers=16,
            num_attention_heads=32,
            num_key_value_heads=8,
            vocab_size=128256,
        ),
        128256,
        2048,
        2,
    ),
    "tiny": (lambda: gpt2(n_embd=64, n_layer=2, n_head=2, vocab_size=128, n_positions=32), 128, 32, 2),
}


def median_seconds(step: Callable[[], None], parameters: list[nn.Parameter], device: str, steps: int) -> float:
    """Of a step, after two that do not count."""
    found = []
    for _ in range(steps + 2):
        for parameter in parameters:
            parameter.grad = None
        wait(device)
        start = time.perf_counter()
        step()
        wait(device)
        found.append(time.perf_counter() - start)
    return statistics.median(found[2:])


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def peak(step: Callable[[], None], device: str) -> int:
    """Bytes at most allocated during a step; 0 on a CPU."""
    if device != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats()
    step()
    return torch.cuda.max_memory_allocated()


def run_program(
    model: nn.Module, compilation: Compilation, parts: list[Inputs], device: str, steps: int, *, compiled: bool
) -> tuple[float, int]:
    """Seconds and peak bytes of the program, over the model's own parameters. `compiled`: each stage by torch.compile."""
    if compiled:
        model.compile()
    runtime = LoopbackRuntime(model, device)
    program = runtime.install(compilation)

    def step() -> None:
        runtime.run(program, parts, lambda _, output: [(output.loss / MICROBATCHES, None)], training=True)

    return median_seconds(step, list(model.parameters()), device, steps), peak(step, device)


def compare(name: str, device: str, described: str, args: Any) -> None:
    build, vocabulary, length, samples = MODELS[name]
    torch.manual_seed(0)
    model = build().to(torch.bfloat16)
    ids = torch.randint(0, vocabulary, (MICROBATCHES * samples, length))
    batch: Inputs = ((), {"input_ids": ids, "labels": ids})
    compilation = compile_model(
        model,
        batch,
        pipeline_parallel_degree=args.stages,
        microbatches=MICROBATCHES,
        device=described,
        optimizer="sgd",
        memory_weight=0.0,
    )
    parts = [((), {"input_ids": part, "labels": part}) for part in ids.to(device).chunk(MICROBATCHES)]
    in_program, program_peak = run_program(
        copy.deepcopy(model).to(device), compilation, parts, device, args.steps, compiled=args.compiled
    )
    model.to(device)

    def eager() -> None:
        for _, kwargs in parts:
            (model(**kwargs).loss / MICROBATCHES).backward()

    in_eager = median_seconds(eager, list(model.parameters()), device, args.steps)
    plan = compilation.plan
    predicted = sum(
        MICROBATCHES * (stage.forward_time + stage.backward_time) for stage in plan.stages
    )  # one after another
    print(
        f"{name}: eager {1e3 * in_eager:.1f} ms, program {1e3 * in_program:.1f} ms ({in_program / in_eager:.3f} of eager), "
        f"predicted for {described} {1e3 * predicted:.1f} ms ({predicted / in_program:.2f} of measured)",
        flush=True,
    )
    if program_peak:
        found = sum(stage.peak_memory_bytes for stage in plan.stages)
        print(f"{name}: peak {program_peak / 2**30:.2f} GiB, predicted {found / 2**30:.2f} GiB", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["gpt2-xl", "llama-1b"], choices=list(MODELS))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--describe", help="the name of a device, or a .toml file")
    parser.add_argument(
        "--stages", type=int, default=1, help="stages of the program, in this process one after another"
    )
    parser.add_argument("--compiled", action="store_true", help="each stage is compiled by torch.compile")
    args: Any = parser.parse_args()
    name = torch.cuda.get_device_name().lower() if args.device == "cuda" else "cpu"
    described = args.describe or next((known for known in DEVICES if known in name), "h100")
    for model in args.models:
        compare(model, args.device, described, args)


if __name__ == "__main__":
    main()
