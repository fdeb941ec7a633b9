"""Watching steps: spans against an independent clock, callbacks, memory against another count, and nothing of it when nobody asks."""

import dataclasses
import itertools
import time
import weakref

import parity
import pytest
import torch
import torch.distributed as dist
import zoo
from torch import nn

from smpc.codegen.program import Op
from smpc.compile import compile_model
from smpc.errors import ConfigError, UsageError
from smpc.executor.measure import spans
from smpc.executor.measure.spans import LiveBytes
from smpc.executor.transport import loopback_transports
from smpc.observe.observer import Observer
from smpc.observe.window import Observation, Window
from smpc.runtime import LoopbackRuntime, Runtime


def roots(output):
    return [(parity.loss_of(output) / 2, None)]


@pytest.fixture
def pipeline():
    model, batch = zoo.build("gpt2")
    compilation = compile_model(model, batch, pipeline_parallel_degree=2, microbatches=2, device="cpu")
    return model, batch, compilation


def test_spans_hold_what_another_clock_sees(pipeline):
    """Hooks of the stage modules note when they run: each call is in a span of its stage, and no span is without one."""
    model, batch, compilation = pipeline
    runtime = LoopbackRuntime(model)
    program = runtime.install(compilation)
    calls = {0: [], 1: []}
    for index, stage in runtime.stages().items():
        stage.register_forward_pre_hook(lambda module, args, own=calls[index]: own.append([time.monotonic_ns()]))
        stage.register_forward_hook(lambda module, args, out, own=calls[index]: own[-1].append(time.monotonic_ns()))
    with pytest.raises(UsageError, match="observe"):
        runtime.report()
    runtime.observe(2)
    begin = time.monotonic_ns()
    for _ in range(3):
        runtime.run(program, parity.split(batch, 2), lambda m, output: roots(output), training=True)
    end = time.monotonic_ns()
    for rank, observer in enumerate(runtime._observers):
        record = observer.record
        assert [step.step for step in record.steps] == [0, 1]
        assert record.num_steps == 3
        spans = [span for step in record.steps for span in step.spans]
        instructions = compilation.programs[rank].instructions
        assert [span.instruction for span in spans] == 2 * list(instructions)
        assert all(a.end <= b.start for a, b in itertools.pairwise(spans))
        assert begin <= spans[0].start <= spans[-1].end <= end
        forwards = [span for span in spans if span.instruction.op is Op.FORWARD]
        assert len(forwards) == len(calls[rank][:4]) == 4
        for span, (start, stop) in zip(forwards, calls[rank], strict=False):
            assert span.start <= start <= stop <= span.end
    report = runtime.report()
    lines = {line.what: line.measured for line in report.lines}
    assert sum(value is not None for value in lines.values()) == 4  # forwards and backwards: ranks took turns
    own = sorted(stop - start for start, stop in calls[0][:4])
    assert lines["stage 0, forward"] * 1e9 >= own[1]


def test_a_callback_is_told_about_a_step():
    model, batch = zoo.build("gpt2")
    compilation = compile_model(model, batch, pipeline_parallel_degree=1, microbatches=2)
    runtime = Runtime(model, rank=0, transport=loopback_transports(1)[0])
    program = runtime.install(compilation)
    infos = []
    handle = runtime.register_step_callback(infos.append)
    losses, walls = [], []

    def on_output(microbatch, output):
        losses.append(parity.loss_of(output).item())
        return roots(output)

    for _ in range(2):
        start = time.monotonic()
        runtime.run(program, parity.split(batch, 2), on_output, training=True)
        walls.append(time.monotonic() - start)
    with torch.no_grad():
        runtime.run(program, parity.split(batch, 2), lambda microbatch, output: None, training=False)
    handle.remove()
    runtime.run(program, parity.split(batch, 2), on_output, training=True)
    assert [(info.step, info.training) for info in infos] == [(0, True), (1, True), (2, False)]
    ids = batch[1]["input_ids"]
    for info, wall, pair in zip(infos, walls, (losses[:2], losses[2:4]), strict=False):
        assert info.seconds <= wall
        assert 0 <= info.bubble < 1
        assert info.loss == pytest.approx(sum(pair) / 2)
        assert (info.samples, info.tokens) == (ids.shape[0], ids.numel())
        assert info.samples_per_second == pytest.approx(info.samples / info.seconds_between)
        assert info.tokens_per_second == pytest.approx(info.tokens / info.seconds_between)
    assert infos[1].seconds_between >= infos[1].seconds
    assert infos[2].loss is None


def test_nothing_is_measured_unless_asked(pipeline):
    """A runtime that nobody watches runs the handlers themselves, before and after it was watched."""
    model, batch, compilation = pipeline
    runtime = LoopbackRuntime(model)
    program = runtime.install(compilation)
    interpreters = [rank._interpreters[True] for rank in runtime._programs[program]]
    plain = [[handler.run for handler in interpreter._handlers] for interpreter in interpreters]

    def run():
        runtime.run(program, parity.split(batch, 2), lambda m, output: roots(output), training=True)

    run()
    assert [interpreter._runs for interpreter in interpreters] == plain
    runtime.observe(1)
    run()
    assert all(len(observer.record.steps) == 1 for observer in runtime._observers)
    assert [interpreter._runs for interpreter in interpreters] == plain
    run()
    assert all(len(observer.record.steps) == 1 for observer in runtime._observers)


def test_a_failing_step_leaves_the_observer_ready(pipeline):
    model, batch, compilation = pipeline
    runtime = LoopbackRuntime(model)
    program = runtime.install(compilation)
    runtime.observe(3)

    def fail(microbatch, output):
        raise KeyError("mine")

    with pytest.raises(KeyError):
        runtime.run(program, parity.split(batch, 2), fail, training=True)
    runtime = LoopbackRuntime(model)
    observer = Observer(torch.device("cpu"))
    told = []
    observer.register(told.append)
    with pytest.raises(KeyError), observer.step():
        raise KeyError("mine")
    with observer.step() as watch:
        assert watch.is_wanted
    assert [info.step for info in told] == [1]


def test_steps_in_steps_are_one():
    observer = Observer(torch.device("cpu"))
    told = []
    observer.register(told.append)
    with observer.step() as outer:
        with observer.step() as inner:
            assert inner is outer
        assert not told
    assert len(told) == 1


def test_the_window_and_what_comes_after():
    ended = []
    observer = Observer(torch.device("cpu"), window=Window(2, 4), replicas=3)
    observer.on_window_end = lambda: ended.append(observer.record)
    idle = []
    for _ in range(6):
        with observer.step() as watch:
            idle.append(not watch.is_wanted)
            watch.training = True
    assert idle == [True, False, False, False, True, True]  # step 1 for memory
    (record,) = ended
    assert [step.step for step in record.steps] == [2, 3]
    assert (record.num_steps, observer.record.num_steps) == (4, 6)
    with pytest.raises(ConfigError, match="at least 1"):
        observer.observe(0)


def test_memory_is_not_measured_in_the_first_step_of_all():
    """The optimizer makes its state at the end of it: a peak in a later backward has it, one in the first backward has not."""
    state = []
    observer = Observer(torch.device("cpu"), held=lambda: state)
    observer.observe(1)
    for _ in range(3):
        with observer.step() as watch:
            watch.training = True
        state = [torch.zeros(1000)]
    assert observer.record.peak_bytes == 4000
    assert [step.step for step in observer.record.steps] == [2]


@pytest.mark.parametrize(
    ("window", "peak", "steps"),
    [((0, 4), None, [0, 1, 2, 3]), ((1, 2), None, [1]), ((1, 4), 4000, [2, 3]), ((2, 4), 4000, [2, 3])],
)
def test_memory_of_a_window_is_never_that_of_the_first_step(window, peak, steps):
    state = []
    observer = Observer(torch.device("cpu"), window=Window(*window), held=lambda: state)
    for _ in range(5):
        with observer.step() as watch:
            watch.training = True
        state = [torch.zeros(1000)]
    assert observer.record.peak_bytes == peak
    assert [step.step for step in observer.record.steps] == steps


def test_memory_is_what_lives():
    """Held tensors, what a step makes and drops, and the optimizer's step after it; each storage once."""
    held = torch.zeros(1000)
    observer = Observer(torch.device("cpu"), window=Window(2, 3), held=lambda: [held, held[:10]])
    with observer.step():
        torch.ones(5000)
    inputs = [torch.zeros(50)]
    with observer.step(inputs.copy):
        first = torch.ones(200)
        del first
        second = torch.ones(100)
        third = second.view(10, 10) + 1
        assert third.shape == (10, 10)
    inputs.clear()
    assert observer.record.peak_bytes == 4 * (1000 + 50 + 200)
    with observer.optimizer_step():
        more = torch.ones(300)
    assert more.numel() == 300
    assert observer.record.peak_bytes == 4 * (1000 + 100 + 100 + 300)
    with observer.step():
        torch.ones(5000)
    with observer.optimizer_step():
        torch.ones(5000)
    assert observer.record.peak_bytes == 4 * (1000 + 100 + 100 + 300)


def test_memory_of_the_optimizers_step_has_what_the_step_has_written():
    """Buckets of replicas, which nobody holds who is asked: predictions of steps in half precision seemed 10% too high."""
    bucket, gone = torch.zeros(1000), torch.zeros(70)
    observer = Observer(torch.device("cpu"), window=Window(2, 3))
    with observer.step():
        gone.add_(1)
    with observer.step():
        bucket.add_(1)
        gone.add_(1)
    del gone
    with observer.optimizer_step():
        torch.ones(300)
    assert observer.record.peak_bytes == 4 * (1000 + 300)


def test_live_bytes_through_autograd():
    """Against sizes known by hand: what a linear layer's backward needs and makes."""
    layer = nn.Linear(64, 64, bias=False)
    x = torch.randn(32, 64)
    with LiveBytes((layer.weight, x)) as counter:
        out = layer(x)
        assert counter.live == 4 * (64 * 64 + 2 * 32 * 64)
        out.sum().backward()
    gone = weakref.ref(out)
    del out
    assert gone() is None
    assert counter.live == 4 * (2 * 64 * 64 + 32 * 64)
    assert counter.peak > counter.live


def test_what_is_written_before_it_is_made_was_there():
    """Buckets, which a reducer makes in C++ before anybody counts, and writes when the first gradients are there."""
    bucket = torch.zeros(1000)
    with LiveBytes() as counter:
        torch.ones(500)
        bucket.add_(1)
    assert (counter.peak, counter.live) == (4 * 1500, 4 * 1000)


def test_storages_that_get_other_sizes():
    """Whole parameters of units that one rank has for itself are filled without an operation of FSDP: emptied, they still counted."""
    resize = torch.UntypedStorage.resize_
    whole, early = torch.ones(1000), torch.ones(300)
    with LiveBytes() as counter:
        whole.add_(1)
        whole.untyped_storage().resize_(0)
        early.untyped_storage().resize_(0)  # it was there, though no operation has written it
        made = torch.ones(200)
        assert counter.live == 800
        whole.untyped_storage().resize_(4000)
        whole.copy_(torch.ones(1000))
    assert torch.UntypedStorage.resize_ is resize
    assert counter.peak == 4 * (1000 + 1000 + 200), made
    early.untyped_storage().resize_(1200)
    counter.go_on([])
    assert counter.peak == counter.live == 4 * (1000 + 200 + 300)


def test_memory_that_torch_did_not_allocate_counts_where_it_is_held():
    shared = torch.frombuffer(bytearray(4000), dtype=torch.uint8)
    with LiveBytes() as counter:
        shared.add_(1)
    assert counter.peak == 0
    assert LiveBytes([shared]).peak == 4000


@pytest.mark.parametrize(("lets_go", "peak"), [(True, 8000), (False, 12000)])
def test_what_a_thread_still_holds_after_a_collective(monkeypatch, lets_go, peak):
    """On a busy host gloo's thread dropped what it had gathered after the next operation: peaks were larger by that, now and then."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        held = []
        monkeypatch.setattr(spans.time, "sleep", lambda seconds: held.clear() if lets_go else None)
        with LiveBytes() as counter:
            held.append(torch.ones(1000))
            dist.all_reduce(held[0])
            kept = [torch.ones(1000), torch.ones(1000)]
    finally:
        dist.destroy_process_group()
    assert counter.peak == peak, kept


@pytest.mark.parametrize("text", ["5", "5:", ":8", "8:5", "5:5", "a:b", "-1:3", "1:2:3", " 1:2"])
def test_windows_that_are_none(text):
    with pytest.raises(ConfigError, match="steps: expected"):
        Window.parse(text)
    with pytest.raises(ConfigError, match="SMPC_OBSERVE_STEPS"):
        Observation.read({"SMPC_OBSERVE": "/somewhere", "SMPC_OBSERVE_STEPS": text})


def test_what_the_launcher_asks_for():
    asked = Observation("/some where", Window(5, 8))
    assert Observation.read(asked.environment()) == asked
    assert Observation.read({}) is None
    assert Observation.read({"SMPC_OBSERVE": "here"}).window == Window()
    assert [step for step in range(10) if step in asked.window] == [5, 6, 7]
    assert dataclasses.astuple(Window.parse("5:8")) == (5, 8)


def test_memory_is_counted_of_steps_with_sparse_tensors():
    """A sparse tensor has no storage of its own: observing a model with sparse gradients ended its training."""
    table = nn.Embedding(1000, 8, sparse=True)
    with LiveBytes([table.weight, torch.eye(4).to_sparse()]) as counter:
        table(torch.tensor([1, 2])).sum().backward()
    assert table.weight.grad.is_sparse
    assert counter.peak - table.weight.nbytes >= table.weight.grad._values().nbytes
