"""Steps that did not train leave the gradients of ranks that share a sequence as they were."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from smpc.executor.replicas.context_sums import ContextSums


@pytest.mark.parametrize("layout", [torch.strided, torch.sparse_coo])
def test_a_step_that_did_not_train_leaves_gradients_as_they_were(layout):
    parameter = nn.Parameter(torch.zeros(3))
    hooks = ContextSums([parameter], SimpleNamespace(size=4, process_group=None), None)
    parameter.grad = torch.arange(3.0).to_sparse(layout=layout) if layout is torch.sparse_coo else torch.arange(3.0)
    for _ in range(2):
        hooks.start_of_step()
        assert parameter.grad.to_dense().tolist() == [0.0, 0.25, 0.5]
        hooks.did_not_train()
        assert parameter.grad.to_dense().tolist() == [0.0, 1.0, 2.0]
