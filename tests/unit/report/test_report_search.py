"""The table of a search stays readable, whatever the modules that are computed again are called."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

import smpc
from smpc.compile.search import Verdict
from smpc.config import Config
from smpc.partitioner.costs.device_file import find_device
from smpc.report.search import search_summary, search_table

LONG = "input_layernorm + post_attention_layernorm"
LONGER = f"{LONG} + self_attention"
SHORT = "a + b"


@pytest.fixture(scope="module")
def found():
    """A search, with other names in the place of what three of its ways compute again, as if each of them had been planned."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    found = smpc.search(model, (torch.zeros(8, 16, device="meta"),), world_size=2)
    assert len(found.results) >= 3
    named = [
        dataclasses.replace(result, candidate=dataclasses.replace(result.candidate, recompute=name), ways=1)
        for result, name in zip(found.results, (LONG, LONGER, SHORT), strict=False)
    ]
    return dataclasses.replace(found, results=tuple(named))


def test_a_row_of_several_ways_says_how_many_in_place_of_one(found):
    """It said `1f1b (of 40)`, as if 40 were schedules."""
    several = dataclasses.replace(found.results[1], ways=40, verdict=Verdict.OPEN, step_is_bound=True)
    table = search_table(dataclasses.replace(found, results=(found.results[0], several)))
    row = dict(zip(table.headers, table.rows[1], strict=True))
    assert (row["Schedule"], row["Shared"], row["Again"]) == ("40 ways", "", "")
    assert row["Step"].startswith("> ")


def test_the_parts_of_a_way_are_all_of_its_step():
    """The time of the executor, of devices that say how long it takes, was in none of them."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    h100 = find_device("h100")
    device = dataclasses.replace(
        h100, kernels=dataclasses.replace(h100.kernels, action=1e-3, step=0.1, unit=((1.0, 0.2),))
    )
    found = smpc.search(model, (torch.zeros(8, 16, device="meta"),), world_size=2, device=device)
    planned = [result for result in found.results if result.parts]
    assert len(planned) > 1
    for result in planned:
        assert sum(result.parts) == pytest.approx(result.step_time)
    assert any("slower: executor +" in result.reason for result in planned)


def with_best(found, **fields):
    best = dataclasses.replace(found.best, candidate=dataclasses.replace(found.best.candidate, **fields))
    return dataclasses.replace(found, results=(best, *found.results[1:]))


def test_experts_are_a_setting(found):
    """Scripts were told to call smpc.expert_parallel.shard, which they need no more."""
    alone = dict.fromkeys(text for _, text in search_summary(with_best(found, expert_parallel_degree=2)))
    assert "expert_parallel_degree: 2 divides the experts (docs/expert_parallelism.md)" in alone
    both = with_best(found, expert_parallel_degree=2, tensor_parallel_degree=2)
    shown = [text for _, text in search_summary(both)]
    assert any("beside tensor parallelism a script has a rank's experts whole" in text for text in shown)
    Config(**both.config())  # which a script may have


def test_sets_with_long_names_are_numbers_in_the_table_and_spelt_out_below(found):
    """They were broken over up to seven lines, in the middle of words: "input_lay / ernorm + ..."."""
    table = search_table(found)
    cells = [row[table.headers.index("Again")] for row in table.rows]
    assert cells == ["2 parts", "3 parts", SHORT]
    below = [text for _, text in search_summary(found)]
    assert f"2 parts of a block computed again: {LONG}" in below
    assert f"3 parts of a block computed again: {LONGER}" in below
    assert not any(SHORT in text for text in below if "of a block" in text)
