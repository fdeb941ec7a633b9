"""How names, numbers and stages of a report look.

Sizes have binary units, counts decimal ones, times three digits:

format_bytes(1536)               "1.5 KiB"     binary units
format_number(12_345_678)        "12.3 M"      decimal units
format_time(0.00123)             "1.23 ms"
schedule_name("interleaved")     "1F1B (SMP: interleaved)"
compress(("h.0", "h.1", "ln"))   ("h.0-1", "ln")
printable(name)                  control characters as escapes

A stage has one colour (`stage_hues`) on the page and in the picture: a hue of its own, paler where it runs forwards. Colours are OKLCH (B.
Ottosson, "A perceptual color space for image processing", 2020): lightness, chroma, hue. `srgb` has them for programs that know red, green
and blue only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from smpc.codegen.program import Op
from smpc.config.numbers import format_bytes, scaled
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


LIGHT = {Op.FORWARD: (0.86, 0.075), Op.BACKWARD: (0.66, 0.14), Op.WEIGHT: (0.76, 0.11)}  # lightness and chroma on white
_FIRST_HUE, _GOLDEN_ANGLE, _MANY = 255.0, 137.508, 8  # degrees, degrees, stages


def stage_hues(num_stages: int) -> list[float]:
    """Degrees for every stage. Few stages are spread around the colour circle; of many, neighbours are a golden angle apart."""
    step = 360 / num_stages if 0 < num_stages <= _MANY else _GOLDEN_ANGLE
    return [round((_FIRST_HUE + stage * step) % 360, 1) for stage in range(num_stages)]


def srgb(lightness: float, chroma: float, hue: float) -> tuple[float, float, float]:
    """Red, green and blue from 0 to 1; what a screen cannot show is brought to the nearest edge of each."""
    a, b = chroma * math.cos(math.radians(hue)), chroma * math.sin(math.radians(hue))
    long = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3
    medium = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
    short = (lightness - 0.0894841775 * a - 1.2914855480 * b) ** 3
    return (
        _encoded(4.0767416621 * long - 3.3077115913 * medium + 0.2309699292 * short),
        _encoded(-1.2684380046 * long + 2.6097574011 * medium - 0.3413193965 * short),
        _encoded(-0.0041960863 * long - 0.7034186147 * medium + 1.7076147010 * short),
    )


def _encoded(linear: float) -> float:
    """With the transfer function of sRGB (IEC 61966-2-1)."""
    clipped = min(max(linear, 0.0), 1.0)
    return 12.92 * clipped if clipped <= 0.0031308 else 1.055 * clipped ** (1 / 2.4) - 0.055
