"""How names and numbers of a report look: sizes in binary units, counts in decimal ones, three digits of a time.

format_bytes(1536)               "1.5 KiB"     binary units
format_number(12_345_678)        "12.3 M"      decimal units
format_time(0.00123)             "1.23 ms"
schedule_name("interleaved")     "1F1B (SMP: interleaved)"
compress(("h.0", "h.1", "ln"))   ("h.0-1", "ln")
printable(name)                  control characters as escapes
"""

from __future__ import annotations

from collections.abc import Sequence

from smpc.config.limits import format_bytes, scaled
from smpc.errors import printable

__all__ = [
    "compress",
    "count",
    "format_bytes",
    "format_number",
    "format_time",
    "module_list",
    "printable",
    "schedule_name",
]

_MAX_PIECES = 6  # of a module list


def module_list(modules: Sequence[str]) -> str:
    """Names of modules on one line, compressed; the middle of a long list is counted instead."""
    pieces = compress(modules)
    if len(pieces) > _MAX_PIECES:
        pieces = (*pieces[: _MAX_PIECES - 2], f"(+{len(pieces) - _MAX_PIECES + 1})", pieces[-1])
    return ", ".join(pieces)


def compress(modules: Sequence[str]) -> tuple[str, ...]:
    """Module names, shorter: h.0, h.1, h.2 -> h.0-2; neighbours of one parent -> parent.{first, second}."""
    groups: list[tuple[str, list[tuple[str, str]]]] = []  # parent, runs of its children: (first, last)
    for name in modules:
        parent, _, child = name.rpartition(".")
        if not groups or groups[-1][0] != parent:
            groups.append((parent, []))
        runs = groups[-1][1]
        if runs and child.isdecimal() and runs[-1][1].isdecimal() and int(child) == int(runs[-1][1]) + 1:
            runs[-1] = (runs[-1][0], child)
        else:
            runs.append((child, child))
    pieces: list[str] = []
    for parent, runs in groups:
        children = [first if first == last else f"{first}-{last}" for first, last in runs]
        if not parent:
            pieces += [child or "(the whole model)" for child in children]
        else:
            pieces.append(f"{parent}.{children[0] if len(children) == 1 else '{' + ', '.join(children) + '}'}")
    return tuple(pieces)


_SHOWN = {"interleaved": "1F1B (SMP: interleaved)", "simple": "GPipe (SMP: simple)"}


def schedule_name(name: str) -> str:
    """The common name of a schedule: SMP's `interleaved` is `1F1B (SMP: interleaved)`."""
    return _SHOWN.get(name, printable(name))


def format_number(number: float) -> str:
    """12_345_678 -> `12.3 M`; under a thousand as it is."""
    return scaled(number, ("", "K", "M", "G", "T", "P", "E"), 1000)


def format_time(seconds: float) -> str:
    """0.00123 -> `1.23 ms`."""
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "us")):
        if seconds * factor >= 1 or unit == "us":
            value = seconds * factor
            return f"{value:.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"
    raise AssertionError(seconds)


def count(number: int, noun: str, plural: str = "s") -> str:
    """`1 stage`, `2 stages`."""
    return f"{number} {noun}{'' if number == 1 else plural}"
