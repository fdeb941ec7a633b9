"""What it costs a step to see that nothing has changed which the model's Python read: `python benchmarks/guards.py [--layers 126]`.

Prints microseconds for each of the two looks of a step, the modes of the modules and parameters and the environment of the program, and
their sum; the goal for a Llama of 126 layers is 100. The peer, in the same run, compares every attribute of every module in Python.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from smpc.tracer.attempt import RecordingRequest
from smpc.tracer.environment.environment_guards import Difference
from smpc.tracer.environment.memory_words import DictVersions
from smpc.tracer.record import record_guarded
from smpc.v1.steps.programs.signature import ModeReader

GOAL = 100.0


def fastest(call: Callable[[], object], repeats: int = 300) -> float:
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return 1e6 * min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=126)
    options = parser.parse_args()
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=options.layers, vocab_size=128, **sizes))
    ids = torch.zeros(1, 8, dtype=torch.long)
    versions = DictVersions()
    modes = ModeReader(model, versions)
    environment = record_guarded(
        model, RecordingRequest((), {"input_ids": ids, "labels": ids}), versions=versions
    ).environment
    before = [dict(vars(module)) for module in model.modules()]

    def look() -> Difference | None:
        versions.poll()
        modes.read()
        return environment.difference()

    def in_python() -> bool:
        return all(vars(module) == values for module, values in zip(model.modules(), before, strict=True))

    assert look() is None, "nothing has changed"
    rows = {
        "modes of modules and parameters": fastest(lambda: (versions.poll(), modes.read())),
        "environment of the program": fastest(environment.difference),
        "both": fastest(look),
        "peer: every attribute, in Python": fastest(in_python, 30),
    }
    print(f"{len(before)} modules, {sum(1 for _ in model.parameters())} parameters, {len(environment.guards)} guards")
    for name, microseconds in rows.items():
        print(f"{name:34} {microseconds:8.1f} us")
    peer = rows["peer: every attribute, in Python"]
    print(f"both / goal of {GOAL:.0f} us: {rows['both'] / GOAL:.2f}; both / peer: {rows['both'] / peer:.3f}")
    attribute = model.model.layers[3].self_attn
    attribute.scaling *= 2
    assert look() is not None, "a change is seen"


if __name__ == "__main__":
    main()
