"""Every schedule on models of every kind, cut and run in one process: the bits of the single-process microbatched run."""

import copy
import dataclasses
import itertools
from pathlib import Path

import parity
import pytest
import torch
import zoo

from smpc.codegen.program import Op, weight
from smpc.codegen.schedules.csv_file import to_csv
from smpc.codegen.schedules.named import Choice, choose
from smpc.codegen.simulate import Costs, chain
from smpc.compile import compile_model, compile_plan
from smpc.executor.split_backward import intercept
from smpc.partitioner.graph.plan import ScheduleSummary
from smpc.partitioner.planner import solve_partition
from smpc.runtime import LoopbackRuntime
from smpc.sample_inputs import first_microbatch
from smpc.tracer.record import record

SETTINGS = {
    "gpipe": {"schedule": "gpipe"},
    "1f1b": {"schedule": "1f1b"},
    "two pieces": {"virtual_pipeline_degree": 2},
    "gpipe, two pieces": {"schedule": "gpipe", "virtual_pipeline_degree": 2},
    "1f1b, two pieces": {"schedule": "1f1b", "virtual_pipeline_degree": 2},
    "zb-h1": {"schedule": "zb-h1"},
    "zb-h2": {"schedule": "zb-h2"},
    "zb-v": {"schedule": "zb-v"},
    "list": {"schedule": "list"},
    "list, two pieces": {"schedule": "list", "virtual_pipeline_degree": 2},
}


@pytest.fixture(autouse=True)
def _defer_small_work_too(monkeypatch):
    monkeypatch.setattr(intercept, "WORTHWHILE", 0)


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def check(model, batch, compilation):
    microbatches = compilation.plan.schedule.num_microbatches
    shared = tuple(item.name for item in compilation.plan.shared_parameters)
    got = parity.run_loopback(model, compilation, batch)
    parity.assert_same(parity.run_eager(model, batch, microbatches), got, shared)


MODELS = ("gpt2", "t5", "unet", "tied")
SAMPLE = {("gpt2", "two pieces"), ("unet", "zb-h1"), ("gpt2", "zb-v"), ("tied", "list, two pieces")}


@pytest.mark.matrix(2)
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        pytest.param(*case, marks=() if case in SAMPLE else pytest.mark.slow)
        for case in itertools.product(MODELS, SETTINGS)
    ],
)
@pytest.mark.parametrize("microbatches", [8, pytest.param(2, marks=pytest.mark.slow)])
def test_two_ranks(name, settings, microbatches):
    model, batch = zoo.build(name)
    compilation = compile_model(
        model, batch, pipeline_parallel_degree=2, microbatches=microbatches, **SETTINGS[settings]
    )
    assert compilation.plan.pipeline_parallel_degree == len(compilation.programs) == 2
    check(model, batch, compilation)


@pytest.mark.slow
@pytest.mark.parametrize("settings", ["zb-h1", "zb-h2", "zb-v", "two pieces"])
def test_more_ranks_than_microbatches(settings):
    model, batch = zoo.build("t5")
    check(model, batch, compile_model(model, batch, pipeline_parallel_degree=3, microbatches=2, **SETTINGS[settings]))


def split_in_pairs(schedule):
    """Every backward of a schedule in its two parts, one after the other."""
    return tuple(
        tuple(part for a in actions for part in ((a, weight(a.stage, a.microbatch)) if a.op is Op.BACKWARD else (a,)))
        for actions in schedule
    )


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        pytest.param(*case, marks=() if case in {("gpt2", "split"), ("unet", "interleaved")} else pytest.mark.slow)
        for case in itertools.product(MODELS, ["simple", "interleaved", "list", "split"])
    ],
)
def test_any_placement(name, schedule, tmp_path):
    """The schedules that run on every placement; and a split backward, from a file."""
    model, batch = zoo.build(name)
    trace = record(model, *first_microbatch(batch, 4))
    if schedule == "split":
        schedule = str(tmp_path / "split.csv")
        whole = Choice("interleaved", (1, 2, 1, 0), 4, 5).build(chain(4), Costs.uniform(4))
        Path(schedule).write_text(to_csv(split_in_pairs(whole)))
    choice = Choice(schedule, (1, 2, 1, 0), 4, 5)
    summary = ScheduleSummary(schedule, 4, 5, 0.0, 0.0)
    plan = solve_partition(
        trace, num_stages=4, in_flight=choice.in_flight, placement=choice.placement, schedule=summary
    )
    compilation = compile_plan(trace, plan)
    assert [stage.rank for stage in compilation.plan.stages] == [1, 2, 1, 0]
    check(model, batch, compilation)


def test_a_schedule_from_a_file(tmp_path):
    choice = choose(2, 4, schedule="zb-v")
    text = to_csv(choice.build(chain(4), Costs.uniform(4)))
    # One backward is not split, the others are.
    merged = text.replace("0I0,0W0", "0B0")
    assert merged != text
    path = tmp_path / "schedule.csv"
    path.write_text(merged)
    model, batch = zoo.build("gpt2")
    compilation = compile_model(model, batch, pipeline_parallel_degree=2, microbatches=4, schedule=str(path))
    assert sum(i.op == "W" for program in compilation.programs for i in program.instructions) == 15
    check(model, batch, compilation)
    assert compilation.plan.schedule.name == str(path)


@pytest.mark.slow
@pytest.mark.parametrize("worthwhile", [0, intercept.WORTHWHILE])
def test_split_and_whole_backwards_have_the_same_bits(worthwhile, monkeypatch):
    """The same cut under a split and a whole backward, compared with each other."""
    monkeypatch.setattr(intercept, "WORTHWHILE", worthwhile)
    model, batch = zoo.build("bert")
    whole = compile_model(model, batch, pipeline_parallel_degree=2, microbatches=4)
    split = compile_plan(
        whole.trace,
        dataclasses.replace(
            whole.plan,
            schedule=dataclasses.replace(whole.plan.schedule, name="zb-h1"),
            stages=tuple(dataclasses.replace(stage, num_in_flight=2) for stage in whole.plan.stages),
        ),
    )
    assert any(i.op == "W" for i in split.programs[0].instructions)
    parity.assert_same(parity.run_loopback(model, whole, batch), parity.run_loopback(model, split, batch))


@pytest.mark.parametrize("worthwhile", [0, 100_000, intercept.WORTHWHILE])
def test_steps_after_one_that_left_no_work_have_the_same_bits(worthwhile, monkeypatch):
    """All calls, some, or none are worth deferring; in the last case stages go on with whole backwards."""
    monkeypatch.setattr(intercept, "WORTHWHILE", worthwhile)
    model, batch = zoo.build("unet")
    compilation = compile_model(model, batch, pipeline_parallel_degree=2, microbatches=4, schedule="zb-h1")
    eager, ours = copy.deepcopy(model), copy.deepcopy(model)
    runtime = LoopbackRuntime(ours)
    program = runtime.install(compilation)
    for _ in range(3):  # gradients add up
        runtime.run(
            program, parity.split(batch, 4), lambda _, output: [(parity.loss_of(output) / 4, None)], training=True
        )
        for args, kwargs in parity.split(batch, 4):
            (parity.loss_of(eager(*args, **kwargs)) / 4).backward()
    for (name, found), expected in zip(ours.named_parameters(), eager.parameters(), strict=True):
        assert torch.equal(found.grad, expected.grad), name
