"""The report of a plan: everything is in it, in 100 columns of plain text, and names are never read as markup."""

import io

import pytest
from rich.console import Console

from smpc.codegen.schedules.named import interleaved, simple
from smpc.codegen.simulate import Costs, chain, simulate
from smpc.partitioner.graph.plan import Edge, Objective, Plan, ScheduleSummary, SharedParameter, Stage
from smpc.report import (
    compact_timeline,
    compress,
    format_bytes,
    format_number,
    format_time,
    print_report,
    printable,
)
from smpc.report.tables import memory_line


def _plan(*modules, model_class="GPT", num_microbatches=4, note=""):
    """A stage for each tuple of modules."""
    stages = tuple(
        Stage(
            index=index,
            rank=index,
            modules=names,
            parameters=(),
            buffers=(),
            recomputed=(),
            num_parameters=1_500_000,
            parameter_bytes=6 * 2**20,
            gradient_bytes=7 * 2**20,
            optimizer_bytes=12 * 2**20,
            activation_bytes_per_microbatch=3 * 2**20,
            num_in_flight=len(modules) - index,
            peak_memory_bytes=(40 + index) * 2**20,
            forward_flops=2_500_000_000,
            forward_time=0.010,
            backward_time=0.020,
            cost=1.0 + index,
            buffer_bytes=1024,
            communication_bytes=1024,
            transient_bytes=2048,
        )
        for index, names in enumerate(modules)
    )
    edges = (
        Edge(0, -1, 0, ("x",), 2048),
        *(Edge(i + 1, i, i + 1, ("h",), 5120, 4096) for i in range(len(modules) - 1)),
    )
    return Plan(
        model_class,
        len(modules),
        stages,
        edges,
        (SharedParameter("wte.weight", (0, len(modules) - 1)),),
        Objective(0.8, 0.5123, 0.5, 0.0246, "chain", note),
        ScheduleSummary("interleaved", num_microbatches, 4, 0.125, 0.36),
        (),
        "trace",
    )


def _timeline(num_stages, num_microbatches, schedule=interleaved):
    order = schedule(num_stages, range(num_stages), num_microbatches, num_stages + 2)
    return simulate(order, chain(num_stages), Costs.uniform(num_stages))


def _text(plan, timeline=None, width=100, **console):
    file = io.StringIO()
    print_report(plan, timeline, Console(file=file, width=width, markup=False, highlight=False, **console))
    return file.getvalue()


def _rows(text):
    """Cells of the lines that start with a stage."""
    return [line.split() for line in text.splitlines() if line.split()[:1] and line.split()[0].isdigit()]


def test_report_has_every_number():
    text = _text(_plan(("wte", "h.0"), ("h.1", "lm_head"), note="time limit reached"))
    assert text.startswith("GPT: 2 stages on 2 ranks, 4 microbatches\n")
    stages = [" ".join(cells) for cells in _rows(text)]
    assert stages == [
        "0 0 wte, h.0 1.5 M 2.5 G 10 ms 20 ms 33.3%",
        "1 1 h.1, lm_head 1.5 M 2.5 G 10 ms 20 ms 66.7%",
        "0 6.0 MiB 7.0 MiB 12.0 MiB 1.0 KiB 3.0 KiB 2 x 3.0 MiB 40.0 MiB",
        "1 6.0 MiB 7.0 MiB 12.0 MiB 1.0 KiB 3.0 KiB 1 x 3.0 MiB 41.0 MiB",
        "0 2.0 KiB inputs 5.0 KiB 1 4.0 KiB 0 B",
        "1 5.0 KiB 0 0 B - 0 B 4.0 KiB",
    ]
    words = " ".join(text.split())
    assert "all 3.0 M 5.0 G 20 ms 40 ms" in words
    assert "all 12.0 MiB 14.0 MiB 24.0 MiB 2.0 KiB <= 41.0 MiB" in words
    assert "memory weight 0.8, bottleneck 0.5123, no plan below 0.5000, gap 2.46%" in words
    assert "(solver: chain; time limit reached)" in words
    assert "1F1B (SMP: interleaved), 4 microbatches, at most 4 active, bubble 12.5%, step 360 ms" in words
    assert "wte.weight on stages 0, 1, gradients summed" in words


@pytest.mark.parametrize("width", [80, 100])
@pytest.mark.parametrize("num_stages", [2, 12])
def test_nothing_is_wider_than_the_console_or_cut(width, num_stages):
    modules = [(f"model.decoder.layers.{stage}", "model.decoder.final_layer_norm") for stage in range(num_stages)]
    text = _text(_plan(*modules), _timeline(num_stages, 16), width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    assert "\x1b" not in text


def test_default_output_is_plain_text(capsys):
    print_report(_plan(("a",), ("b",)), _timeline(2, 4))
    text = capsys.readouterr().out
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 100


def test_names_are_never_markup_and_cannot_steer_the_terminal():
    name = "[bold red]x[/bold red]"
    text = _text(_plan((name, ":smile:", "\x1b]0;title\x07", "<script>"), model_class="\x1b[2J[link=x]"))
    assert name in text
    assert ":smile:" in text
    assert "<script>" in text
    assert r"\x1b]0;title\x07" in text
    assert r"\x1b[2J[link=x]" in text
    assert "\x1b" not in text


def test_long_module_lists_are_shortened():
    text = _text(_plan(tuple(f"part{letter}" for letter in "abcdefgh")), width=160)
    assert "parta, partb, partc, partd, (+3), parth" in text


def test_modules_are_compressed():
    assert compress(("wte", "h.0", "h.1", "h.2", "ln")) == ("wte", "h.0-2", "ln")
    assert compress(("t.wte", "t.wpe", "t.h.0", "t.h.1", "t.ln")) == ("t.{wte, wpe}", "t.h.0-1", "t.ln")
    assert compress(("a.0", "b.1", "b.2", "b.4", "b.3")) == ("a.0", "b.{1-2, 4, 3}")
    assert compress(("0", "1", "2", "9", "10", "x")) == ("0-2", "9-10", "x")
    assert compress(("h.0.mlp", "h.0.norm", "h.1")) == ("h.0.{mlp, norm}", "h.1")
    assert compress(("h.norm", "h.0", "h.1")) == ("h.{norm, 0-1}",)
    assert compress(("",)) == ("(the whole model)",)
    assert compress(()) == ()


def test_wide_drawing_when_it_fits():
    text = _text(_plan(("a",), ("b",)), _timeline(2, 3))
    assert text.endswith(
        "rank 0  F0 F1 .. .. B0 -- F2 B1 -- .. B2 --\n"  #
        "rank 1  .. F0 B0 -- F1 B1 -- F2 B2 -- .. ..\n"
    )


def test_compact_drawing_when_it_does_not():
    text = _text(_plan(("a",), ("b",), num_microbatches=16), _timeline(2, 16))
    assert "0--: forward of microbatch 0" in text
    rank_0, rank_1 = text.splitlines()[-2:]
    assert rank_0.startswith("rank 0  0-1-")
    assert rank_1.endswith("..")


def test_compact_drawing():
    assert compact_timeline(_timeline(2, 2, simple), 8 + 18) == (
        "rank 0  0-1-......0===1===\n"  #
        "rank 1  ..0-1-0===1===....\n"
    )


def test_many_ranks_are_summarised_with_a_pointer_to_the_page():
    text = _text(_plan(*((name,) for name in "abcdefghijklmnopqrst")), _timeline(20, 40))
    rows = [line for line in text.splitlines() if line.startswith("rank ")]
    assert [row.split()[1] for row in rows] == [str(rank) for rank in (*range(8), *range(12, 20))]
    assert "(+4 ranks)" in text
    assert "80 parts of a step on a rank, not all of them seen here; report.html in --out DIR has all" in text


def test_the_peak_is_said_of_what_there_is():
    assert memory_line(3 * 2**30, 80 * 10**9) == ("Memory", "peak 3.0 GiB of 74.5 GiB")


def test_colour_is_for_terminals():
    assert "\x1b[36mF0" in _text(_plan(("a",), ("b",)), _timeline(2, 3), force_terminal=True, color_system="standard")


def test_formats():
    assert [format_bytes(n) for n in (0, 1023, 1536, 200 * 2**20, 3 * 2**40)] == [
        "0 B",
        "1.0 KiB",
        "1.5 KiB",
        "200 MiB",
        "3.0 TiB",
    ]
    assert [format_number(n) for n in (7, 999, 12_345_678, 405_000_000_000)] == ["7", "999", "12.3 M", "405 G"]
    assert [format_time(t) for t in (2.5, 0.0123, 0.000045, 0.0)] == ["2.5 s", "12.3 ms", "45 us", "0 us"]
    assert printable("päth\n\ud800") == r"päth\n\ud800"
