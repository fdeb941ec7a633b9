"""Predicted beside published step times: the data file, how FLOPs are counted, and the ratios (all of them: slow)."""

from __future__ import annotations

import importlib.util
import statistics
import sys

import pytest
from locations import REPOSITORY

PATH = REPOSITORY / "benchmarks" / "published" / "published.py"


@pytest.fixture(scope="module")
def published():
    spec = importlib.util.spec_from_file_location("published_runs", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    before = list(sys.path)
    spec.loader.exec_module(module)
    sys.path[:] = before
    return module


def test_every_row_is_a_mesh_of_a_known_model(published):
    rows, models = published.load()
    assert len({row.name for row in rows}) == len(rows) == 23
    for row in rows:
        assert row.gpus == row.tensor * row.pipeline * row.replicas
        assert row.batch % (row.replicas * row.microbatch) == 0
        assert models[row.model].layers >= row.pipeline * row.virtual or models[row.model].family == "llama"
        assert row.options().microbatches * row.replicas * row.microbatch == row.batch


def test_flops_are_counted_as_the_papers_count(published):
    """MT-NLG's authors give both: 60.1 s and 126 TFLOP/s on 2,240 devices, 50.2 s and 121 on 2,800, 44.4 s and 113 on 3,360."""
    rows, models = published.load()
    given = {2240: 126, 2800: 121, 3360: 113}
    for row in rows:
        if row.source == "mtnlg":
            flops = published.step_flops(models[row.model], row.batch, "recompute")
            assert flops / row.gpus / row.seconds / 1e12 == pytest.approx(given[row.gpus], rel=0.01)


def test_rank_correlation(published):
    assert published.spearman([1.0, 2.0, 3.0], [10.0, 20.0, 30.0]) == pytest.approx(1.0)
    assert published.spearman([1.0, 2.0, 3.0], [30.0, 20.0, 10.0]) == pytest.approx(-1.0)


@pytest.mark.slow
def test_predictions_are_near_what_was_published(published):
    rows, models = published.load()
    pairs = [(published.predicted(row, models[row.model]).total, row.measured(models[row.model])) for row in rows]
    ratios = [predicted / measured for predicted, measured in pairs]
    assert min(ratios) >= 0.8
    assert max(ratios) <= 1.25
    assert abs(statistics.median(ratios) - 1) <= 0.05
    assert published.spearman(*zip(*pairs, strict=True)) >= 0.97
