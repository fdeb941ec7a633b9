"""Every architecture of Hugging Face that gets small, split by the compiler on 2 and 4 ranks: the numbers of one process, or a refusal.

Run with `-s` it prints a line for each, and how many hold at most 0.55 of the parameters, with the slowest search.
"""

import pytest
import survey
import tensor_survey
import torch
from tensor_survey import Comparison, is_rounding, judged, outcome
from torch import nn

PARTS = 16


def summary(found, degree):
    tried = [item for item in found if item.verdict.startswith("right")]
    few = [item for item in tried if item.share <= 1 / degree + 0.05]
    slowest = max(tried, key=lambda item: item.search_s, default=None)
    kinds = ("right", "refused", "wrong", "undecided", "left out")
    counts = {kind: sum(item.verdict.startswith(kind) for item in found) for kind in kinds}
    text = f"{degree} ranks: {counts}; {len(few)} of {len(tried)} hold at most {1 / degree + 0.05:.2f}"
    return text if slowest is None else f"{text}; slowest search {slowest.search_s:.1f} s ({slowest.name})"


def assert_none_wrong(names, degree):
    found = []
    for name in names:
        found.append(outcome(name, degree))
        print(found[-1], flush=True)
    print(summary(found, degree))
    assert not [item for item in found if item.verdict.startswith("wrong")]
    return found


@pytest.mark.parametrize(
    "name", ["GPT2LMHeadModel", pytest.param("PegasusXForConditionalGeneration", marks=pytest.mark.slow)]
)
def test_an_architecture(name):
    """PEGASUS-X looks at its embeddings without gradients first; a smaller model that does is in the tests of rewrites."""
    (found,) = assert_none_wrong([name], 2)
    assert found.verdict.startswith("right")
    assert found.share < 0.55


class Normed(nn.Module):
    """The gradient of the bias is nothing but rounding: the norm takes the bias away."""

    def __init__(self):
        super().__init__()
        self.inner, self.norm = nn.Linear(4, 8), nn.BatchNorm1d(8)

    def forward(self, x):
        return 1e9 * self.norm(self.inner(x)).tanh()


def test_what_one_process_cannot_tell_is_rounding_and_nothing_else():
    torch.manual_seed(0)
    model, batch = Normed().double(), {"x": torch.randn(6, 4, dtype=torch.float64)}
    right = {"the loss": 1e-16, "inner.weight": 1e-15, "norm.weight": 1e-15, "norm.bias": 1e-15}
    assert is_rounding(model, batch, right | {"inner.bias": 1.0}, 1e-9)
    assert not is_rounding(model, batch, right | {"inner.bias": 1.0, "inner.weight": 1e-8}, 1e-9)


def off_by(error, numbers_of=(torch.float32, torch.float64)):
    """`compare` of a sharded model whose loss is off, and that runs in some types only."""

    def compare(model, batch, degree):
        if batch["x"].dtype not in numbers_of:
            raise RuntimeError("expected scalar type Float")
        errors = {"the loss": error} | {name: 0.0 for name, _ in model.named_parameters()}
        return Comparison("the loss", error, errors, 0.5, 0.5, 0.0, proven=True, narrow=False)

    return compare


@pytest.mark.parametrize(
    ("compare", "verdict"),
    [
        (off_by(1e-3), "wrong: the loss by 1.0e-03 in torch.float64"),
        (off_by(1e-6), "right"),
        (
            off_by(1e-3, [torch.float32]),
            "undecided: wrong: the loss by 1.0e-03 in torch.float32; in fp64 wrong: RuntimeError: expected scalar type Float",
        ),
    ],
)
def test_what_is_off_in_fp32_and_does_not_run_in_fp64_is_undecided(monkeypatch, compare, verdict):
    """Such a model was called wrong: what fp32 alone says may be rounding."""
    monkeypatch.setattr(tensor_survey, "compare", compare)

    def case(dtype):
        return Normed().to(dtype), {"x": torch.randn(6, 4).to(dtype)}

    found = judged("Normed", case, 2)
    assert (found.verdict, found.share) == (verdict, 0.5)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("part", range(PARTS))
def test_every_architecture(part, degree):
    assert_none_wrong(survey.names()[part::PARTS], degree)
