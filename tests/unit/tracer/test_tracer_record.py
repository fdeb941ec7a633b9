"""The recorder: what it writes down, what it refuses, and that a replay equals the model."""

import copy
import dataclasses
import gc
import pickle
import traceback

import pytest
import torch
import torch.nn.functional as F
import zoo
from drawn import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks

from smpc.errors import TraceError, UsageError
from smpc.tracer import NodeKind, Trace, flatten, mark_leaf, record, register_shape_rule, replay, to_fx, verify
from smpc.tracer.ir import STRIDED_VIEW, Autocast, strided_view
from smpc.tracer.recording.recorder import Recorder


@pytest.mark.matrix(8)
@pytest.mark.parametrize("name", zoo.MODELS)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_replay_equals_the_model_bitwise(name, training):
    model, (args, kwargs) = zoo.build(name)
    model.train(training)
    trace = record(model, args, kwargs)
    verify(trace, model, args, kwargs)
    assert trace.training is training


class Strided(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.way, self.linear = way, nn.Linear(4, 4)

    def forward(self, x):
        y = self.linear(x)
        if self.way == "beyond":
            return y[:, :2].as_strided((2, 4), (4, 1)).sum()
        rows = y.as_strided((3, 2), (1, 4), 1)
        if self.way == "written":
            rows.mul_(2)
        return rows.sum() if self.way == "inside" else y.sum()


@pytest.mark.parametrize("way", ["inside", "beyond", "written"])
def test_a_view_by_strides_of_what_has_others_is_the_recorded_one_or_an_error(way):
    """The tensor comes with its columns first in memory."""
    model, x = Strided(way), torch.randn(2, 4)
    trace = record(model, (x,), {})
    verify(trace, model, (x,), {})
    node = next(node for node in trace.nodes if node.target == STRIDED_VIEW)
    y = model.linear(x).detach()
    y = y[:, :2] if way == "beyond" else y
    moved = y.mT.contiguous().mT
    if way == "inside":
        assert torch.equal(strided_view(moved, *node.args[1:]), strided_view(y, *node.args[1:]))
        return
    with pytest.raises(
        UsageError, match=r"as_strided: expected a tensor of shape .* with strides \(4, 1\).*contiguous"
    ):
        strided_view(moved, *node.args[1:])


def test_who_asks_for_a_recording_is_not_in_it():
    """Of a model made of torch's modules alone the caller's line was in every node, so two calls gave two fingerprints."""
    model, inputs = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), (torch.ones(2, 4),)
    first = record(model, inputs, {})
    second = record(model, inputs, {})
    assert first.fingerprint == second.fingerprint
    assert {node.source for node in first.nodes} == {""}


@pytest.mark.matrix(2)
@pytest.mark.parametrize("name", ["gpt2", "t5", "lstm", "convnet"])
def test_json_round_trip_keeps_every_field(name):
    model, (args, kwargs) = zoo.build(name)
    trace = record(model, args, kwargs)
    again = Trace.from_json(trace.to_json())
    assert again == trace
    assert again.fingerprint == trace.fingerprint
    assert record(model, args, kwargs).to_json() == trace.to_json()


def test_fx_graph_computes_the_same():
    model, (args, kwargs) = zoo.build("llama")
    graph = to_fx(record(model, args, kwargs))
    outputs = torch.fx.Interpreter(model, graph=graph).run(*(v for v in kwargs.values()))
    expected = model(**kwargs)
    assert torch.equal(outputs[0], expected.loss)
    assert torch.equal(outputs[1], expected.logits)


def test_a_meta_model_costs_nothing_and_gives_the_same_trace():
    model, (args, kwargs) = zoo.build("gpt2")
    trace = record(model, args, kwargs)
    meta = model.to("meta")
    assert record(meta, args, {key: value.to("meta") for key, value in kwargs.items()}) == trace


@pytest.mark.matrix(3)
@pytest.mark.parametrize("name", ["gpt2", "bert", "unet", "convnet", "t5"])
def test_saved_bytes_equal_those_of_a_real_run(name):
    model, (args, kwargs) = zoo.build(name)
    trace = record(model, args, kwargs)
    saved = {storage for node in trace.nodes for storage in node.saved}
    own = {p.untyped_storage().data_ptr() for p in (*model.parameters(), *model.buffers())}
    real = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            real[storage.data_ptr()] = (storage.nbytes(), tensor)  # keeps the storage alive, so addresses stay unique
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        output = replay(trace, model, args, kwargs)
    assert output is not None
    assert sum(trace.storages[storage] for storage in saved) == sum(size for size, _ in real.values())


def test_flops_are_those_of_torchs_counter():
    from torch.utils.flop_counter import FlopCounterMode

    model, (args, kwargs) = zoo.build("unet")
    trace = record(model, args, kwargs)
    with FlopCounterMode(display=False) as counter:
        model(*args, **kwargs)
    assert sum(node.flops for node in trace.nodes) == counter.get_total_flops() > 0


class Effects(nn.Module):
    """Writes in place, into slices, through views, into buffers; switches grad mode and autocast."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scale", torch.ones(6))
        self.table = torch.arange(6.0)
        self.extras = {"shift": torch.full((6,), 0.5)}

    def forward(self, batch):
        x = batch["x"]
        self.calls += 1
        self.scale = self.scale * 0.5
        hidden = self.linear(x)
        mask = torch.zeros(x.shape[0], 6)
        mask[:, 2:] = 1.0
        view = mask[:, :1]
        view.fill_(0.25)
        with torch.no_grad():
            norm = hidden.norm()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            low = self.linear(hidden)
        y = (hidden * mask + self.table + self.extras["shift"]).relu_()
        return {"y": (y * self.scale).T, "pair": (norm, low.float()), "n": 3}


def test_effects_modes_and_tensor_attributes():
    model, args = Effects(), ({"x": torch.randn(4, 6)},)
    trace = record(model, args)
    verify(trace, model, args)
    kinds = [node.kind for node in trace.nodes]
    assert NodeKind.SET_ATTR in kinds
    writers = {node.target for node in trace.nodes if node.mutates}
    assert {"_operator.setitem", "torch.Tensor.fill_", "torch.Tensor.relu_"} <= writers
    assert not trace.node("norm").grad_enabled
    assert [node.autocast.dtype for node in trace.nodes if node.autocast] == ["bfloat16"]
    assert {"table", "extras..'shift'"} <= {node.target for node in trace.nodes if node.kind is NodeKind.GET_ATTR}
    assert trace.output.unflatten(trace.output_leaves)["n"] == 3


@dataclasses.dataclass
class Pair:
    left: torch.Tensor
    right: list


class Nested(nn.Module):
    def forward(self, pair, scale=2.0, *, flags=()):
        return Pair(pair.left * scale, [pair.right[0].T, (pair.left, None, "text", flags)])


def test_nested_inputs_and_outputs():
    model = Nested()
    args, kwargs = (Pair(torch.ones(2, 3), [torch.ones(4, 5)]),), {"flags": (True, 2)}
    trace = record(model, args, kwargs)
    got = replay(trace, model, args, kwargs)
    assert isinstance(got, Pair)
    assert torch.equal(got.left, torch.full((2, 3), 2.0))
    assert got.right[1][1:] == (None, "text", (True, 2))


def test_tied_parameters_are_one_state():
    model, (args, kwargs) = zoo.build("tied")
    names = [spec.names for spec in record(model, args, kwargs).state]
    assert ("embed.weight", "head.weight") in names


def test_module_calls_span_their_nodes():
    model, (args, kwargs) = zoo.build("gpt2")
    trace = record(model, args, kwargs)
    (block,) = [call for call in trace.calls if call.fqn == "transformer.h.1"]
    inside = {trace.calls[node.call].fqn for node in trace.nodes[block.first : block.last]}
    assert inside <= {name for name, _ in model.named_modules() if name.startswith("transformer.h.1")}
    assert block.class_name == "GPT2Block"
    assert trace.calls[block.parent].fqn == "transformer"


def test_leaf_modules_are_called_whole():
    model, (args, kwargs) = zoo.build("unet")
    trace = record(model, args, kwargs, leaf_modules=("down1", "up2"))
    verify(trace, model, args, kwargs)
    assert [node.target for node in trace.nodes if node.kind is NodeKind.CALL_MODULE] == ["down1", "up2"]
    whole = record(model, args, kwargs)
    assert sum(node.flops for node in trace.nodes) == sum(node.flops for node in whole.nodes)


def test_nothing_of_the_model_changes():
    model, (args, kwargs) = zoo.build("convnet")
    before = {name: (id(value), value.clone()) for name, value in (*model.named_parameters(), *model.named_buffers())}
    state = torch.random.get_rng_state()
    record(model, args, kwargs)
    assert torch.equal(torch.random.get_rng_state(), state)
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        assert id(value) == before[name][0]
        assert torch.equal(value, before[name][1])


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x):
        if self.inner(x).sum() > 0:
            return x
        return -x


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Custom(nn.Module):
    def __init__(self):
        super().__init__()
        self.square = Squarer()

    def forward(self, x):
        return self.square(x) + 1


class Squarer(nn.Module):
    def forward(self, x):
        return Square.apply(x)


class Raises(nn.Module):
    def forward(self, x):
        return x @ torch.ones(3, 3)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (Branch(), ["the model itself", "test_tracer_record.py:", "values of a tensor"]),
        (nn.Sequential(Raises()), ["module '0' (Raises)", "test_tracer_record.py:", "RuntimeError"]),
    ],
    ids=["branch", "model raises"],
)
def test_failures_name_module_line_and_a_way_out(model, expected):
    with pytest.raises(TraceError) as caught:
        record(model, (torch.ones(2, 2),))
    for part in [*expected, "what to do:"]:
        assert part in str(caught.value)


class Routed(nn.Module):
    """Sends each row to one of two experts, as its first element says: shapes inside depend on values."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.register_buffer("rows", torch.zeros(()))

    def forward(self, x):
        out = torch.zeros_like(x)
        self.rows += x.shape[0]
        for i, expert in enumerate(self.experts):
            index = ((x[:, 0] > 0).long() == i).nonzero().squeeze(1)
            out = out.index_add(0, index, expert(x[index]))
        return {"out": out, "count": len(self.experts), "same": x}


class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.routed = nn.ModuleList(Routed() for _ in range(2))

    def forward(self, x):
        x = self.first(x)
        for routed in self.routed:
            found = routed(x)
            x = found["out"].relu_() + found["same"]
        return x


@pytest.mark.parametrize("rows", [6, 1_000_000], ids=["small", "large"])
def test_what_depends_on_values_becomes_a_leaf(rows):
    model = Router()
    trace = record(model, (torch.randn(rows, 4, device="cpu" if rows < 100 else "meta"),))
    leaves = [node for node in trace.nodes if node.kind is NodeKind.CALL_MODULE]
    assert [node.target for node in leaves] == ["routed.0", "routed.1"]
    assert trace.node("routed_0_out").spec.shape == (rows, 4)
    assert [trace.node(name).target for name in leaves[1].mutates] == ["routed.1.rows"]
    assert sum(trace.storages[storage] for storage in leaves[0].saved) > 4 * rows * 4
    if rows < 100:
        verify(trace, model, (torch.randn(rows, 4),))


class Tabled(nn.Module):
    """Depends on values, and has a tensor that is neither a parameter nor a buffer."""

    def __init__(self):
        super().__init__()
        self.weight, self.table = nn.Parameter(torch.ones(4)), torch.arange(4.0)

    def forward(self, x):
        return x * (self.weight * self.table if (x * self.weight).sum() > 0 else self.weight)


def test_what_depends_on_values_may_hold_a_plain_tensor():
    """Its truth was asked, which a tensor of several elements does not have: an error that named the module."""
    trace = record(nn.Sequential(nn.Linear(4, 4), Tabled()), (torch.randn(6, 4),))
    assert [node.target for node in trace.nodes if node.kind is NodeKind.CALL_MODULE] == ["1"]


class Growing(nn.Module):
    def forward(self, x):
        return torch.zeros(int(x.sum()) + x.shape[0] ** 2, requires_grad=True)


class Grows(nn.Module):
    def __init__(self):
        super().__init__()
        self.growing = Growing()

    def forward(self, x):
        return self.growing(x) * 2


def test_shape_rules_say_what_a_run_cannot():
    x = torch.zeros(1 << 21, device="meta")
    with pytest.raises(TraceError, match=r"values of a tensor|grow in proportion"):
        record(Grows(), (x,))
    register_shape_rule(Growing, lambda module, x: torch.empty(7, requires_grad=True))
    try:
        trace = record(Grows(), (x,))
    finally:
        del Growing._smpc_shape_rule
    assert trace.node("mul").spec.shape == (7,)


def test_custom_functions_work_inside_leaf_modules():
    model, args = Custom(), (torch.ones(2, 2),)
    trace = record(model, args, leaf_modules=("square",))
    assert [node.target for node in trace.nodes if node.kind is NodeKind.CALL_MODULE] == ["square"]
    verify(trace, model, args)


def test_marked_modules_are_leaves():
    model, args = Custom(), (torch.ones(2, 2),)
    assert mark_leaf(model.square) is model.square
    assert [node.target for node in record(model, args).nodes if node.kind is NodeKind.CALL_MODULE] == ["square"]


def test_what_nodes_and_traces_remember_is_no_part_of_them():
    trace, fresh = (record(nn.Linear(2, 2), (torch.ones(1, 2),)) for _ in range(2))
    node = trace.nodes[-1]
    assert node.inputs == ("args_0", "weight", "bias")
    assert node == fresh.nodes[-1] == copy.deepcopy(node) == pickle.loads(pickle.dumps(node))
    assert dataclasses.replace(node, args=node.args[:1]).inputs == ("args_0",)
    assert pickle.loads(pickle.dumps(node)).inputs == node.inputs
    calls = []
    assert [trace.remembered("key", lambda: calls.append(0) or 5) for _ in range(3)] == [5, 5, 5]
    assert len(calls) == 1
    assert trace == fresh
    assert trace.to_json() == fresh.to_json()


class FlushesDenormals(nn.Module):
    def __init__(self, on):
        super().__init__()
        self.on, self.linear = on, nn.Linear(4, 4)

    def forward(self, x):
        torch.set_flush_denormal(self.on)
        return self.linear(x)


@pytest.mark.skipif(not torch.set_flush_denormal(False), reason="the CPU has no such mode")
def test_a_forward_that_changes_how_denormal_numbers_are_rounded_is_refused():
    inputs = (torch.ones(2, 4),)
    with pytest.raises(TraceError, match=r"forward changes denormal numbers \(torch.set_flush_denormal\)"):
        record(FlushesDenormals(True), inputs)
    assert 2.0**-1060 * torch.ones((), dtype=torch.float64).item() > 0, "the mode is put back"
    record(FlushesDenormals(False), inputs)


def test_unknown_leaf_modules_are_refused():
    with pytest.raises(TraceError, match="no module called 'absent'"):
        record(nn.Linear(2, 2), (torch.ones(1, 2),), leaf_modules=("absent",))


def test_other_inputs_than_traced_are_refused():
    model = nn.Linear(2, 2)
    trace = record(model, (torch.ones(1, 2),))
    with pytest.raises(TraceError, match="trace again"):
        replay(trace, model, (), {"input": torch.ones(1, 2)})


OPERATIONS = (
    lambda x, y: x + y,
    lambda x, y: 1 - x,
    lambda x, y: 2 ** x.clamp(max=2),
    lambda x, y: x.mul_(0.5),
    lambda x, y: x[:, 1:].sum() * y,
    lambda x, y: torch.cat([x, y], dim=1)[:, :4],
    lambda x, y: F.gelu(x).T.reshape(y.shape),
    lambda x, y: torch.where(x > 0, x, y),
    lambda x, y: torch.stack([x, y]).max(dim=0).values,
    lambda x, y: x.clone().index_fill_(1, torch.tensor([0]), 0.5),
)


class Program(nn.Module):
    """A random straight-line program over a list of values, with a parameter."""

    def __init__(self, steps):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 16).reshape(4, 4))
        self.steps = steps

    def forward(self, x):
        values = [x.clone(), x @ self.weight]
        for operation, left, right in self.steps:
            a, b = values[left % len(values)], values[right % len(values)]
            values.append(OPERATIONS[operation](a, b))
        return values[-1], values[len(values) // 2]


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(OPERATIONS) - 1), st.integers(0, 9), st.integers(0, 9)), max_size=8))
def test_random_programs_replay_bitwise(steps):
    model, x = Program(tuple(steps)), torch.linspace(-2, 2, 16).reshape(4, 4)
    try:
        expected = model(x)
        torch.autograd.backward(
            [t for t in expected if t.requires_grad], [torch.ones_like(t) for t in expected if t.requires_grad]
        )
    except RuntimeError:
        return  # an in-place write on what autograd saved: no program to replay
    trace = record(model, (x,))
    got = replay(trace, model, (x,))
    assert all(torch.equal(a, b) for a, b in zip(flatten(expected)[0], flatten(got)[0], strict=True))


@pytest.mark.long
def test_a_recording_leaves_nothing_behind():
    """What autograd saves of an operation's own result (tanh's) ties the graph into a knot that the collector does not see."""

    def alive():
        gc.collect()
        return [found for found in gc.get_objects() if type(found) in (Recorder, FakeTensor)]

    before = alive()  # what other tests of this process hold
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    record(model, (torch.randn(2, 4),))
    known = {id(found) for found in before}
    assert not [found for found in alive() if id(found) not in known]


def test_autocast_around_the_model_is_as_if_the_model_entered_it():
    class Inside(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 2)

        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                return self.linear(x)

    class Outside(Inside):
        def forward(self, x):
            return self.linear(x)

    inputs = (torch.zeros(4, 3),)
    around = record(Outside(), inputs, autocast=Autocast("cpu", "bfloat16", True))
    within, without = record(Inside(), inputs), record(Outside(), inputs)

    def nodes(trace):
        return [(node.target, node.autocast, node.spec) for node in trace.nodes]

    assert nodes(around) == nodes(within)
    assert nodes(around) != nodes(without)
    assert not torch.is_autocast_enabled("cpu")


class Foreign(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.linear, self.function = nn.Linear(4, 4), function

    def forward(self, x):
        return self.function(self.linear(x))


@pytest.mark.parametrize(
    "function", [lambda x: x * x.detach().numpy().sum(), lambda x: x @ torch.ones(3, 3)], ids=["numpy", "shapes"]
)
def test_what_fails_while_it_is_recorded_may_run_by_itself(function):
    """The error said to check that the model runs by itself, which one of these does."""
    with pytest.raises(
        TraceError,
        match=r"test_tracer_record\.py:\d+: RuntimeError: .* if it fails there, too, .* have the module called whole",
    ):
        record(Foreign(function), (torch.ones(2, 4),))


def test_who_debugs_an_error_of_the_model_finds_the_variables_of_its_functions():
    class Fails(nn.Module):
        def forward(self, x):
            factor = 3
            raise ValueError(factor)

    with pytest.raises(TraceError, match="ValueError: 3") as caught:
        record(nn.Sequential(nn.Linear(2, 2), Fails()), (torch.zeros(1, 2),))
    *_, (frame, _) = traceback.walk_tb(caught.value.__cause__.__traceback__)
    assert frame.f_locals["factor"] == 3


def test_an_error_that_somebody_keeps_does_not_end_a_generator_that_it_came_through():
    def counts():
        for count in range(3):
            try:
                yield count
            except KeyError as error:
                kept.append(error)

    class Fails(nn.Module):
        def forward(self, x):
            next(going)
            going.throw(KeyError("from outside"))
            raise TraceError("the model's own") from kept[0]

    kept, going = [], counts()
    with pytest.raises(TraceError, match="own"):
        record(Fails(), (torch.zeros(1, 2),))
    assert list(going) == [2]
