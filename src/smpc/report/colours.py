"""The colour of a stage, the same on the page and in the picture: a hue of its own, paler where it runs forwards.

Colours are OKLCH (B. Ottosson, "A perceptual color space for image processing", 2020): lightness, chroma, hue. `srgb` has them for
programs that know red, green and blue only.
"""

from __future__ import annotations

import math

from smpc.codegen.program import Op

LIGHT = {Op.FORWARD: (0.86, 0.075), Op.BACKWARD: (0.66, 0.14), Op.WEIGHT: (0.76, 0.11)}  # lightness and chroma on white
_FIRST_HUE, _GOLDEN_ANGLE, _MANY = 255.0, 137.508, 8  # degrees, degrees, stages


def hues(num_stages: int) -> list[float]:
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
