"""Hand-written programs against an eager run over the same microbatches: bitwise."""

import pytest
import torch
from torch import nn

from smpc.codegen.program import Channel, Instruction, RankProgram, StageCode
from smpc.errors import ScheduleError, StepError, TransportError
from smpc.executor import Interpreter, run_loopback
from smpc.executor.transport import loopback_transports
from smpc.executor.transport.loopback import LoopbackTransport
from smpc.tracer.ir import TensorSpec

MB = 4  # microbatches
GRAD = TensorSpec((3, 8), "float32", (8, 1), True)
INPUT = TensorSpec((3, 8), "float32", (8, 1))


@pytest.fixture(autouse=True, params=["ahead", "on device"])
def receives(request, monkeypatch):
    """Every test runs a second time with receives as they are where they occupy a device."""
    monkeypatch.setattr(LoopbackTransport, "receives_on_device", request.param == "on device")


def code(index, inputs, outputs):
    return StageCode(index, f"Stage{index}", tuple(inputs), tuple(outputs), "", (), ())


def channel(index, source, destination, ranks, **specs):
    return Channel(index, source, destination, ranks[0], ranks[1], tuple(specs), tuple(specs.values()))


def program(rank, num_ranks, text, channels, stages, *, num_microbatches=MB, has_backward=True, shared=()):
    lines = [line.strip() for line in text.strip().splitlines()]
    instructions = tuple(Instruction.parse(part) for line in lines for part in line.split(", ") if part)
    return RankProgram(
        rank, num_ranks, num_microbatches, has_backward, instructions, channels, stages, shared, "by hand", ""
    )


def interpreters(programs, stages, **options):
    transports = loopback_transports(len(programs))
    return [
        Interpreter(p, {c.index: stages[c.index] for c in p.stages}, t, **options)
        for p, t in zip(programs, transports, strict=True)
    ]


class Stage(nn.Module):
    """A stage from a function of (self, *inputs) -> tuple, over one linear layer."""

    def __init__(self, function, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.linear = nn.Linear(8, 8)
        self.function = function

    def forward(self, *inputs):
        return self.function(self, *inputs)


def microbatches(num=MB, seed=7):
    torch.manual_seed(seed)
    return [{"x": torch.randn(3, 8)} for _ in range(num)]


def grads(*modules):
    return {f"{i}.{n}": p.grad for i, m in enumerate(modules) for n, p in m.named_parameters()}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (found[name] is None) == (value is None), name
        if value is not None:
            assert torch.equal(found[name], value), name


SIMPLE = (
    """
    MOVE e0 m0, F s0 m0, SEND e1 m0 r1, MOVE e0 m1, F s0 m1, SEND e1 m1 r1
    MOVE e0 m2, F s0 m2, SEND e1 m2 r1, MOVE e0 m3, F s0 m3, SEND e1 m3 r1
    RECV_GRAD e1 m0 r1, B s0 m0, RECV_GRAD e1 m1 r1, B s0 m1
    RECV_GRAD e1 m2 r1, B s0 m2, RECV_GRAD e1 m3 r1, B s0 m3
    """,
    """
    RECV e1 m0 r0, F s1 m0, RECV e1 m1 r0, F s1 m1, RECV e1 m2 r0, F s1 m2, RECV e1 m3 r0, F s1 m3
    B s1 m0, SEND_GRAD e1 m0 r0, B s1 m1, SEND_GRAD e1 m1 r0
    B s1 m2, SEND_GRAD e1 m2 r0, B s1 m3, SEND_GRAD e1 m3 r0
    """,
)
ONE_F_ONE_B = (
    """
    MOVE e0 m0, F s0 m0, SEND e1 m0 r1, MOVE e0 m1, F s0 m1, SEND e1 m1 r1
    RECV_GRAD e1 m0 r1, B s0 m0, MOVE e0 m2, F s0 m2, SEND e1 m2 r1
    RECV_GRAD e1 m1 r1, B s0 m1, MOVE e0 m3, F s0 m3, SEND e1 m3 r1
    RECV_GRAD e1 m2 r1, B s0 m2, RECV_GRAD e1 m3 r1, B s0 m3
    """,
    """
    RECV e1 m0 r0, F s1 m0, B s1 m0, SEND_GRAD e1 m0 r0, RECV e1 m1 r0, F s1 m1, B s1 m1, SEND_GRAD e1 m1 r0
    RECV e1 m2 r0, F s1 m2, B s1 m2, SEND_GRAD e1 m2 r0, RECV e1 m3 r0, F s1 m3, B s1 m3, SEND_GRAD e1 m3 r0
    """,
)


def two_stages(texts, first, second, *, values=None, first_outputs=("h",), num_microbatches=MB):
    """Stage 0 on rank 0, stage 1 on rank 1."""
    specs = values or {"h": GRAD}
    channels = (channel(0, -1, 0, (0, 0), x=INPUT), channel(1, 0, 1, (0, 1), **specs))
    codes = (code(0, ["x"], first_outputs), code(1, list(specs), ["out"]))
    programs = [program(r, 2, texts[r], channels, (codes[r],), num_microbatches=num_microbatches) for r in range(2)]
    return interpreters(programs, {0: first, 1: second})


def layer(self, h):
    return (torch.relu(self.linear(h)),)


def eager(inputs, forward, loss):
    """Outputs; gradients accumulate in the modules."""
    outputs = []
    for m, data in enumerate(inputs):
        outputs.append(forward(data["x"]))
        value = loss(m, outputs[-1])
        if value is not None:
            value.backward()
    return outputs


@pytest.mark.parametrize("texts", [SIMPLE, ONE_F_ONE_B], ids=["simple", "1f1b"])
def test_two_stages_equal_eager(texts):
    pipeline, reference = ([Stage(layer, 1), Stage(layer, 2)] for _ in range(2))
    found = {}

    def on_output(m, outputs):
        found[m] = outputs[0].detach()
        return [(outputs[0].square().mean() / MB, None)]

    ranks = two_stages(texts, *pipeline)
    for step in range(2):  # gradients accumulate over steps
        inputs = microbatches(seed=step)
        run_loopback(ranks, inputs, on_output)
        expected = eager(inputs, lambda x: reference[1](*reference[0](x))[0], lambda _, o: o.square().mean() / MB)
        assert all(torch.equal(found[m], expected[m]) for m in range(MB))
        assert_same(grads(*pipeline), grads(*reference))


def test_roots_may_be_outputs_with_given_gradients():
    pipeline, reference = ([Stage(layer, 1), Stage(layer, 2)] for _ in range(2))
    weights = torch.randn(3, 8)
    run_loopback(two_stages(SIMPLE, *pipeline), microbatches(), lambda m, outputs: [(outputs[0], weights)])
    eager(microbatches(), lambda x: reference[1](*reference[0](x))[0], lambda m, o: (o * weights).sum())
    assert_same(grads(*pipeline), grads(*reference))


CHAIN = (
    """
    MOVE e0 m0, F s0 m0, SEND e1 m0 r1, MOVE e0 m1, F s0 m1, SEND e1 m1 r1
    RECV_GRAD e1 m0 r1, B s0 m0, RECV_GRAD e1 m1 r1, B s0 m1
    """,
    """
    RECV e1 m0 r0, F s1 m0, MOVE e2 m0, F s2 m0, SEND e3 m0 r2
    RECV e1 m1 r0, F s1 m1, MOVE e2 m1, F s2 m1, SEND e3 m1 r2
    RECV_GRAD e3 m0 r2, B s2 m0, MOVE_GRAD e2 m0, B s1 m0, SEND_GRAD e1 m0 r0
    RECV_GRAD e3 m1 r2, B s2 m1, MOVE_GRAD e2 m1, B s1 m1, SEND_GRAD e1 m1 r0
    """,
    """
    RECV e3 m0 r1, F s3 m0, B s3 m0, SEND_GRAD e3 m0 r1
    RECV e3 m1 r1, F s3 m1, B s3 m1, SEND_GRAD e3 m1 r1
    """,
)


def test_value_with_a_chain_of_consumers_equals_eager_bitwise():
    """h is used by stages 1, 2 and 3 too; the order of summation of its gradient shows in the last bits."""

    def first(self, x):
        h = self.linear(x)
        return h, torch.tanh(h * 3.3)

    def middle(self, h, y):
        return h, torch.tanh(self.linear(y) * h + torch.sin(h))

    def last(self, h, y):
        return (self.linear(h * y) + h.exp(),)

    both = {"h": GRAD, "y": GRAD}
    channels = (
        channel(0, -1, 0, (0, 0), x=INPUT),
        channel(1, 0, 1, (0, 1), **both),
        Channel(2, 1, 2, 1, 1, ("h", "y1"), (GRAD, GRAD)),
        Channel(3, 2, 3, 1, 2, ("h", "y2"), (GRAD, GRAD)),
    )
    codes = (
        code(0, ["x"], ["h", "y"]),
        code(1, ["h", "y"], ["h", "y1"]),
        code(2, ["h", "y1"], ["h", "y2"]),
        code(3, ["h", "y2"], ["out"]),
    )
    placed = [codes[:1], codes[1:3], codes[3:]]
    pipeline, reference = ([Stage(first, 1), Stage(middle, 2), Stage(middle, 3), Stage(last, 4)] for _ in range(2))
    programs = [program(r, 3, CHAIN[r], channels, placed[r], num_microbatches=2) for r in range(3)]
    ranks = interpreters(programs, dict(enumerate(pipeline)))
    run_loopback(ranks, microbatches(2), lambda m, outputs: [(outputs[0].square().mean(), None)])

    def whole(x):
        values = reference[0](x)
        for stage in reference[1:]:
            values = stage(*values)
        return values[0]

    eager(microbatches(2), whole, lambda m, o: o.square().mean())
    assert_same(grads(*pipeline), grads(*reference))


def aux(self, x):
    h = self.linear(x)
    return h, h.detach() * 2 + self.linear.bias  # two values, one of them often unused


@pytest.mark.parametrize("texts", [SIMPLE, ONE_F_ONE_B], ids=["simple", "1f1b"])
@pytest.mark.parametrize("used", ["both", "h", "aux", "none"])
def test_unused_values_give_none_gradients(texts, used):
    def second(self, h, side):
        return self.linear(h), side.sin()

    def loss(m, out, side):
        terms = {"both": out.sum() + side.sum(), "h": out.sum(), "aux": side.sum(), "none": None}
        return terms[used]

    def on_output(m, outputs):
        value = loss(m, *outputs)
        return None if value is None else [(value, None)]

    pipeline, reference = ([Stage(aux, 1), Stage(second, 2)] for _ in range(2))
    channels = (channel(0, -1, 0, (0, 0), x=INPUT), channel(1, 0, 1, (0, 1), h=GRAD, side=GRAD))
    codes = (code(0, ["x"], ["h", "side"]), code(1, ["h", "side"], ["out", "side1"]))
    programs = [program(r, 2, texts[r], channels, (codes[r],)) for r in range(2)]
    run_loopback(interpreters(programs, dict(enumerate(pipeline))), microbatches(), on_output)
    eager(microbatches(), lambda x: reference[1](*reference[0](x)), lambda m, o: loss(m, *o))
    assert_same(grads(*pipeline), grads(*reference))
    assert (pipeline[1].linear.weight.grad is None) == (used in ("aux", "none"))


def test_gradient_missing_later_is_zero_and_appearing_later_is_an_error():
    def second(self, h, side):
        return self.linear(h), side.sin()

    channels = (channel(0, -1, 0, (0, 0), x=INPUT), channel(1, 0, 1, (0, 1), h=GRAD, side=GRAD))
    codes = (code(0, ["x"], ["h", "side"]), code(1, ["h", "side"], ["out", "side1"]))
    programs = [program(r, 2, SIMPLE[r], channels, (codes[r],)) for r in range(2)]
    pipeline, reference = ([Stage(aux, 1), Stage(second, 2)] for _ in range(2))

    def loss(m, outputs):
        return outputs[0].sum() + outputs[1].sum() if m == 0 else outputs[0].sum()

    ranks = interpreters(programs, dict(enumerate(pipeline)))
    run_loopback(ranks, microbatches(), lambda m, o: [(loss(m, o), None)])
    eager(microbatches(), lambda x: reference[1](*reference[0](x)), loss)
    assert_same(grads(*pipeline), grads(*reference))
    with pytest.raises(StepError, match="edge 1: value 'side' has a gradient in microbatch 2") as caught:
        run_loopback(ranks, microbatches(), lambda m, o: [(o[1 if m == 2 else 0].sum(), None)])
    assert "instruction 'SEND_GRAD e1 m2 to r0'" in caught.value.__notes__[0]
    run_loopback(ranks, microbatches(), lambda m, o: [(o[0].sum(), None)])  # the next step is not disturbed


def test_integers_booleans_and_odd_layouts_cross():
    def first(self, x):
        h = self.linear(x)
        return h.t(), h.sum(1, keepdim=True).expand(3, 5), x > 0, (x * 10).long(), h.sum(), h[:, :0], h.bfloat16()

    def second(self, t, wide, mask, whole, scalar, empty, small):
        assert t.stride() == (1, 8)
        assert wide.is_contiguous()
        assert (mask.dtype, whole.dtype, scalar.shape, empty.shape) == (torch.bool, torch.int64, (), (3, 0))
        return (self.linear(t.t() * mask) * whole + wide.sum() * scalar + empty.sum() + small.float(),)

    values = {
        "t": TensorSpec((8, 3), "float32", (1, 8), True),
        "wide": TensorSpec((3, 5), "float32", (1, 0), True),
        "mask": TensorSpec((3, 8), "bool", (8, 1)),
        "whole": TensorSpec((3, 8), "int64", (8, 1)),
        "scalar": TensorSpec((), "float32", (), True),
        "empty": TensorSpec((3, 0), "float32", (8, 1), True),
        "small": TensorSpec((3, 8), "bfloat16", (8, 1), True),
    }
    pipeline, reference = ([Stage(first, 1), Stage(second, 2)] for _ in range(2))
    reference[1].function = lambda self, t, wide, *rest: second(self, t, wide.contiguous(), *rest)
    ranks = two_stages(ONE_F_ONE_B, *pipeline, values=values, first_outputs=values)
    run_loopback(ranks, microbatches(), lambda m, o: [(o[0].mean(), None)])
    eager(microbatches(), lambda x: reference[1](*reference[0](x))[0], lambda m, o: o.mean())
    assert_same(grads(*pipeline), grads(*reference))


def test_values_that_alias_buffers_are_copied():
    class Counting(Stage):
        def __init__(self, function, seed):
            super().__init__(function, seed)
            self.register_buffer("count", torch.zeros(()))

    def first(self, x):
        self.count += 1
        return self.linear(x), self.count

    seen = []

    def second(self, h, count):
        seen.append(count.item())
        return (h * count,)

    values = {"h": GRAD, "count": TensorSpec((), "float32", ())}
    ranks = two_stages(SIMPLE, Counting(first, 1), Stage(second), values=values, first_outputs=values)
    run_loopback(ranks, microbatches(), lambda m, o: [(o[0].sum(), None)])
    assert seen == [1, 2, 3, 4]


EVALUATE = (
    "MOVE e0 m0, F s0 m0, SEND e1 m0 r1, MOVE e0 m1, F s0 m1, SEND e1 m1 r1",
    "RECV e1 m0 r0, F s1 m0, RECV e1 m1 r0, F s1 m1",
)


@pytest.mark.parametrize("grad", [True, False])
def test_evaluation(grad):
    stages = [Stage(layer, 1), Stage(layer, 2)]
    channels = (channel(0, -1, 0, (0, 0), x=INPUT), channel(1, 0, 1, (0, 1), h=GRAD))
    codes = (code(0, ["x"], ["h"]), code(1, ["h"], ["out"]))
    programs = [
        program(r, 2, EVALUATE[r], channels, (codes[r],), num_microbatches=2, has_backward=False) for r in range(2)
    ]
    ranks = interpreters(programs, dict(enumerate(stages)))
    found = {}
    with torch.set_grad_enabled(grad):
        run_loopback(ranks, microbatches(2), lambda m, outputs: found.update({m: outputs[0]}))
        for m, data in enumerate(microbatches(2)):
            assert torch.equal(found[m], stages[1](*stages[0](data["x"]))[0])
    with pytest.raises(StepError, match="only evaluates"):
        run_loopback(ranks, microbatches(2), lambda m, outputs: [(outputs[0].sum(), None)])


SHARED = (SIMPLE[0] + "REDUCE p0", SIMPLE[1] + "REDUCE p0")


def shared_pipeline(second):
    """The same weight on two ranks, as replicas."""
    first = Stage(layer, 1)
    channels = (channel(0, -1, 0, (0, 0), x=INPUT), channel(1, 0, 1, (0, 1), h=GRAD))
    codes = (code(0, ["x"], ["h"]), code(1, ["h"], ["out"]))
    stages = [first, second]
    transports = loopback_transports(2)
    return stages, [
        Interpreter(
            program(r, 2, SHARED[r], channels, (codes[r],), shared=(("linear.weight", (0, 1)),)),
            {r: stages[r]},
            transports[r],
            parameters={"linear.weight": stages[r].linear.weight},
        )
        for r in range(2)
    ]


def test_shared_parameter_gradients_are_summed():
    stages, ranks = shared_pipeline(Stage(layer, 1))
    weight = stages[0].linear.weight.detach().clone().requires_grad_()
    bias = stages[0].linear.bias.detach()
    for step in range(2):  # without clearing: the first step's sum counts once
        inputs = microbatches(seed=step)
        run_loopback(ranks, inputs, lambda m, o: [(o[0].square().sum(), None)])
        for data in inputs:
            h = torch.relu(nn.functional.linear(data["x"], weight, bias))
            torch.relu(nn.functional.linear(h, weight, bias)).square().sum().backward()
        found = [stage.linear.weight.grad for stage in stages]
        assert torch.equal(*found)
        torch.testing.assert_close(found[0], weight.grad, rtol=1e-6, atol=1e-5)


def test_shared_parameter_that_some_or_no_holders_use():
    stages, ranks = shared_pipeline(Stage(lambda self, h: (h * 2,), 1))
    run_loopback(ranks, microbatches(), lambda m, o: None)
    assert all(stage.linear.weight.grad is None for stage in stages)
    run_loopback(ranks, microbatches(), lambda m, o: [(o[0].sum(), None)])
    assert stages[0].linear.weight.grad.abs().sum() > 0
    assert torch.equal(stages[0].linear.weight.grad, stages[1].linear.weight.grad)


@pytest.mark.parametrize(
    ("spoil", "error", "text"),
    [
        (
            lambda h: h[:2],
            TransportError,
            r"edge 1 from stage 0 to stage 1: value 'h' was planned as float32\[3, 8\], found float32\[2, 8\]",
        ),
        (lambda h: h.double(), TransportError, r"planned as float32\[3, 8\], found float64\[3, 8\]"),
        (lambda h: 1 / 0, ZeroDivisionError, "division"),
    ],
)
def test_errors_name_rank_instruction_stage_and_microbatch(spoil, error, text):
    calls = []

    def first(self, x):
        calls.append(x)
        h = self.linear(x)
        return (spoil(h) if len(calls) == 2 else h,)

    ranks = two_stages(SIMPLE, Stage(first, 1), Stage(layer, 2))
    with pytest.raises(error, match=text) as caught:
        run_loopback(ranks, microbatches(), lambda m, o: [(o[0].sum(), None)])
    (note,) = caught.value.__notes__
    assert note.startswith("in pipeline rank 0, instruction '")
    assert "microbatch 1" in note
    assert ("stage 0" in note) == (error is ZeroDivisionError)
    run_loopback(ranks, microbatches(), lambda m, o: [(o[0].sum(), None)])


def test_unplanned_gradient_is_an_error():
    ranks = two_stages(SIMPLE, Stage(layer, 1), Stage(layer, 2), values={"h": INPUT})
    with pytest.raises(TransportError, match="with a gradient, which nothing would carry back"):
        run_loopback(ranks, microbatches(), lambda m, o: [(o[0].sum(), None)])


def test_missing_inputs():
    ranks = two_stages(SIMPLE, Stage(layer, 1), Stage(layer, 2))
    with pytest.raises(StepError, match=r"microbatch 0 lacks the model inputs \['x'\], found \['y'\]"):
        run_loopback(ranks, [{"y": torch.zeros(3, 8)}] * MB, None)


def test_deadlock_names_everybody():
    crossed = (SIMPLE[0].replace("SEND e1 m0 r1", "RECV_GRAD e1 m0 r1", 1), SIMPLE[1])
    with pytest.raises(ScheduleError) as caught:
        run_loopback(two_stages(crossed, Stage(layer, 1), Stage(layer, 2)), microbatches(), None)
    assert "pipeline rank 0, instruction 'RECV_GRAD e1 m0 from r1'" in str(caught.value)
    assert "pipeline rank 1, instruction 'RECV e1 m0 from r0'" in str(caught.value)


@pytest.mark.parametrize(("texts", "expected"), [(SIMPLE, [5, 5, 5, 5]), (ONE_F_ONE_B, [3, 2, 3, 2])])
def test_memory_is_released(texts, expected):
    """Sent values live until the receiver's backward, as leaves; outputs that nobody needs are gone at once."""
    alive = []

    def watch(tensor):
        alive.append(torch.multiprocessing.reductions.StorageWeakRef(tensor.untyped_storage()))
        return tensor

    def first(self, x):
        return (watch(self.linear(x) + 1),)

    def second(self, h):
        return (watch(h + self.linear.bias),)

    counts = []

    def on_output(m, outputs):
        counts.append(sum(not ref.expired() for ref in alive))
        return [(outputs[0].sum(), None)]

    run_loopback(two_stages(texts, Stage(first, 1), Stage(second, 2)), microbatches(), on_output)
    assert counts == expected  # the output of the moment, and the leaves of microbatches without backward
    assert all(ref.expired() for ref in alive)
