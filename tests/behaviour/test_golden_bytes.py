"""What the compiler writes is held byte for byte: plans, programs of ranks, schedules and predicted timelines.

A refactoring changes none of them. A change that means to records them again (`tests/support/golden_programs.py`), and its diff says which
model, configuration and artefact it changed.
"""

from __future__ import annotations

from pathlib import Path

import golden_programs
import pytest
from locations import REPOSITORY


def check(case: str, path: Path, folder: Path) -> None:
    versions, known = golden_programs.recorded(path)
    found = golden_programs.versions()
    if found != versions:
        pytest.skip(f"{path.name} was recorded with {versions}; installed are {found}, and the bytes depend on them")
    expected = {name: digest for name, digest in known.items() if name.startswith(f"{case}/")}
    files = golden_programs.artefacts(case)
    now = {f"{case}/{name}": golden_programs.fingerprint(text) for name, text in files.items()}
    if now == expected:
        return
    golden_programs.write(folder, case, files)
    wrong = sorted(name for name in now.keys() | expected.keys() if now.get(name) != expected.get(name))
    pytest.fail(
        f"expected the bytes of {path.relative_to(REPOSITORY)}, found others in {', '.join(wrong)}.\n"
        f"Today's text is in {folder / case}. In a worktree of the commit before, write the earlier one and compare:\n"
        f"  python tests/support/golden_programs.py --dump BEFORE {case}; diff -r BEFORE/{case} {folder / case}\n"
        "If the change is meant: python tests/support/golden_programs.py --record",
        pytrace=False,
    )


# Every configuration and every model is among the others.
SLOW = (
    *(f"{model}/p2-tp2-plan" for model in ("t5", "llama_tied", "mixtral")),
    *(f"{model}/p2-tp2-found" for model in ("t5", "llama_tied", "unet")),
    *(f"{model}/p4-offload" for model in ("t5", "llama_tied", "mixtral")),
    *(f"{model}/p2-zb-v" for model in ("t5", "llama_tied")),
    *(f"{model}/p2-kernels" for model in ("llama_tied", "mixtral")),
    "gpt2/p1-tp4-kernels", "gpt2/p4-1f1b",
)  # fmt: skip


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=pytest.mark.slow) if case in SLOW else case
        for case in golden_programs.cases(large=False)
    ],
)
def test_the_bytes_are_those_recorded(case, tmp_path):
    check(case, golden_programs.QUICK, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("case", golden_programs.cases(large=True))
def test_the_bytes_of_the_larger_matrix_are_those_recorded(case, tmp_path):
    check(case, golden_programs.LARGE, tmp_path)


@pytest.mark.parametrize("large", [False, True])
def test_every_fingerprint_belongs_to_a_case(large):
    _, known = golden_programs.recorded(golden_programs.LARGE if large else golden_programs.QUICK)
    assert {name.rpartition("/")[0] for name in known} == set(golden_programs.cases(large))
