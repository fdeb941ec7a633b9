"""The table of a search stays readable, whatever the modules that are computed again are called."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

import smpc
from smpc.report.search import search_summary, search_table

LONG = "input_layernorm + post_attention_layernorm"
LONGER = f"{LONG} + self_attention"
SHORT = "a + b"


@pytest.fixture(scope="module")
def found():
    """A search, with other names in the place of what three of its ways compute again."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    found = smpc.search(model, (torch.zeros(8, 16, device="meta"),), world_size=2)
    assert len(found.results) >= 3
    named = [
        dataclasses.replace(result, candidate=dataclasses.replace(result.candidate, recompute=name))
        for result, name in zip(found.results, (LONG, LONGER, SHORT), strict=False)
    ]
    return dataclasses.replace(found, results=tuple(named))


def test_sets_with_long_names_are_numbers_in_the_table_and_spelt_out_below(found):
    """They were broken over up to seven lines, in the middle of words: "input_lay / ernorm + ..."."""
    table = search_table(found)
    cells = [row[table.headers.index("Again")] for row in table.rows]
    assert cells == ["2 parts", "3 parts", SHORT]
    below = [text for _, text in search_summary(found)]
    assert f"2 parts of a block computed again: {LONG}" in below
    assert f"3 parts of a block computed again: {LONGER}" in below
    assert not any(SHORT in text for text in below if "of a block" in text)
