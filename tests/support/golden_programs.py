"""What the compiler writes for a fixed set of models and configurations, and the fingerprints that hold it, byte for byte.

    python tests/support/golden_programs.py --dump DIR [--large] [NAME ...]    every artefact as a file, so that `diff -r A B` compares
                                                                               commits
    python tests/support/golden_programs.py --record                           writes tests/golden/bytes.txt and bytes_large.txt again

A case is a model in a configuration, such as `gpt2/p2-gpipe`. Its artefacts are those of `smpc compile --out` without the report:
plan.json, schedule.txt, timeline.json, rank_<r>.py and tensor_parallel.txt, and evaluation.txt, the instructions without a backward pass.
Costs are predicted, never measured, so nothing depends on the machine. Sizes are tiny, so a case takes about half a second.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import importlib.metadata
import os
import sys
import unittest.mock
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import golden_models
import pulp
import torch

from smpc.compile import Compilation, compile_model, passes
from smpc.kernels.setting import OPERATIONS
from smpc.partitioner.manual import ManualPartition
from smpc.report.perfetto import perfetto_json
from smpc.sample_inputs import as_inputs, first_microbatch
from smpc.tracer.attempt import RecordingRequest
from smpc.tracer.record import Recording, record_guarded

FOLDER = Path(__file__).parents[1] / "golden"
QUICK, LARGE = FOLDER / "bytes.txt", FOLDER / "bytes_large.txt"
# What the bytes may depend on beside this repository.
LIBRARIES = ("torch", "transformers", "numpy", "networkx", "PuLP", "highspy")
_HEADER = """\
# Fingerprints (sha256) of what the compiler writes: tests/behaviour/test_golden_bytes.py. A change here is a change of emitted bytes.
# Recorded with {versions}
# Write this file again, deliberately: python tests/support/golden_programs.py --record
# See what changed: python tests/support/golden_programs.py --dump DIR in both commits, then diff -r
"""

Options = dict[str, Any]


def _pipeline(ranks: int, microbatches: int, schedule: str | None = None, **more: Any) -> Options:
    """With the weight of memory that SMP's configuration has; what a call takes by default has tests of its own."""
    return {
        "pipeline_parallel_degree": ranks,
        "microbatches": microbatches,
        "schedule": schedule,
        "memory_weight": 0.8,
        **more,
    }


# Settings that are the same for all models.
CONFIGURATIONS: Mapping[str, Options] = {
    "p2": _pipeline(2, 4),
    "p2-simple": _pipeline(2, 4, pipeline="simple", active_microbatches=2),
    "p2-gpipe-memory": _pipeline(2, 4, "gpipe", memory_weight=1.0),
    "p4-1f1b": _pipeline(4, 8, "1f1b"),
    "p4-time": _pipeline(4, 8, memory_weight=0.0),
    "p2-v2": _pipeline(2, 4, "interleaved-1f1b", virtual_pipeline_degree=2),
    "p2-zb-h1": _pipeline(2, 4, "zb-h1"),
    "p4-zb-h2": _pipeline(4, 8, "zb-h2"),
    "p2-zb-v": _pipeline(2, 4, "zb-v"),
    "p2-list": _pipeline(2, 4, "list"),
    "p2-kernels": _pipeline(2, 4, kernels=OPERATIONS),
    "p2-tp2-found": _pipeline(2, 4, tensor_parallel_degree=2),
    "p1-tp4-kernels": _pipeline(1, 2, tensor_parallel_degree=4, kernels=OPERATIONS),
    "p2-replicas": _pipeline(2, 4, data_parallel_degree=2, shard_optimizer_state=True),
    "p2-fully-shard": _pipeline(2, 4, data_parallel_degree=2, fully_shard=True),
    "p2-parameters": _pipeline(2, 4, skip_tracing=True),
    "p2-devices": _pipeline(2, 4, device=["h100", "a100"], optimizer="sgd"),
    "p8": _pipeline(8, 8, "1f1b", device="l4"),
    "p2-v4": _pipeline(2, 8, "interleaved-1f1b", virtual_pipeline_degree=4),
}
# Settings that name a model's modules.
_BY_BLOCKS: Mapping[str, Callable[[str], Options]] = {
    "p2-recompute": lambda blocks: _pipeline(2, 4, recompute=(blocks,)),
    "p4-offload": lambda blocks: _pipeline(
        4, 8, "1f1b", recompute=(blocks,), offload_activations=True, activation_loading_horizon=2
    ),
}
_EVERY = (*CONFIGURATIONS, *_BY_BLOCKS, "p2-tp2-plan", "p3-manual")
_LARGE_ALONE = ("p8", "p2-v4", "p2-simple", "p4-time", "p4-zb-h2", "p2-parameters", "p2-devices")
_LARGE_CASES = (
    *(f"mixtral/{name}" for name in ("p2-v2", "p2-zb-v", "p2-recompute", "p4-1f1b")),
    *(f"t5/{name}" for name in ("p2-v2", "p2-recompute", "p4-1f1b")),
    *(f"llama_tied/{name}" for name in ("p2-v2", "p4-1f1b")),
)
_FEW = ("p2", "p4-1f1b", "p2-v2", "p2-zb-v", "p2-kernels", "p2-tp2-found", "p2-tp2-plan", "p2-recompute", "p4-offload")


def options_of(model: str, configuration: str) -> Options:
    """The keyword arguments of `compile_model` for a case."""
    facts = golden_models.FACTS[model]
    if configuration in _BY_BLOCKS:
        return _BY_BLOCKS[configuration](facts.blocks)
    if configuration == "p2-tp2-plan":
        return _pipeline(2, 4, tensor_parallel_degree=2, tensor_parallel_plan=facts.tensor_parallel_plan)
    if configuration == "p3-manual":
        return _pipeline(3, 4, manual=ManualPartition(facts.marks, 0))
    return CONFIGURATIONS[configuration]


def cases(large: bool) -> tuple[str, ...]:
    """The names of the cases: those of `make test`, or those that only `make test-all` adds."""
    return tuple(
        f"{model}/{configuration}"
        for model in golden_models.FACTS
        for configuration in _EVERY
        if _is_large(model, configuration) == large
    )


def _is_large(model: str, configuration: str) -> bool:
    few = model not in ("mlp", "gpt2") and configuration not in _FEW
    return few or configuration in _LARGE_ALONE or f"{model}/{configuration}" in _LARGE_CASES


@functools.cache
def _recording(model: str, microbatches: int) -> Recording:
    """What a model does with a microbatch, recorded once for all of its configurations: no pass changes a recording."""
    module, batch = golden_models.build(model)
    inputs = first_microbatch(as_inputs(batch), microbatches)
    return record_guarded(module, RecordingRequest(*inputs))


def _recorded(model: str, options: Options, leaf_modules: Sequence[str]) -> Recording:
    assert not leaf_modules, "no configuration names leaf modules: they would belong to what tells recordings apart"
    return _recording(model, options["microbatches"])


@contextlib.contextmanager
def patient() -> Iterator[None]:
    """HiGHS solves to the end in the block, so that no plan depends on how busy the machine is."""
    original = pulp.HiGHS.__init__

    def without_limit(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **{**kwargs, "timeLimit": None})

    with unittest.mock.patch.object(pulp.HiGHS, "__init__", without_limit):
        yield


def artefacts(case: str) -> dict[str, str]:
    """The text of every artefact of a case, by file name."""
    model_name, configuration = case.split("/")
    model, batch = golden_models.build(model_name)
    options = options_of(model_name, configuration)
    with patient(), warnings.catch_warnings(), unittest.mock.patch.object(passes, "record_guarded") as recorder:
        warnings.simplefilter("ignore")
        recorder.side_effect = lambda module, request, leaf_modules: _recorded(model_name, options, leaf_modules)
        return texts(compile_model(model, batch, warn=False, **options))


def texts(found: Compilation) -> dict[str, str]:
    """A compilation as the files that are held."""
    files = {"plan.json": found.plan.to_json(), "schedule.txt": found.schedule_text()}
    files["timeline.json"] = perfetto_json(found.plan, found.timeline())
    files |= {f"rank_{rank}.py": found.rank_source(rank) for rank in range(len(found.programs))}
    rows = [f"rank {p.rank} {instruction}\n" for p in found.evaluation_programs for instruction in p.instructions]
    files["evaluation.txt"] = "".join(rows)
    if found.sharded is not None:
        from smpc.codegen.rewrite.tensor_parallel.rewrite import describe

        files["tensor_parallel.txt"] = describe(found.sharded) + "\n"
    return files


def fingerprint(text: str) -> str:
    """The first half of a text's sha256: 128 bits."""
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def versions() -> str:
    """The libraries on which the bytes may depend, as the header of a file has them."""
    return ", ".join(f"{name} {importlib.metadata.version(name).partition('+')[0]}" for name in LIBRARIES)


def recorded(path: Path) -> tuple[str, dict[str, str]]:
    """The versions and the fingerprints by artefact (`gpt2/p2/plan.json`) that a file holds."""
    lines = path.read_text(encoding="utf-8").splitlines()
    header = next(line for line in lines if line.startswith("# Recorded with "))
    rows = [line.split() for line in lines if not line.startswith("#")]
    return header.removeprefix("# Recorded with "), {name: digest for digest, name in rows}


def _lines(names: Iterable[str]) -> Iterator[str]:
    for case in names:
        for artefact, text in artefacts(case).items():
            yield f"{fingerprint(text)}  {case}/{artefact}\n"


def record() -> None:
    """Writes the fingerprints of today's code."""
    for path, large in ((QUICK, False), (LARGE, True)):
        path.write_text(_HEADER.format(versions=versions()) + "".join(_lines(cases(large))), encoding="utf-8")


def dump(folder: Path, names: Iterable[str]) -> None:
    """Writes the artefacts of the cases into `folder`/model/configuration."""
    for case in names:
        write(folder, case, artefacts(case))


def write(folder: Path, case: str, files: Mapping[str, str]) -> None:
    """Writes the artefacts of a case into `folder`/model/configuration."""
    own = folder / case
    own.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (own / name).write_text(text, encoding="utf-8")


def main() -> None:
    """The command line above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="cases or models; all if none is given")
    parser.add_argument("--dump", type=Path, metavar="DIR", help="write the artefacts there")
    parser.add_argument("--large", action="store_true", help="dump the cases of `make test-all` too")
    parser.add_argument("--record", action="store_true", help="write the fingerprints again")
    given = parser.parse_args()
    if given.record == (given.dump is not None):
        parser.error("expected either --record or --dump DIR")
    warnings.simplefilter("ignore")
    if given.record:
        record()
        return
    every = (*cases(False), *(cases(True) if given.large or given.names else ()))
    chosen = [case for case in every if not given.names or case in given.names or case.split("/")[0] in given.names]
    if not chosen:
        parser.error(f"no case of these names; there are {', '.join(every)}")
    dump(given.dump, chosen)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
