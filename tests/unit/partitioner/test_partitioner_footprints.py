"""What operations make while they run: found on fake tensors, counted on real ones."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import smpc
from smpc.executor.measure.spans import LiveBytes
from smpc.partitioner.costs.node_costs import CostModel
from smpc.partitioner.graph.trace_graph import build_graph
from smpc.partitioner.memory.footprints import HANDED_ON, footprint
from smpc.partitioner.memory.lifetimes import lifetimes, loss_roots, saved_activations
from smpc.partitioner.memory.memory_by_action import calls_put_off, held_arguments
from smpc.partitioner.memory.peak import working_bytes
from smpc.tracer import record

UNIT = 4 * 64 * 96


class Model(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body = body
        self.first, self.second, self.mixer = nn.Linear(96, 96), nn.Linear(96, 192), nn.Linear(16, 16)

    def forward(self, x):
        return self.body(self, torch.tanh(self.first(x)))  # which saves its result, as Python's frames hold it


def in_place(m, h):
    h = m.second(h)
    h = F.relu(h, inplace=True) * 2  # in a view, which autograd copies for it
    h[:, 0] = 0
    return h.sum()


BODIES = {
    "power of a mean": lambda m, h: (h - 1).square().mean(),
    "softsign": lambda m, h: F.softsign(m.second(h)).abs().sum(),
    "transposed": lambda m, h: F.gelu(m.mixer(h.transpose(1, 2)).transpose(1, 2) + h).pow(3).mean(),
    "heads": lambda m, h: m.first(h.view(4, 16, 4, 24).transpose(1, 2).contiguous().view(4, 16, 96)).std(),
    "broadcast": lambda m, h: (h * h.mean(0, keepdim=True) / h.amax((0, 1))).logsumexp(-1).mean(),
    "entropy": lambda m, h: F.cross_entropy(m.second(h).flatten(0, 1), torch.zeros(64, dtype=torch.long)),
    "own attention": lambda m, h: (torch.softmax(h @ h.transpose(-1, -2) / 9.8, -1) @ h).square().sum(),
    "in place": in_place,
    "noise": lambda m, h: F.alpha_dropout(F.dropout(m.second(h), 0.5), 0.1).var(),
}


def peaks(model, x):
    """Most bytes of a forward and a backward, predicted and alive, without parameters and their gradients of earlier nodes."""
    graph = build_graph(record(model, (x,)))
    trace, positions = graph.trace, graph.compute.tolist()
    state = frozenset(item.storage for item in trace.state)
    held = saved_activations(graph, positions, (), lambda storage: trace.storages[storage], state)
    live = lifetimes(graph, positions, loss_roots(graph), kept=held.kept)
    later = [sum(live.parameters[i:].tolist()) for i in range(len(positions))]
    predicted = [int((held.forward + live.forward).max()), int((working_bytes(held, live) + later).max())]
    parameters = sum(item.spec.num_bytes for item in trace.state)
    with LiveBytes([*model.parameters(), x]) as counter:
        loss = model(x)
        measured = [counter.peak - parameters]
        counter.peak = 0
        loss.backward()
    return predicted, [*measured, counter.peak - parameters]


@pytest.mark.parametrize("name", BODIES)
def test_peaks_are_those_of_a_real_run(name):
    torch.manual_seed(0)
    x = torch.randn(4, 16, 96)
    (forward, backward), (real_forward, real_backward) = peaks(Model(BODIES[name]), x)
    assert forward == pytest.approx(real_forward, rel=0.01)
    assert backward == pytest.approx(real_backward, rel=0.01)


def test_a_record_of_a_call_that_is_put_off_holds_its_argument():
    """A linear layer saves a dense copy of rows with gaps; zero-bubble schedules hold the rows as well, which nobody had counted."""
    trace = record(
        Model(lambda m, h: m.second(m.mixer(h.transpose(1, 2)).transpose(1, 2).contiguous()).sum()),
        (torch.zeros(4, 16, 96),),
    )
    graph = build_graph(trace)
    positions = graph.compute.tolist()
    found = held_arguments(graph, calls_put_off(graph, CostModel(), positions, ()))
    (position,) = [i for i, held in found.items() if held]
    assert trace.nodes[position].inputs[1] == "mixer_weight"
    (held,) = found[position]
    assert held not in trace.nodes[position].saved
    assert trace.nodes[position].saved  # the copy


def of(body, *inputs):
    """The footprints of a function's nodes, by target."""
    trace = record(Model(lambda m, h: body(h)), inputs)
    return {node.target: found for i, node in enumerate(trace.nodes) if (found := footprint(trace, i)) is not None}


def test_a_sum_hands_a_view_of_its_gradient_on_and_a_square_makes_three_values():
    found = of(lambda h: h.square().sum(), torch.zeros(64, 96))
    assert found["torch.Tensor.sum"].gradients[0].num_bytes == HANDED_ON
    assert found["torch.Tensor.sum"].working == 0
    assert (found["torch.Tensor.square"].working, found["torch.Tensor.square"].gradients[0].num_bytes) == (
        3 * UNIT,
        UNIT,
    )


def test_what_is_around_a_step_sees_nothing_of_it():
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(packed.append, lambda item: item):
        trace = record(Model(lambda m, h: F.dropout(h.pow(4), 0.3).sum()), (torch.zeros(8, 96),))
        packed.clear()
        state = torch.get_rng_state()
        found = [footprint(trace, i) for i, node in enumerate(trace.nodes) if node.target == "torch.Tensor.pow"]
        footprint(trace, len(trace.nodes) - 2)
    assert [item.working for item in found] == [3 * 4 * 8 * 96]
    assert not packed
    assert torch.equal(state, torch.get_rng_state())


def test_a_view_of_a_gradient_that_is_laid_out_otherwise_is_a_copy():
    trace = record(Model(lambda m, h: h.view(-1, 4).sum()), (torch.zeros(64, 96),))
    position = next(i for i, node in enumerate(trace.nodes) if node.target == "torch.Tensor.view")
    assert footprint(trace, position).working == 0
    assert footprint(trace, position, stride=(1, 64 * 24)).working == UNIT


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_lstm_keeps_what_its_kernel_keeps(dtype):
    model, x = nn.LSTM(24, 32, num_layers=2).to(dtype), torch.randn(50, 3, 24, dtype=dtype)
    trace = record(model, (x,))
    kept = {storage for node in trace.nodes for storage in node.saved}
    with LiveBytes([*model.parameters(), x]) as counter:
        before = counter.live - x.numel() * x.element_size()
        outputs = model(x)
        _loss = sum(value.sum() for value in (outputs[0], *outputs[1]))
        del outputs  # not every processor has a kernel that keeps them for its backward
        assert sum(trace.storages[s] for s in kept) == pytest.approx(counter.live - before, rel=0.05)


class Tied(nn.Module):
    """An embedding that is the head, too."""

    def __init__(self):
        super().__init__()
        self.embedding, self.middle = nn.Embedding(500, 32), nn.Linear(32, 32)

    def forward(self, ids):
        return F.linear(torch.tanh(self.middle(self.embedding(ids))), self.embedding.weight).logsumexp(-1).mean()


def test_the_gradients_of_a_parameter_that_is_read_twice_are_there_beside_their_sum():
    """The plan had one of the three: of a GPT-2 with few tokens 3% of the peak was missing."""
    model, ids = Tied(), torch.randint(500, (8, 4))
    options = {"pipeline_parallel_degree": 1, "microbatches": 2, "device": "cpu", "optimizer": "sgd"}
    (stage,) = smpc.compile_model(model, ids, **options).plan.stages
    with LiveBytes([*model.parameters(), ids]) as counter:
        for part in ids.chunk(2):
            (model(part) / 2).backward()
    assert stage.peak_memory_bytes == pytest.approx(counter.peak, rel=0.01)
