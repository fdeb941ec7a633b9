"""What the structure of the product costs: how many files and functions a training step and a small compile go through, and their sizes.

A steady step of a nine-layer MLP on two ranks over gloo, plain SGD, as rank 0 sees it; `smpc.partition` of the same MLP. Product functions
alone are counted, by a profiler hook in every thread. Run: python benchmarks/house.py [--no-ranks]
"""

from __future__ import annotations

import argparse
import ast
import sys
import tempfile
import threading
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import nn

import smpc

PRODUCT = Path(smpc.__file__).parent
REPOSITORY = PRODUCT.parents[1]
LONG_FUNCTION, FULL_FOLDER = 60, 15
WARM_UP = 3


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(9) for layer in (nn.Linear(16, 16), nn.ReLU())))


def sources() -> dict[str, Path]:
    """Every product file by its resolved path, with the path below src/smpc that names it."""
    return {
        str(path.resolve()): path.relative_to(PRODUCT)
        for folder in (PRODUCT, *(entry for entry in PRODUCT.iterdir() if entry.is_symlink()))
        for path in sorted(folder.rglob("*.py"))
    }


def counted(run: Callable[[], object]) -> Counter[tuple[str, str, int]]:
    """How often each product function is called in `run`, in all threads: by file, name and line."""
    files, calls, resolved = sources(), Counter[tuple[str, str, int]](), dict[str, str]()

    def hook(frame: FrameType, event: str, _: Any) -> None:
        if event != "call":
            return
        code = frame.f_code
        name = code.co_filename
        if name not in resolved:
            resolved[name] = str(Path(name).resolve())
        if resolved[name] in files:
            calls[resolved[name], code.co_qualname, code.co_firstlineno] += 1

    threading.setprofile(hook)
    sys.setprofile(hook)
    try:
        run()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return calls


def summary(calls: Counter[tuple[str, str, int]]) -> str:
    kept = {key: count for key, count in calls.items() if key[1] != "<module>"}
    files = {path for path, _, _ in kept}
    return f"{len(files)} files, {len(kept)} functions, {sum(kept.values())} calls"


def small_compile() -> str:
    """The second compile: what is imported on the way counts only by what is called."""
    batch = torch.zeros(8, 16)

    def run() -> None:
        smpc.partition(mlp(), batch, pipeline_parallel_degree=2, microbatches=4)

    run()
    return summary(counted(run))


def _rank(rank: int, folder: str) -> None:
    import os

    import smpc.v1 as smp

    settings = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    os.environ.update({name: str(value) for name, value in settings.items()})
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 4, "ddp": False})
    model = smp.DistributedModel(mlp())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def train(model: Any, inputs: torch.Tensor) -> torch.Tensor:
        loss = model(inputs).square().mean()
        model.backward(loss)
        return loss

    def step() -> None:
        optimizer.zero_grad()
        train(model, torch.ones(8, 16)).reduce_mean()
        optimizer.step()

    for _ in range(WARM_UP):
        step()
    Path(folder, str(rank)).write_text(summary(counted(step)), encoding="utf-8")
    smp.shutdown()


def training_step() -> str:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (folder,), nprocs=2)
        return Path(folder, "0").read_text(encoding="utf-8")


def long_functions(files: dict[str, Path]) -> list[str]:
    found = []
    for path, name in files.items():
        if name.name.endswith("_triton.py"):
            continue
        for node in ast.walk(ast.parse(Path(path).read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > LONG_FUNCTION:
                    found.append(f"{name}:{node.lineno} {node.name} {length}")
    return sorted(found)


def exceptions() -> int:
    settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = settings["tool"]["importlinter"]["contracts"]
    return sum(len(contract.get("ignore_imports", ())) for contract in contracts)


def sizes(files: dict[str, Path]) -> Iterator[tuple[str, str]]:
    lines = {path: len(Path(path).read_text(encoding="utf-8").splitlines()) for path in files}
    packages: dict[str, list[int]] = {}
    for path, name in files.items():
        packages.setdefault(name.parts[0] if len(name.parts) > 1 else "(root)", []).append(lines[path])
    for package, counts in sorted(packages.items()):
        yield f"  {package}", f"{len(counts)} files, {sum(counts)} lines"
    yield "product", f"{len(files)} files, {sum(lines.values())} lines"


def rows(*, ranks: bool) -> Iterator[tuple[str, str]]:
    """The table, line by line."""
    files = sources()
    if ranks:
        yield "a steady training step, rank 0", training_step()
    yield "a small compile", small_compile()
    yield from sizes(files)
    long = long_functions(files)
    yield f"functions over {LONG_FUNCTION} lines, no kernels", str(len(long))
    yield from (("", line) for line in long)
    folders = Counter(name.parent for name in files.values())
    full = [f"{folder} {count}" for folder, count in sorted(folders.items()) if count > FULL_FOLDER]
    yield f"folders of more than {FULL_FOLDER} files", str(len(full))
    yield from (("", line) for line in full)
    yield "exceptions in the import contracts", str(exceptions())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--no-ranks", action="store_true", help="leave out the training step, which starts two processes"
    )
    for name, value in rows(ranks=not parser.parse_args().no_ranks):
        print(f"{name:<42}{value}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
