"""Numbers as text, in the unit in which they have one to three digits before the point.

format_bytes(1536)                       "1.5 KiB"
scaled(12_345_678, ("", "K", "M"), 1000) "12.3 M"
"""

from __future__ import annotations

from collections.abc import Sequence


def format_bytes(num_bytes: float) -> str:
    """1536 -> `1.5 KiB`."""
    if num_bytes < 0:
        return f"-{format_bytes(-num_bytes)}"
    return scaled(num_bytes, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"), 1024)


def scaled(value: float, units: Sequence[str], base: int) -> str:
    """A number in the unit in which it has one to three digits before the point; each unit is `base` of the one before."""
    index = 0
    while value >= 999.5 and index < len(units) - 1:
        value /= base
        index += 1
    text = f"{value:.0f}" if index == 0 or value >= 100 else f"{value:.1f}"
    return f"{text} {units[index]}".rstrip()
