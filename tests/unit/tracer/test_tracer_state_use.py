"""Which parameters and buffers a trace uses and writes."""

import pytest
import torch
from torch import nn

from smpc.compile import compile_model
from smpc.errors import PartitionError
from smpc.tracer import record
from smpc.tracer.state.state_use import StateUse, other_forms


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.spare = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.first.weight = self.spare.weight
        self.register_buffer("offset", torch.ones(4))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        h = self.norm(self.first(x) + self.offset)
        if self.training:
            self.seen = self.seen + 1
        return h


def test_what_is_not_used_does_not_count():
    """A plan gives it a stage all the same: `num_batches_tracked` in eval mode was "moved", and the step refused."""
    model, x = Model(), torch.ones(2, 4)
    statistics = {"norm.running_mean", "norm.running_var"}
    shared = {"first.weight", "spare.weight", "first.bias", "norm.weight", "norm.bias", "offset"}
    train = StateUse.of(record(model, (x,)))
    assert train.used == shared | statistics | {"norm.num_batches_tracked", "seen"}
    assert train.written == statistics | {"norm.num_batches_tracked", "seen"}
    evaluation = StateUse.of(record(model.eval(), (x,)))
    assert (evaluation.used, evaluation.written) == (shared | statistics, frozenset())
    whole = StateUse.of(record(model.eval(), (x,), leaf_modules=("norm",)))
    assert whole.written == statistics | {"norm.num_batches_tracked"} <= whole.used
    known = {"norm.num_batches_tracked": (0,), "offset": (1,)}
    now = {"norm.num_batches_tracked": (1,), "offset": (0,), "seen": (0,)}
    assert evaluation.counting(known, now) == {"offset": (0,), "seen": (0,)}
    assert train.counting(known, now) == now


class Forms(nn.Module):
    """A buffer gets another type or shape in every call or in the first one, or for the time of a call."""

    def __init__(self, change):
        super().__init__()
        self.first, self.second, self.change = nn.Linear(4, 4), nn.Linear(4, 4), change
        self.register_buffer("table", torch.ones(4))

    def forward(self, x):
        h = self.first(x)
        self.change(self)
        return self.second((h * self.table.mean()).float())


def to_double(model):
    model.table = model.table.double()


def longer(model):
    model.table = torch.cat([model.table, model.table[:1]])


def longer_once(model):
    if model.table.shape[0] < 6:
        model.table = torch.arange(6.0)


def there_and_back(model):
    model.table = model.table.double()
    model.table = model.table.float() * 2


@pytest.mark.parametrize(
    ("change", "after"), [(to_double, r"float64\[4\]"), (longer, r"float32\[5\]"), (longer_once, r"float32\[6\]")]
)
def test_a_buffer_of_another_shape_or_type_is_refused_in_a_pipeline(change, after):
    """The second step said that ranks had changed it at different times; Python that asked for it gave wrong numbers in the first."""
    said = rf"table: float32\[4\] before the call, {after} after it \(test_tracer_state_use.py:\d+ in the model\)"
    with pytest.raises(PartitionError, match=rf"expected buffers to keep their shapes and types, .*{said}; give them"):
        compile_model(Forms(change), torch.randn(2, 4), pipeline_parallel_degree=2, microbatches=2)
    compile_model(Forms(change), torch.randn(2, 4), pipeline_parallel_degree=1, microbatches=1)


def test_a_buffer_that_has_its_form_again_in_the_end():
    assert not other_forms(record(Forms(there_and_back), (torch.randn(2, 4),)))
    assert not other_forms(record(Model(), (torch.randn(3, 4),)))
