"""What was measured, as a page of Markdown: the machine and the versions, the goals that were missed, a table for each family."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Sequence

import torch

from kernel_families.measure import TFLOPS, Row

_PACKAGES = ("smpc", "torch", "triton", "liger-kernel")


def versions() -> dict[str, str]:
    """The card, its driver's CUDA, and what the figures depend on."""
    found = {"GPU": "none", "CUDA": str(torch.version.cuda), "cuDNN": str(torch.backends.cudnn.version())}
    if torch.cuda.is_available():
        found["GPU"] = f"{torch.cuda.get_device_name()}, sm_{''.join(map(str, torch.cuda.get_device_capability()))}"
    found["Python"] = platform.python_version()
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def markdown(rows: Sequence[Row], command: str) -> str:
    """The page."""
    lines = [
        f"# Kernels on {versions()['GPU']}",
        "",
        f"`{command}`. bf16 unless the shape says otherwise; medians.",
        "",
    ]
    lines += ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in versions().items()), ""]
    lines += ["A ratio is the peer's time divided by ours: above 1 our kernel is faster.", "", "## Goals", ""]
    goals = [(row, *reached) for row in rows for reached in row.reached()]
    missed = [entry for entry in goals if entry[3] < entry[2]]
    lines += [f"{len(goals) - len(missed)} of {len(goals)} goals are met. Missed:" if missed else "All are met.", ""]
    lines += [
        f"- {row.kernel} {row.shape} {row.part}: {name} {found:.2f}, goal {goal:.2f}"
        for row, name, goal, found in missed
    ]
    for family in dict.fromkeys(row.family for row in rows):
        lines += ["", f"## {family.capitalize()}", "", *_table([row for row in rows if row.family == family])]
    return "\n".join(lines) + "\n"


def _table(rows: Sequence[Row]) -> list[str]:
    peers = list(dict.fromkeys(name for row in rows for name in row.ratios))
    lines = [f"| kernel | shape | pass | ms | rate | {' | '.join(peers)} |", "|---" * (5 + len(peers)) + "|"]
    for row in rows:
        rate = f"{row.rate:.0f} {row.unit}" if row.unit == TFLOPS else f"{row.rate:.2f} {row.unit}"
        ratios = [_cell(row.ratios.get(name, "")) for name in peers]
        lines.append(
            f"| {row.kernel} | {row.shape} | {row.part} | {row.milliseconds:.3f} | {rate} | {' | '.join(ratios)} |"
        )
    return lines


def _cell(ratio: float | str) -> str:
    return f"{ratio:.2f}" if isinstance(ratio, float) else ratio.replace("|", "/")
