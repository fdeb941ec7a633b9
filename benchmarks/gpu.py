"""What one GPU can tell within 25 minutes, most valuable first: `make gpu` writes one Markdown report, each result as it ends.

    python benchmarks/gpu.py [--report gpu.md] [--minutes 25]

Exit status: 0 if every part ended well; 1 if one did not, which the report says with the end of its output; 2, and one line, without a GPU.
A part that is not done in its time, or that the time is up for, is said to be so; the others go on.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_TAIL = 60  # lines of a part's output


@dataclass(frozen=True)
class Part:
    """A command, and the seconds that it may take."""

    title: str
    command: tuple[str, ...]
    seconds: int


PYTHON = (sys.executable, "-P")
PARTS = (
    Part("Environment", (*PYTHON, "-c", "from smpc.cli import main; main(['env'])"), 60),
    Part(
        "Kernels against formulas in fp64, and a pipeline in one process",
        (str(Path(sys.executable).with_name("pytest")), "-q", "tests/gpu"),
        480,
    ),
    Part(
        "smpc calibrate",
        (
            *PYTHON,
            "-c",
            "from smpc.cli import main; raise SystemExit(main(['calibrate', '--out', 'gpu.toml', '--seconds', '60']))",
        ),
        180,
    ),
    Part(
        "One-rank programs beside eager training; time and memory predicted with that calibration against measured",
        (*PYTHON, "benchmarks/one_rank.py", "--describe", "gpu.toml"),
        300,
    ),
    Part(
        "The same in two stages in one process, each compiled by torch.compile",
        (*PYTHON, "benchmarks/one_rank.py", "--describe", "gpu.toml", "--stages", "2", "--compiled"),
        300,
    ),
    Part("Kernels beside their peers", (*PYTHON, "benchmarks/kernels.py"), 600),
)


def run(part: Part, seconds: float) -> tuple[str, str, float]:
    """What became of a part, the end of its output, and how long it took."""
    start = time.monotonic()
    try:
        found = subprocess.run(part.command, capture_output=True, text=True, timeout=seconds, check=False)
        said, output = (
            ("ok" if found.returncode == 0 else f"exit status {found.returncode}"),
            found.stdout + found.stderr,
        )
    except subprocess.TimeoutExpired as error:
        parts = (error.stdout or b"", error.stderr or b"")
        said, output = "not done in its time", "".join(text.decode(errors="replace") for text in map(bytes, parts))
    return said, "\n".join(output.splitlines()[-_TAIL:]), time.monotonic() - start


def write(report: Path, parts: Sequence[Part], seconds: float) -> bool:
    """Runs the parts in order and adds each to the report; whether all went well."""
    end, is_good = time.monotonic() + seconds, True
    report.write_text("# What one GPU tells\n", encoding="utf-8")
    for part in parts:
        left = end - time.monotonic()
        said, output, took = run(part, min(part.seconds, left)) if left > 0 else ("the time is up", "", 0.0)
        is_good &= said == "ok"
        print(f"{part.title}: {said} ({took:.0f} s)", flush=True)
        with report.open("a", encoding="utf-8") as file:
            file.write(f"\n## {part.title}\n\n{said}, {took:.0f} s: `{' '.join(part.command)}`\n\n```\n{output}\n```\n")
    return is_good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", type=Path, default=Path("gpu.md"))
    parser.add_argument("--minutes", type=float, default=25)
    args = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        print("make gpu: expected a CUDA device, found none; run it on a machine with a GPU", file=sys.stderr)
        return 2
    return 0 if write(args.report, PARTS, 60 * args.minutes) else 1


if __name__ == "__main__":
    sys.exit(main())
