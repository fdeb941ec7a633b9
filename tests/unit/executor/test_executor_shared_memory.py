"""Who shares memory: the switch, and ranks that are no processes of their own."""

import pytest
import torch
from tensor_ranks import run_ranks, tensor_groups

from smpc.errors import ConfigError
from smpc.executor.collectives import summed
from smpc.executor.host_memory.shared_memory import VARIABLE, GroupMemory, is_wanted


@pytest.mark.parametrize(
    ("environ", "expected"), [({}, True), ({VARIABLE: ""}, True), ({VARIABLE: "1"}, True), ({VARIABLE: "0"}, False)]
)
def test_the_switch(environ, expected):
    assert is_wanted(environ) is expected


@pytest.mark.parametrize("text", ["2", "off", " 0"])
def test_a_switch_that_is_neither_on_nor_off(text):
    with pytest.raises(ConfigError, match=f"^SMPC_SHARED_MEMORY: expected 0 .off. or 1 .* found {text!r}"):
        is_wanted({VARIABLE: text})


def test_ranks_that_are_threads_use_gloo():
    groups = tensor_groups(2)
    assert run_ranks(2, lambda rank: groups[rank].slots_for(torch.zeros(3))) == [None, None]
    for found in run_ranks(2, lambda rank: summed(torch.full((3,), rank + 1.0), groups[rank])):
        assert found.tolist() == [3.0, 3.0, 3.0]


def test_one_link_for_each_group():
    first, second = tensor_groups(2)
    assert GroupMemory.of(first.process_group) is GroupMemory.of(first.process_group)
    assert GroupMemory.of(first.process_group) is not GroupMemory.of(second.process_group)
