"""With which instructions gradients are averaged over replicas."""

import pytest

from smpc.codegen.program import Instruction
from smpc.executor.program.bind import _bound_reductions

CASES = {
    "one stage": ("F s1 m0, B s1 m0, F s1 m1, B s1 m1", {1: "B s1 m1"}, {"B s1 m1": (1,)}),
    "falling": ("B s3 m0, B s1 m0, B s3 m1, B s1 m1", {1: "B s1 m1", 3: "B s3 m1"}, {"B s3 m1": (3,), "B s1 m1": (1,)}),
    "rising": ("B s3 m0, B s3 m1, B s4 m0, B s4 m1", {3: "B s3 m1", 4: "B s4 m1"}, {"B s4 m1": (4, 3)}),
    "one of three waits": (
        "B s5 m0, B s0 m0, W s3 m0",
        {0: "B s0 m0", 3: "W s3 m0", 5: "B s5 m0"},
        {"B s5 m0": (5,), "W s3 m0": (3, 0)},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_stages_are_reduced_in_falling_order(case):
    text, last, expected = CASES[case]
    instructions = [Instruction.parse(part) for part in text.split(", ")]
    found = _bound_reductions(instructions, {stage: Instruction.parse(part) for stage, part in last.items()})
    assert {str(instruction): stages for instruction, stages in found.items()} == expected
    order = sorted(found, key=instructions.index)
    assert [stage for instruction in order for stage in found[instruction]] == sorted(last, reverse=True)
