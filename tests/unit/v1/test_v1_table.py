"""The table of programs, against a plain list of what was used when."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from smpc.tracer import record
from smpc.v1.steps.programs.signature import read_signature
from smpc.v1.steps.programs.table import ProgramTable

TRACE = record(nn.Linear(2, 2), (torch.zeros(1, 2),))
SIGNATURES = [read_signature(((torch.zeros(length, 2),), {}), b"", True) for length in range(1, 9)]


def find(table, signature):
    """The number of a signature's program; `lookup` asks the recording, too."""
    return next((number for number, (known, _) in enumerate(table) if known == signature), None)


@given(st.integers(2, 5), st.lists(st.integers(0, len(SIGNATURES) - 1), max_size=60))
def test_the_one_that_has_waited_longest_gives_way_but_never_the_first(bound, steps):
    table = ProgramTable(bound)
    kept, uses = [], []  # signatures by number; what ran, in order
    for step in steps:
        signature = SIGNATURES[step]
        number = find(table, signature)
        assert (number is None) == (step not in kept)
        if number is None:
            number = table.next_number()
            if len(kept) < bound:
                kept.append(step)
            else:
                longest = min(kept[1:], key=lambda other: max(i for i, used in enumerate(uses) if used == other))
                assert kept[number] == longest
                kept[number] = step
            table.put(number, signature, TRACE)
        table.use(number)
        uses.append(step)
        assert kept[number] == step
        assert len(table) == len(kept) <= bound
        assert [entry[0] for entry in table] == [SIGNATURES[s] for s in kept]
        assert table.signature(number) == signature
        assert find(table, SIGNATURES[steps[0]]) == 0
