"""How long recording takes, beside torch.export: the models of the tests, on the CPU.

    python benchmarks/trace_time.py                  every model, best of three
    python benchmarks/trace_time.py --only gpt2 --runs 5

Both get the same model and the same microbatch, on real tensors. torch.export runs with strict=False, its faster way; what it
cannot export is shown with the error's name and counts as nothing. The last line is the median of the ratios. Each model is built and
timed in this process, ours first, after one run of a small model with both, so that neither pays for imports.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from smpc.sample_inputs import first_microbatch
from smpc.tracer import record

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

MICROBATCHES = 4


def ours(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    record(model, args, kwargs)


def export(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    torch.export.export(model, args, kwargs, strict=False)


def best_time(call: Callable[..., None], model: nn.Module, inputs: Any, runs: int) -> float | str:
    """Seconds of the fastest run, or the name of the error."""
    seconds = []
    for _ in range(runs):
        start = time.perf_counter()
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                call(model, *inputs)
        except Exception as error:  # whatever a tracer raises
            return type(error).__name__
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def models() -> dict[str, Callable[[], tuple[nn.Module, Any]]]:
    import architectures
    import zoo

    names = [*zoo.MODELS, *(name for name in architectures.PLAIN), *architectures.HUGGING_FACE]
    found: dict[str, Callable[[], tuple[nn.Module, Any]]] = {}
    for name in dict.fromkeys(names):
        source = zoo if name in zoo.MODELS else architectures
        found[name] = lambda source=source, name=name: source.build(name)  # type: ignore[misc]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=3, help="runs of each, of which the fastest counts")
    parser.add_argument("--only", default="", help="part of the names of the models to time")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)  # torch logs what it cannot export
    warm = nn.Linear(2, 2)
    for call in (ours, export):
        best_time(call, warm, ((torch.zeros(1, 2),), {}), 1)
    ratios = []
    print(f"{'model':<32}{'ours':>12}{'torch.export':>36}{'ratio':>8}")
    for name, build in models().items():
        if options.only not in name:
            continue
        model, batch = build()
        inputs = first_microbatch(batch, MICROBATCHES)
        mine, other = (best_time(call, model, inputs, options.runs) for call in (ours, export))
        cells = [time_ if isinstance(time_, str) else f"{time_ * 1e3:.0f} ms" for time_ in (mine, other)]
        ratio = ""
        if isinstance(mine, float) and isinstance(other, float):
            ratios.append(other / mine)
            ratio = f"{ratios[-1]:.1f}"
        print(f"{name:<32}{cells[0]:>12}{cells[1]:>36}{ratio:>8}", flush=True)
    if ratios:
        print(f"median ratio {statistics.median(ratios):.1f} over {len(ratios)} models that both record")


if __name__ == "__main__":
    main()
