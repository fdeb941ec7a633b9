"""Values whose sizes depend on data: recorded without a question where nobody asks, and trained to the bits of one process."""

import parity
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from smpc.compile import compile_model
from smpc.tracer import NodeKind, record, verify
from smpc.tracer.environment.reachable_values import places_in
from smpc.tracer.input_guards import Answers


class Model(nn.Module):
    """Layers, and a loss at the end; both are functions."""

    def __init__(self, loss, inner=None):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.loss, self.inner = loss, inner

    def forward(self, x, mask):
        for layer in self.layers:
            x = layer(x).tanh()
        return {"loss": self.loss(x, mask)}


def batch(seed=0):
    """Four microbatches of two rows; how much of the mask is true differs."""
    torch.manual_seed(seed)
    x = torch.randn(8, 5, 8)
    mask = torch.arange(5) < torch.tensor([5, 2, 1, 3, 4, 4, 0, 1])[:, None]
    return (x, mask), {}


def rows_of_positive(x, mask):
    return x[x.detach().sum(dim=-1) > 0].square().sum() + x[0, 0].sum()


def random_mask(x, mask):
    return x.masked_select(torch.rand(x.shape) > 0.5).square().sum()


def classes(x, mask):
    return F.cross_entropy(x[mask], (x.detach().argmax(-1) % 3)[mask], reduction="sum")


def positions(x, mask):
    rows, columns = mask.nonzero(as_tuple=True)
    chosen = x[rows, columns] * 2
    chosen += 1
    return chosen.transpose(0, 1).logsumexp(dim=1).sum() + (torch.where(mask)[0] * 0.5).sum()


def written(x, mask):
    x = x.clone()
    x[mask] = x[mask] * 3
    return x.sum()


def chosen_twice(x, mask):
    chosen = x[mask]
    return chosen[chosen[:, 0] > 0].sum() + torch.cat([chosen, x[0]]).mean()


LOSSES = (rows_of_positive, classes, positions, written, chosen_twice)


@pytest.mark.parametrize("loss", LOSSES)
def test_microbatches_may_differ_in_sizes_that_nobody_asks_for(loss):
    model, inputs = Model(loss), batch()
    compilation = compile_model(model, inputs, pipeline_parallel_degree=2, microbatches=4)
    assert not compilation.trace.guards
    assert not any(node.kind is NodeKind.CALL_MODULE for node in compilation.trace.nodes)
    verify(compilation.trace, model, *parity.split(inputs, 4)[1])
    parity.assert_same(parity.run_eager(model, inputs, 4), parity.run_loopback(model, compilation, inputs))


def test_a_random_mask_has_a_size_of_its_own_in_each_run():
    model, inputs = Model(random_mask), batch()
    trace = record(model, *inputs)
    assert not trace.guards
    for seed in range(3):
        torch.manual_seed(seed)
        verify(trace, model, *inputs)


def shape(x, mask):
    chosen = x[mask]
    return chosen.sum() / chosen.shape[0]


def rows(x, mask):
    return sum(row.prod() for row in x[mask] if row.shape[0])


def reshaped(x, mask):
    return x.masked_select(mask.unsqueeze(-1)).view(-1, 4, 2).sum(dim=2).max()


@pytest.mark.parametrize("loss", [shape, rows, reshaped])
def test_python_that_asks_for_a_size_gets_it_with_a_guard(loss):
    (x, mask), _ = batch()
    trace = record(Model(loss), (x, mask))
    verify(trace, Model(loss), (x, mask))
    assert [(guard.expected[0][0], guard.size) for guard in trace.guards] == [(160 if loss is reshaped else 20, "#0")]
    meta = x.to("meta"), mask.to("meta")
    assert record(Model(loss), meta, answers=Answers.of(trace)) == trace


def upper_triangle(x, mask):
    rows, columns = torch.ones(x.shape[1], x.shape[1]).triu(1).nonzero(as_tuple=True)
    return (x[:, rows] - x[:, columns]).square().sum() / rows.shape[0]


def test_a_size_that_depends_on_sizes_alone_is_known():
    (x, mask), _ = batch()
    trace = record(Model(upper_triangle), (x, mask))
    verify(trace, Model(upper_triangle), (x, mask))
    assert not trace.guards
    assert record(Model(upper_triangle), (x.to("meta"), mask.to("meta")), answers=Answers.of(trace)) == trace


class Experts(nn.Module):
    """Asks for a value that is known, then for sizes that are not: it is called whole, and the question before is no guard."""

    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, mask):
        if mask.any():
            x = x * 2
        out = torch.zeros_like(x)
        for expert, chosen in ((self.one, x[..., 0] > 0), (self.other, x[..., 0] <= 0)):
            out[chosen] = expert(x[chosen])
        return out


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.experts, self.last = nn.Linear(8, 8), Experts(), nn.Linear(8, 8)

    def forward(self, x, mask):
        x = self.last(self.experts(self.first(x), mask))
        return x if mask.sum() > 0 and mask.shape[0] == 8 else -x


def test_modules_that_are_called_whole_stay_so_and_other_ranks_record_the_same():
    """A rank without inputs asked what only earlier attempts had asked, and took the answers of other questions for it."""
    model, inputs = Mixture(), batch()
    trace = record(model, *inputs)
    assert [node.target for node in trace.nodes if node.kind is NodeKind.CALL_MODULE] == ["experts"]
    assert [guard.expected for guard in trace.guards] == [True]
    meta = tuple(tensor.to("meta") for tensor in inputs[0])
    assert record(model, meta, answers=Answers.of(trace)) == trace


class Selecting(nn.Module):
    """Cannot be called whole: how many rows it returns depends on values."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(x[x[..., 0] > 0.1])


class Selected(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.selecting, self.last = nn.Linear(8, 8), Selecting(), nn.Linear(8, 8)

    def forward(self, x, mask):
        return {"loss": self.last(self.selecting(self.first(x))).square().mean()}


def test_a_module_that_cannot_be_called_whole_returns_a_value_of_unknown_size():
    model, inputs = Selected(), batch()
    compilation = compile_model(model, inputs, pipeline_parallel_degree=2, microbatches=4)
    parity.assert_same(parity.run_eager(model, inputs, 4), parity.run_loopback(model, compilation, inputs))
    meta = tuple(tensor.to("meta") for tensor in parity.split(inputs, 4)[0][0])
    assert record(model, meta, answers=Answers.of(compilation.trace)) == compilation.trace


class Speech(nn.Module):
    """As Hugging Face's models do it: labels without their padding, and lengths as tensors."""

    def __init__(self, reduction, flat, listed):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.reduction, self.flat, self.listed = reduction, flat, listed

    def forward(self, x, labels):
        for layer in self.layers:
            x = layer(x).tanh()
        mask = labels >= 0
        lengths = torch.full(x.shape[:1], x.shape[1])
        targets, target_lengths = (labels.masked_select(mask), mask.sum(-1)) if self.flat else (labels, mask.sum(-1))
        if self.listed:
            lengths = lengths.shape[0] * [x.shape[1]]
        log_probs = F.log_softmax(x, dim=-1).transpose(0, 1)
        loss = F.ctc_loss(log_probs, targets, lengths, target_lengths, blank=0, reduction=self.reduction)
        return {"loss": loss.sum()}


@pytest.mark.parametrize(
    ("reduction", "flat", "listed"), [("mean", True, False), ("sum", False, False), ("none", True, False)]
)
def test_ctc_loss_takes_lengths_that_are_tensors(reduction, flat, listed):
    torch.manual_seed(0)
    model = Speech(reduction, flat, listed)
    labels = torch.randint(1, 8, (4, 3))
    labels[torch.arange(3) >= torch.tensor([3, 1, 2, 1])[:, None]] = -100
    inputs = (torch.randn(4, 9, 8), labels), {}
    compilation = compile_model(model, inputs, pipeline_parallel_degree=2, microbatches=2)
    assert not compilation.trace.guards
    parity.assert_same(parity.run_eager(model, inputs, 2), parity.run_loopback(model, compilation, inputs))
    [loss] = [node for node in compilation.trace.nodes if node.target.endswith("ctc_loss")]
    tables = [compilation.trace.storages[storage] for storage in loss.saved]
    assert 4 * 2 * 9 * (2 * (6 if flat else 3) + 1) in tables  # [rows, frames, 2 S + 1] floats, S labels at most


def test_notes_of_smpc_about_a_tensor_are_no_places_that_may_change():
    """A plan whose ranks share experts and tensors could not run: tensors were noted as slices after experts, and recorded between."""
    tensor = torch.zeros(1)
    tensor.scale, tensor._smpc_slice_of = 2.0, object()
    assert [place.read() for place in places_in(tensor)] == [2.0]
