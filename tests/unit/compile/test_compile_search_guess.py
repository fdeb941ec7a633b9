"""Guesses of steps that are made before there is a plan agree with simulated schedules, and what looks hopeless is left alone."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import smpc
from smpc.codegen.schedules.named import choose
from smpc.codegen.simulate import Costs, chain, simulate
from smpc.compile.search.estimate import balanced
from smpc.compile.search.searcher import _Searcher

PARTS = [(1, 1, 1), (1, 1.2, 0.8), (1, 1.6, 0.4), (1, 2, 0.1), (1, 0.8, 0.8), (1, 0.8, 1.2), (1, 1.3, 1.1)]


def simulated(schedule, ranks, pieces, microbatches, parts):
    """The step of ranks that take `parts` (forward, backward for the inputs, and for the weights) for a microbatch."""
    forward, inputs, weight = (part / pieces for part in parts)
    stages = ranks * pieces
    costs = Costs((forward,) * stages, (inputs + weight,) * stages, weight=(weight,) * stages)
    choice = choose(ranks, microbatches, schedule=schedule, num_pieces=pieces)
    return simulate(choice.build(chain(stages), costs), chain(stages), costs).makespan


@pytest.mark.parametrize(
    ("schedule", "pieces"),
    [("1f1b", 1), ("gpipe", 1), ("interleaved-1f1b", 2), ("zb-h1", 1), ("zb-h2", 1), ("zb-v", 2)],
)
def test_balanced_ranks_take_what_their_schedule_takes(schedule, pieces):
    """zb-v was taken to have no bubble: its guesses were up to a quarter short of the plans."""
    ratios = []
    for parts in PARTS:
        for ranks in (2, 4, 8):
            for microbatches in (1, ranks // 2, ranks, 3 * ranks // 2, 2 * ranks, 4 * ranks):
                if schedule == "interleaved-1f1b" and microbatches % ranks:
                    continue
                guess = balanced(schedule, (ranks, pieces, microbatches), *parts)
                ratios.append(guess / simulated(schedule, ranks, pieces, microbatches, parts))
    assert all(0.9 <= ratio <= 1.05 for ratio in ratios), sorted(ratios)
    assert sorted(ratios)[len(ratios) // 4] > 0.97
    assert sorted(ratios)[-len(ratios) // 4] < 1.02


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(8)
        )

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def tried(monkeypatch, effort):
    """(guess, best step so far) of everything that a search plans once it has a plan."""
    seen, once = [], _Searcher._try

    def attempt(self, waiting, candidate):
        if self.best is not None:
            seen.append(waiting.guess.step / self.best[0].step_time)
        once(self, waiting, candidate)

    with torch.device("meta"):
        model, batch = Deep(), torch.zeros(64, 256)
    with monkeypatch.context() as patched:
        patched.setattr(_Searcher, "_try", attempt)
        return seen, smpc.search(model, batch, world_size=4, device="h100", effort=effort)


@pytest.mark.long
def test_what_looks_slower_by_a_tenth_is_left_with_its_bound(monkeypatch):
    seen, found = tried(monkeypatch, 1.0)
    assert max(seen) <= 1.1
    everything, whole = tried(monkeypatch, math.inf)
    assert len(everything) > len(seen)
    assert max(everything) > 1.1
    assert found.best.step_time <= whole.best.step_time * 1.01
    assert found.best.step_time * (1.0 - found.gap) <= whole.best.step_time
