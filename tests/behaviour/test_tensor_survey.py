"""Every architecture of Hugging Face that gets small, split by the compiler on 2 and 4 ranks: the numbers of one process, or a refusal.

Run with `-s` it prints a line for each, and how many hold at most 0.55 of the parameters, with the slowest search.
"""

import pytest
import survey
from tensor_survey import outcome

PARTS = 16


def summary(found, degree):
    tried = [item for item in found if item.verdict.startswith("right")]
    few = [item for item in tried if item.share <= 1 / degree + 0.05]
    slowest = max(tried, key=lambda item: item.search_s, default=None)
    counts = {
        kind: sum(item.verdict.startswith(kind) for item in found) for kind in ("right", "refused", "wrong", "left out")
    }
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


def test_an_architecture():
    """PEGASUS-X looks at its embeddings without gradients first."""
    (found,) = assert_none_wrong(["PegasusXForConditionalGeneration"], 2)
    assert found.verdict.startswith("right")
    assert found.share < 0.55


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("part", range(PARTS))
def test_every_architecture(part, degree):
    assert_none_wrong(survey.names()[part::PARTS], degree)
