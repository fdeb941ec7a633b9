"""`benchmarks/kernels.py`: every family runs (on the CPU here, where nothing is timed), and without a GPU it measures nothing."""

import importlib
import importlib.util
import sys

import pytest
import torch
import warm
from locations import REPOSITORY

FOLDER = REPOSITORY / "benchmarks"
KERNELS = {
    "attention.attention": {"attention"},
    "fused.norms": {"layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm"},
    "fused.activations": {"bias_gelu none", "bias_gelu tanh", "swiglu", "bias_dropout_add"},
    "fused.rotary_embedding": {"rotary"},
    "losses.losses": {"cross_entropy", "cross_entropy in place", "linear_cross_entropy"},
    "optimizers.optimizers": {"adamw", "adamw masters", "lamb", "lamb masters", "novograd", "clip_grad_norm_"},
}


@pytest.fixture
def families(monkeypatch):
    """The modules beside the script; the folder itself would shadow the package `kernels` with the script."""
    spec = importlib.util.spec_from_file_location(
        "kernel_families",
        FOLDER / "kernel_families" / "__init__.py",
        submodule_search_locations=[str(FOLDER / "kernel_families")],
    )
    package = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "kernel_families", package)
    return lambda name: importlib.import_module(f"kernel_families.{name}")


def once(run):
    run()
    return 2.0


@pytest.fixture
def bench(families):
    return families("measure").Bench(device="cpu", small=True, clock=once, compiler=lambda function: function)


@pytest.mark.filterwarnings("ignore::UserWarning")  # peers say what they cannot do on a CPU
@pytest.mark.parametrize("name", KERNELS)
def test_every_family_runs(name, families, bench):
    module, _, function = name.partition(".")
    rows = list(getattr(families(module), function)(bench))
    assert {row.kernel for row in rows} == KERNELS[name]
    by_part = {(row.kernel, row.part) for row in rows}
    for row in rows:
        assert row.milliseconds == 2.0
        assert row.rate > 0
        assert row.part in ("both", "step") or {(row.kernel, "forward"), (row.kernel, "backward")} <= by_part
        measured = [ratio for ratio in row.ratios.values() if isinstance(ratio, float)]
        assert measured, row
        assert "own plain" not in row.ratios or row.ratios["own plain"] == 1.0
        assert row.goals or module == "attention"
        assert str(row).startswith(row.kernel)
    text = families("report").markdown(rows, "python benchmarks/kernels.py")
    assert all(f"| {row.kernel} | {row.shape} | {row.part} |" in text for row in rows)
    assert f"| torch | {torch.__version__.partition('+')[0]}" in text


def test_goals_are_compared_with_what_was_found(families):
    row = families("measure").Row(
        "norms", "rms_norm", "n8", "forward", 1.0, 0.7, "of copy_", {"Liger": "not installed", "eager": 3.0},
        {"of copy_": 0.9, "Liger": 1.0, "eager": 1.2},
    )  # fmt: skip
    assert row.reached() == (("of copy_", 0.9, 0.7), ("eager", 1.2, 3.0))
    text = families("report").markdown([row], "command")
    assert "1 of 2 goals are met. Missed:\n\n- rms_norm n8 forward: of copy_ 0.70, goal 0.90" in text
    assert "0.70 of copy_ (goal 0.90)   Liger: not installed   eager 3.00 (goal 1.20)" in str(row)


@pytest.mark.long
def test_without_a_gpu_nothing_is_measured(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    report = tmp_path / "report.md"
    child = warm.python(FOLDER / "kernels.py", 300, arguments=("norms", "--report", str(report)))
    assert child.returncode == 2
    assert child.stdout == ""
    assert "finds no NVIDIA GPU; nothing was measured" in child.stderr
    assert not report.exists()
