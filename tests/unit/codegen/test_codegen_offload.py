"""OFFLOAD and RELOAD in programs: where they are put, and that the verifier wants them so."""

import pytest
import torch
from torch import nn

from smpc.codegen.offload import action_uses, insert_offloads, resident
from smpc.codegen.program import Action, Instruction, Op, backward, forward, peaks, weight
from smpc.codegen.schedules.named import interleaved, simple
from smpc.codegen.schedules.zero_bubble import zb_h1, zb_v
from smpc.codegen.verify import verify_programs
from smpc.compile import compile_model
from smpc.errors import ScheduleError
from smpc.partitioner.memory.memory_by_action import Beside


def program(text):
    return tuple(Instruction.parse(part.strip()) for part in text.split(","))


def inserted(text, horizon, stages=(0,)):
    return ", ".join(map(str, insert_offloads([program(text)], stages, horizon)[0]))


FORWARDS = "F s0 m0, SEND e1 m0 r1, F s0 m1, SEND e1 m1 r1, F s0 m2, SEND e1 m2 r1, F s0 m3, SEND e1 m3 r1"
SIMPLE = f"{FORWARDS}, RECV_GRAD e1 m0 r1, B s0 m0, B s0 m1, B s0 m2, B s0 m3"


def test_where_they_are_put():
    # After all that a task sends, ahead of what the next one receives: copies go on while the rank waits for messages.
    assert inserted(SIMPLE, 1) == (
        "F s0 m0, SEND e1 m0 r1, OFFLOAD s0 m0, F s0 m1, SEND e1 m1 r1, OFFLOAD s0 m1, RELEASE s0 m0, "
        "F s0 m2, SEND e1 m2 r1, OFFLOAD s0 m2, RELEASE s0 m1, RELOAD s0 m0, "
        "F s0 m3, SEND e1 m3 r1, OFFLOAD s0 m3, RELEASE s0 m2, RELOAD s0 m1, RECV_GRAD e1 m0 r1, "
        "B s0 m0, RELEASE s0 m3, RELOAD s0 m2, B s0 m1, RELOAD s0 m3, B s0 m2, B s0 m3"
    )
    # Every B is the fourth task after its F: nothing would be away for any time.
    assert inserted(SIMPLE, 2) == SIMPLE
    assert inserted(SIMPLE, 1, stages=()) == SIMPLE


def test_w_is_a_task_and_the_last_instruction_may_be_one():
    text = "F s0 m0, F s0 m1, F s0 m2, B s0 m0, W s0 m0, B s0 m1, W s0 m1, B s0 m2, W s0 m2"
    assert inserted(text, 1) == (
        "F s0 m0, F s0 m1, OFFLOAD s0 m1, F s0 m2, OFFLOAD s0 m2, RELEASE s0 m1, B s0 m0, RELEASE s0 m2, RELOAD s0 m1, "
        "W s0 m0, B s0 m1, RELOAD s0 m2, W s0 m1, B s0 m2, W s0 m2"
    )


LOOP = ("F s0 m0", "F s1 m0", "F s0 m1", "F s1 m1", "B s1 m0", "B s1 m1", "B s0 m0", "B s0 m1")
SCHEDULES = {
    "simple": simple(3, (0, 1, 2), 8, 5),
    "interleaved": interleaved(3, (0, 1, 2), 8, 5),
    "two stages": (tuple(map(Action.parse, LOOP)),),
    "zero bubble": zb_v(2, 6),
}


@pytest.mark.parametrize("horizon", [1, 2, 4, 100])
@pytest.mark.parametrize("name", SCHEDULES)
def test_resident_is_what_a_walk_through_the_program_counts(name, horizon):
    schedule = SCHEDULES[name]
    num_stages = 1 + max(action.stage for actions in schedule for action in actions)
    most, last = [0] * num_stages, [0] * num_stages
    forwards = {
        stage: sum(a.stage == stage and a.op is Op.FORWARD for b in schedule for a in b) for stage in range(num_stages)
    }
    for actions in schedule:
        (instructions,) = insert_offloads([[action.instruction for action in actions]], range(num_stages), horizon)
        now, away = [0] * num_stages, [0] * num_stages
        deferred = {(i.stage, i.microbatch) for i in instructions if i.op is Op.WEIGHT}
        for i in instructions:
            ends = i.op is (Op.WEIGHT if (i.stage, i.microbatch) in deferred else Op.BACKWARD)
            now[i.stage] += (i.op in (Op.FORWARD, Op.RELOAD)) - (ends or i.op is Op.RELEASE)
            away[i.stage] += (i.op is Op.RELEASE) - (i.op is Op.RELOAD)
            most[i.stage] = max(most[i.stage], now[i.stage])
            if i.op in (Op.BACKWARD, Op.WEIGHT) and not forwards[i.stage] and not away[i.stage]:
                last[i.stage] = max(last[i.stage], now[i.stage] + ends)  # it was there while it ran
            forwards[i.stage] -= i.op is Op.FORWARD
        assert not any(now)
    found = resident(schedule, num_stages, horizon)
    assert [stage.most for stage in found] == most
    assert [stage.last for stage in found] == last
    if horizon == 100:
        assert tuple(stage.most for stage in found) >= peaks(schedule, num_stages)


def test_the_verifier_wants_both_in_order():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(6)))
    options = {"recompute": ("*",), "offload_activations": True, "activation_loading_horizon": 1}
    compilation = compile_model(
        model, torch.zeros(8, 4), pipeline_parallel_degree=2, microbatches=4, pipeline="simple", **options
    )
    first = compilation.programs[0]
    assert {i.op for i in first.instructions} >= {Op.OFFLOAD, Op.RELEASE, Op.RELOAD}
    texts = [str(i) for i in first.instructions]

    def changed(order):
        instructions = tuple(map(Instruction.parse, order))
        fields = {name: getattr(first, name) for name in first.__dataclass_fields__}
        return [type(first)(**{**fields, "instructions": instructions}), *compilation.programs[1:]]

    verify_programs(changed(texts))
    microbatch = next(i.microbatch for i in first.instructions if i.op is Op.OFFLOAD)
    assert f"OFFLOAD s0 m{microbatch}" in compilation.rank_source(0)
    assert f"OFFLOAD s0 m{microbatch}" in compilation.schedule_text()
    leave, release, load, back = (f"{op} s0 m{microbatch}" for op in ("OFFLOAD", "RELEASE", "RELOAD", "B"))
    for wrong, message in (
        ([t for t in texts if t != load], f"{load} is missing"),
        ([t for t in texts if t != leave], f"{leave} is missing"),
        ([t for t in texts if t != release], f"{release} is missing"),
        ([t for t in texts if t != release] + [release], f"{load} comes before {release}, which it needs"),
        ([t for t in texts if t != load] + [load], f"{back} comes before {load}, which it needs"),
        ([leave] + [t for t in texts if t != leave], f"{leave} comes before F s0 m{microbatch}, which it needs"),
    ):
        with pytest.raises(ScheduleError, match=message):
            verify_programs(changed(wrong))


def test_what_there_is_beside_the_parts_of_a_backward():
    """F0 B0 F1 B1 W0 F2 B2 W1 W2 on the last of two ranks: nobody waits for B, one for W."""
    alone, behind, later = Beside(0, 0, False), Beside(0, 1, False), Beside(0, 1, True)
    first, last = action_uses(zb_h1(2, 3), 2)
    assert (last.forwards, last.backwards) == ((alone, behind, later),) * 2
    assert last.weights == (Beside(0, 0, True), behind, later)
    assert first.forwards == (Beside(0, 0, False), Beside(1, 0, False), Beside(1, 0, True))
    assert last.in_flight(activations=10, deferred=3) == 13  # F1 beside what W0 reads
    assert action_uses(interleaved(2, (0, 1), 3, 3), 2) is None


def test_what_other_stages_of_a_rank_hold_is_beside_its_actions():
    uses = action_uses(zb_v(2, 4), 4)
    for stage, use in enumerate(uses):
        for beside in (*use.forwards, *use.backwards, *use.weights):
            assert [other for other, _ in beside.others] == [3 - stage]  # rank 0 has stages 0 and 3, rank 1 has 1 and 2
    # the V turns around on the last rank: its upper stage starts with a microbatch that waits in the lower one
    assert min(dict(beside.others)[1].waiting for beside in uses[2].forwards) == 1


def test_backwards_in_one_part_beside_those_in_two():
    """`list` had microbatches between B and W, and its plan none: 25% too much, or 20% too little."""
    first, second = [forward(0, m) for m in range(2)], [backward(0, 0), backward(0, 1), weight(0, 0)]
    (use,) = action_uses([[*first, *second]], 1)
    assert use.backwards == (Beside(1, 0, False),)
    assert use.whole == (Beside(0, 1, False),)
    assert use.weights == (Beside(0, 0, True),)
    assert use.in_flight(activations=10, deferred=3) == 20
