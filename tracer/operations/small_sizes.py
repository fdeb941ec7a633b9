"""Lines through what runs at a few small sizes have given, for the size that is too large to be run."""

from __future__ import annotations

from smpc.errors import TraceError

SMALL_SIZES = (6, 10, 14)


def about(values: list[int], size: int) -> int:
    """The value at `size` of the line through the outer ones: costs may depend a little on values, as routing does."""
    slope = (values[-1] - values[0]) / (SMALL_SIZES[-1] - SMALL_SIZES[0])
    return max(0, round(values[0] + slope * (size - SMALL_SIZES[0])))


def extrapolated(values: list[int], size: int, class_name: str) -> int:
    """The value at `size` of the line through the values at the small sizes."""
    (x0, x1, x2), (y0, y1, y2) = SMALL_SIZES, values
    if (y1 - y0) * (x2 - x1) != (y2 - y1) * (x1 - x0):
        raise TraceError(
            f"the outputs of {class_name} do not grow in proportion to its inputs (sizes {values} for {SMALL_SIZES}): "
            "give their shapes with smpc.register_shape_rule"
        )
    slope, rest = divmod(y1 - y0, x1 - x0)
    return y0 + slope * (size - x0) + rest * (size - x0) // (x1 - x0)
