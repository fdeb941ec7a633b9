"""Gradients of parameters that ranks have whole, summed by whatever sums a tensor."""

import torch

from smpc.executor.measure.spans import LiveBytes
from smpc.partitioner.costs import named_optimizers
from smpc.sharding import whole_parameters
from smpc.sharding.whole_parameters import sum_together


def test_sums_of_many_gradients_take_little_memory(monkeypatch):
    """Copies of all of them were made at once, and once more to divide them."""
    assert (whole_parameters.ALONE, whole_parameters.TOGETHER) == (named_optimizers.ALONE, named_optimizers.TOGETHER)
    monkeypatch.setattr(whole_parameters, "ALONE", 400)
    monkeypatch.setattr(whole_parameters, "TOGETHER", 500)
    sizes = (10, 20, 150, 60, 50, 30, 100, 5)
    grads = [torch.full((size,), 2.0) for size in sizes] + [torch.full((20, 10), 2.0).t()]
    seen = []

    def add(flat):
        seen.append(len(flat))
        return flat.mul_(3)

    with LiveBytes(grads) as counter:
        before = counter.live
        sum_together(grads, add, divided_by=2)
    assert seen == [150, 90, 100, 200, 85]
    assert all(torch.equal(grad, torch.full_like(grad, 3.0)) for grad in grads)
    assert counter.peak - before <= 4 * 200 + 4 * 30
