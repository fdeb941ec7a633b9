"""Compiles every kernel variant for every target on a machine without a GPU, and refuses what a GPU would run badly.

    python -P -m smpc.kernels.compile_gate [--jobs 2] [--target 90] [--match attention]     (`make kernels`)

    variant                        target  registers  spills  shared    verdict
    rms_norm_forward bf16 n4096    sm_90          40       0      64    ok

Triton compiles for a target that is named, whether or not the machine has it, and its wheel brings NVIDIA's assembler
`ptxas`, whose report is read here. `registers` are per thread; `spills` are the bytes a thread stores to memory because it
has too few registers; `shared` is per program, in bytes. The limits are in `smpc.kernels.launch.variants`. A kernel that does
not compile fails the gate with the compiler's words. The exit status is 1 if anything is over its limit.

The results say nothing of numerics (the interpreter's tests do) or of speed (benchmarks/kernels.py, on a GPU).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import multiprocessing
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from smpc.kernels.launch.backend import LAUNCH_OPTIONS, interpreting
from smpc.kernels.launch.variants import (
    KERNEL_FILES,
    MAX_SPILL_BYTES,
    SHARED_MEMORY,
    TARGETS,
    KernelVariant,
    variants_of,
)


@dataclass(frozen=True, slots=True)
class Compiled:
    """What ptxas and Triton report of one variant on one target; `error` is None if it compiled."""

    variant: str
    target: int
    registers: int = 0
    spill_bytes: int = 0
    shared_bytes: int = 0
    shared_limit: int = 0
    error: str | None = None

    def verdict(self) -> str:
        """`ok`, or what is over which limit."""
        if self.error is not None:
            return f"does not compile: {self.error}"
        faults = []
        if self.spill_bytes > MAX_SPILL_BYTES:
            faults.append(f"spills {self.spill_bytes} bytes, at most {MAX_SPILL_BYTES} expected")
        if self.shared_bytes > self.shared_limit:
            faults.append(f"needs {self.shared_bytes} bytes shared, at most {self.shared_limit} expected")
        return "; ".join(faults) or "ok"


def compile_variant(variant: KernelVariant, target: int) -> Compiled:
    """Compiles one variant for one target, without Triton's cache: a cached result has no report of the assembler."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    assert not interpreting(), "the compile gate cannot run under TRITON_INTERPRET=1: its kernels are not compiled"
    types, constants, attributes = _split(variant)
    source = ASTSource(variant.kernel, types, constants, attributes)
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages, **LAUNCH_OPTIONS}
    report = io.StringIO()
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            triton.knobs.cache.scope(),
            triton.knobs.nvidia.scope(),
            contextlib.redirect_stdout(report),
        ):
            triton.knobs.cache.dir = folder
            triton.knobs.nvidia.dump_ptxas_log = True
            compiled = triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)
            shared = compiled.metadata.shared
    except Exception as error:  # the compiler raises whatever its passes raise; all of it belongs in the report
        return Compiled(variant.name, target, error=_last_line(f"{type(error).__name__}: {error}"))
    registers, spills = _read_report(report.getvalue())
    limit = SHARED_MEMORY[target] if variant.shared_limit is None else variant.shared_limit
    return Compiled(variant.name, target, registers, spills, shared, limit)


def _split(variant: KernelVariant) -> tuple[dict[str, str], dict[str, object], dict[tuple[int, ...], object]]:
    """The signature as Triton wants it: types with `constexpr` for constants, constants, and known facts about arguments."""
    names = list(variant.kernel.arg_names)
    types: dict[str, str] = {}
    constants: dict[str, object] = dict(variant.constexprs)
    attributes: dict[tuple[int, ...], object] = {}
    for argument, text in variant.signature:
        kind, _, hint = text.partition(":")
        assert hint in ("", "1", "16"), (
            f"variant {variant.name!r}: expected {argument!r} with :1 or :16, found {text!r}"
        )
        if hint == "1":
            constants[argument] = 1
        else:
            types[argument] = kind
        if hint == "16":
            attributes[(names.index(argument),)] = [["tt.divisibility", 16]]
    types.update(dict.fromkeys(constants, "constexpr"))
    return {name: types[name] for name in names}, constants, attributes


def _read_report(text: str) -> tuple[int, int]:
    """Registers and spilled bytes in the report of `ptxas -v`."""
    registers = re.findall(r"Used (\d+) registers", text)
    spills = re.findall(r"(\d+) bytes spill stores", text)
    assert len(registers) > 0 < len(spills), f"expected a report of ptxas with registers and spills, found {text!r}"
    return int(registers[-1]), int(spills[-1])


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return f"{lines[0]} ... {lines[-1]}" if len(lines) > 1 else lines[0]


def _compile_listed(task: tuple[str, int, int]) -> Compiled:
    module, index, target = task
    return compile_variant(variants_of(module)[index], target)


def compile_all(match: str = "", targets: Sequence[int] = TARGETS, jobs: int = 2) -> Iterator[Compiled]:
    """Every variant whose name contains `match` on each of `targets`, in the order of the list, as they are done."""
    tasks = [
        (module, index, target)
        for module in KERNEL_FILES
        for index, variant in enumerate(variants_of(module))
        for target in variant.targets
        if match in variant.name and target in targets
    ]
    if jobs == 1 or len(tasks) < 2:
        yield from map(_compile_listed, tasks)
        return
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(_compile_listed, tasks)


HEADER = f"{'variant':60}  target  registers  spills  shared  verdict"


def row(result: Compiled) -> str:
    """One line of the table under HEADER."""
    return (
        f"{result.variant:60}  sm_{result.target:<3}  {result.registers:9}  {result.spill_bytes:6}"
        f"  {result.shared_bytes:6}  {result.verdict()}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table; returns the exit status."""
    parser = argparse.ArgumentParser(prog="compile_gate", description="Compile every kernel without a GPU.")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--target", type=int, action="append", choices=TARGETS, help="only this one; can be repeated")
    parser.add_argument("--match", default="", help="only variants whose name contains this")
    options = parser.parse_args(arguments)
    print(HEADER)
    results, failed = 0, []
    for result in compile_all(options.match, options.target or TARGETS, options.jobs):
        print(row(result), flush=True)
        results += 1
        if result.verdict() != "ok":
            failed.append(result)
    print(f"{results} compiled, {len(failed)} over a limit or not compiling")
    print("\n".join(row(result) for result in failed), end="\n" if failed else "")
    return 1 if failed or not results else 0


if __name__ == "__main__":
    sys.exit(main())
