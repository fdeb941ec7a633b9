"""`--plot FILE.png`: the timeline and the memory of every rank as a picture, for slides and papers. Needs matplotlib.

render_plot(plan, timeline)    the bytes of a PNG; the same for the same plan and version of matplotlib
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from smpc.codegen.program import Op
from smpc.codegen.simulate import Timeline
from smpc.errors import ConfigError
from smpc.partitioner.graph.plan import Plan
from smpc.report.format import LIGHT, format_bytes, srgb, stage_hues
from smpc.report.memory_curve import MemoryCurve, memory_curves
from smpc.report.tables import title

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_UNITS = ((1.0, "s"), (1e3, "ms"), (1e6, "us"))
_MEBI = 2**20


def require_matplotlib() -> None:
    """Raises ConfigError where matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"--plot needs matplotlib ({error}); pip install 'smpc[plot]'") from error


def render_plot(plan: Plan, timeline: Timeline) -> bytes:
    """The picture as a PNG. ConfigError where matplotlib is not installed."""
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    factor, unit = next((u for u in _UNITS if timeline.makespan * u[0] >= 1), _UNITS[-1])
    height = 1.5 + 0.9 * timeline.num_ranks
    figure = Figure(figsize=(11, min(height, 40)), layout="constrained")
    FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(1, 1.2))
    figure.suptitle(_mathless_in_plot(title(plan)))
    own = stage_hues(len(plan.stages))
    _draw_timeline(upper, timeline, factor, own)
    first = {
        stage.rank: own[stage.index] for stage in reversed(plan.stages)
    }  # a rank's memory has its first stage's colour
    _draw_memory(lower, memory_curves(plan, timeline), timeline.makespan, factor, first)
    lower.set_xlabel(f"time ({unit}), predicted")
    lower.set_xlim(0, timeline.makespan * factor or 1)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=150, metadata={"Software": None})
    return file.getvalue()


def _mathless_in_plot(text: str) -> str:
    """The text with dollar signs that matplotlib does not take for formulas."""
    return text.replace("$", r"\$")


def _draw_timeline(axes: Axes, timeline: Timeline, factor: float, hue: list[float]) -> None:
    for event in timeline.events:
        width = (event.end - event.start) * factor
        axes.barh(
            event.rank,
            width,
            left=event.start * factor,
            height=0.8,
            color=srgb(*LIGHT[event.action.op], hue[event.action.stage]),
            edgecolor="white",
            linewidth=0.5,
        )
        if width * 60 > timeline.makespan * factor:  # wide enough for its number
            middle = (event.start + event.end) / 2 * factor
            axes.text(middle, event.rank, str(event.action.microbatch), ha="center", va="center", fontsize=7)
    axes.set_yticks(range(timeline.num_ranks), [f"rank {rank}" for rank in range(timeline.num_ranks)])
    axes.invert_yaxis()
    axes.set_title(
        f"bubble {timeline.bubble_fraction:.1%}; pale: forward, strong: backward, colour: stage, number: microbatch",
        fontsize=9,
    )


def _draw_memory(
    axes: Axes, curves: tuple[MemoryCurve, ...], makespan: float, factor: float, hue: dict[int, float]
) -> None:
    for curve in curves:
        times = [time * factor for time, _ in curve.points]
        held = [num_bytes / _MEBI for _, num_bytes in curve.points]
        label = f"rank {curve.rank}, peak {format_bytes(curve.peak_bytes)}"
        colour = srgb(*LIGHT[Op.BACKWARD], hue[curve.rank])
        axes.step([*times, makespan * factor], [*held, held[-1]], where="post", label=label, color=colour)
    axes.set_ylim(0, 1.08 * max(curve.peak_bytes for curve in curves) / _MEBI or 1)
    axes.set_ylabel("memory (MiB)")
    if len(curves) <= 16:
        axes.legend(fontsize=8, loc="lower right", ncols=2)
