"""Predicted against measured: numbers of steps made by hand, a predicted step taken for a measured one, and the trace of both."""

import dataclasses
import json

import pytest
import torch
from report_cases import compilation
from torch import nn

from smpc.codegen.program import Instruction, Op
from smpc.compile import compile_model
from smpc.executor.measure.spans import Span
from smpc.observe.observer import RankRecord, StepRecord
from smpc.report.measured import compare, measured_json, whole_steps

MS = 1_000_000


@pytest.fixture(scope="module")
def found():
    return compilation()


def record(rank, *steps, **others):
    return RankRecord(rank, others.pop("pipeline_rank", rank), others.pop("replica", 0), 10, tuple(steps), **others)


def step(number, *spans, training=True, program=0):
    """Spans are (text, start, end) in milliseconds."""
    found = tuple(Span(Instruction.parse(text), int(start * MS), int(end * MS)) for text, start, end in spans)
    return StepRecord(number, training, program, found[0].start, found[-1].end, found)


def as_measured(found, factor, shift=0):
    """The predicted step, `factor` times as slow, as its ranks would record it; rank r's clock is r x `shift` late."""
    timeline = found.timeline()
    records = []
    for program in found.programs:
        at = {e.action: e for e in timeline.events if e.rank == program.rank}
        actions = {(a.op, a.stage, a.microbatch): e for a, e in at.items()}
        late, now, spans = program.rank * shift, 0.0, []
        for position, i in enumerate(program.instructions):
            event = actions.get((i.op, i.stage, i.microbatch))
            start, end = (now, now) if event is None else (event.start, event.end)
            if i.op in (Op.RECV, Op.RECV_GRAD):  # until the next action
                follows = [actions.get((j.op, j.stage, j.microbatch)) for j in program.instructions[position:]]
                end = next(e.start for e in follows if e is not None)
            spans.append(Span(i, *(round(time * factor * 1e9) - late for time in (start, end))))
            now = end
        steps = (StepRecord(3, True, 0, spans[0].start, spans[-1].end, tuple(spans)),)
        records.append(record(program.rank, *steps, offset=late, peak_bytes=1 << 20))
    return records


def test_a_predicted_step_taken_for_a_measured_one(found):
    """Twice as slow as predicted: half of every time, and the same bubble. Clocks that differ change nothing."""
    plan = found.plan
    for shift in (0, 10**12):
        result = compare(plan, as_measured(found, 2.0, shift))
        for line in result.lines:
            if line.unit == "time" and line.what != "whole step":
                assert line.error == pytest.approx(-0.5, abs=2e-3), line  # times are whole nanoseconds
        assert result.line("bubble").measured == pytest.approx(plan.schedule.bubble_fraction, rel=2e-3)
        assert result.line("pipeline").predicted == plan.schedule.step_time
        stage = plan.stages[1]
        assert result.line("stage 1, backward").measured == pytest.approx(2 * stage.backward_time, rel=2e-3)
        assert result.line("rank 2, peak").predicted == pytest.approx(
            max(s.peak_memory_bytes for s in plan.stages if s.rank == 2)
        )
        assert "-50.0%" in str(result)


@pytest.fixture(scope="module")
def two():
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    return compile_model(model, torch.randn(4, 8), pipeline_parallel_degree=2, microbatches=2).plan


def by_hand():
    """One message that the receiver waits 5 ms for, one that comes while it computes."""
    return [
        record(
            0, step(4, ("F s0 m0", 0, 10), ("SEND e1 m0 r1", 10, 11), ("F s0 m1", 11, 21), ("SEND e1 m1 r1", 21, 22))
        ),
        record(
            1, step(4, ("RECV e1 m0 r0", 0, 15), ("F s1 m0", 15, 40), ("RECV e1 m1 r0", 40, 40), ("F s1 m1", 40, 65))
        ),
    ]


def test_by_hand(two):
    assert [(edge.source, edge.destination) for edge in two.edges][1] == (0, 1)
    result = compare(two, by_hand())
    assert result.line("pipeline").measured == pytest.approx(0.065)
    assert result.line("bubble").measured == pytest.approx(1 - 70 / 130)
    assert result.line("stage 1, forward").measured == pytest.approx(0.025)
    assert result.line("stage 1, backward").measured is None
    assert result.line("rank 0, peak").error is None
    assert result.messages.num_messages == 2
    assert (result.messages.wire, result.messages.waited) == pytest.approx((0.010, 0.005))
    assert result.messages.hidden == pytest.approx(0.5)
    data = json.loads(result.to_json())
    assert [line["what"] for line in data["lines"]] == [line.what for line in result.lines]
    assert data["messages"]["hidden"] == pytest.approx(0.5)


def test_what_does_not_count(two):
    """Evaluation, other programs, steps that a rank of the pipeline has not recorded; several replicas are one sample each."""
    first, second = by_hand()
    noise = [step(5, ("F s0 m0", 900, 990), training=False), step(6, ("F s0 m0", 900, 990), program=1)]
    only = step(7, ("F s0 m0", 900, 1000), ("F s0 m1", 1000, 1100))
    noisy = dataclasses.replace(first, steps=(*first.steps, *noise, only))
    result = compare(two, [second, noisy])
    assert result.line("pipeline").measured == pytest.approx(0.065)
    again = [dataclasses.replace(r, rank=r.rank + 2, replica=1) for r in by_hand()]
    result = compare(two, [first, second, *again])
    assert result.line("pipeline").measured == pytest.approx(0.065)
    assert result.line("rank 3 (pipeline rank 1), peak").measured is None


def test_nothing_was_measured(two):
    result = compare(two, [record(0), record(1)])
    assert all(line.measured is None for line in result.lines)
    assert "no training step" in str(result)
    assert "nothing is predicted" in whole_steps([record(0, step(3, ("F s0 m0", 0, 2)), peak_bytes=2048)])
    assert "rank 0: step 2 ms (median of 1), peak 2.0 KiB" in whole_steps(
        [record(0, step(3, ("F s0 m0", 0, 2)), peak_bytes=2048)]
    )


def test_records_survive_their_file():
    for one in (*by_hand(), record(3, peak_bytes=5, offset=-7, replica=1, pipeline_rank=1)):
        assert RankRecord.from_json(one.to_json()) == one


def test_the_trace_has_every_instruction_and_message(found):
    records = as_measured(found, 2.0, shift=10**9)
    data = json.loads(measured_json(found.plan, records))
    assert data["otherData"]["plan"] == found.plan.fingerprint
    measured = [event for event in data["traceEvents"] if event["pid"] == 1]
    predicted = [event for event in data["traceEvents"] if event["pid"] == 0]
    assert sum(event["ph"] == "X" for event in predicted) == len(found.timeline().events)
    for program in found.programs:
        texts = [
            e["args"]["instruction"]
            for e in measured
            if e["ph"] == "X" and e["tid"] == program.rank and e["cat"] != "step"
        ]
        assert texts == [str(i) for i in program.instructions]
    sends = {
        (program.rank, i.peer, str(i))
        for program in found.programs
        for i in program.instructions
        if i.op in (Op.SEND, Op.SEND_GRAD)
    }
    arrows = {}
    for event in measured:
        if event["ph"] in "sf":
            arrows.setdefault(event["id"], {})[event["ph"]] = event
    assert len(arrows) == len(sends)
    ends = {(arrow["s"]["tid"], arrow["f"]["tid"]) for arrow in arrows.values()}
    assert ends == {(source, target) for source, target, _ in sends}
    small = {event["id"] for event in predicted if event["ph"] == "s"}
    assert not small & set(arrows)
    assert min(e["ts"] for e in measured if e["ph"] == "X") == 0


def test_a_trace_without_a_plan():
    data = json.loads(measured_json(None, [record(0, StepRecord(2, True, 0, 5 * MS, 7 * MS, ()))]))
    (event,) = [event for event in data["traceEvents"] if event["ph"] == "X"]
    assert (event["name"], event["ts"], event["dur"]) == ("step 2", 0, 2000)
