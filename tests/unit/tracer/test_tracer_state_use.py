"""Which parameters and buffers a trace uses and writes."""

import torch
from torch import nn

from smpc.tracer import record
from smpc.tracer.state.state_use import StateUse


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
