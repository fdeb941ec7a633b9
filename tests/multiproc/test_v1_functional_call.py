"""`torch.func.functional_call` in forward: what one process computes, or an error where a block would put its own parameters there."""

import pytest
import torch
from executor_harness import run_workers
from torch import nn
from torch.func import functional_call

import smpc.v1 as smp
from smpc.errors import SmpcError

SHARDED = {"ddp": True, "sharded_data_parallel_degree": 2, "sdp_gradient_clipping": 0.0}
X = torch.linspace(-1, 1, 32, dtype=torch.float64).view(4, 8)


class Scaled(nn.Module):
    """Blocks with weights that are computed anew in each call."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)]).double()
        self.scale = nn.Parameter(torch.full((8,), 1.5, dtype=torch.float64))

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(functional_call(block, {"weight": block.weight * self.scale}, (x,)))
        return x


@smp.step
def train(model, x):
    loss = model(x).square().mean()
    model.backward(loss)
    return loss


def work(rank, folder, is_gathered_by_block):
    smp.init(SHARDED | ({"sdp_param_persistence_threshold": 0} if is_gathered_by_block else {}))
    model = smp.DistributedModel(Scaled())
    if is_gathered_by_block:
        with pytest.raises(
            SmpcError, match=r"expected parameter 'weight' of a .*Linear in its place when its block runs"
        ):
            train(model, X)
        return
    torch.testing.assert_close(train(model, X).reduce_mean(), Scaled()(X).square().mean())


@pytest.mark.long
@pytest.mark.parametrize("is_gathered_by_block", [False, True])
def test_replaced_parameters_of_blocks_in_parts(tmp_path, is_gathered_by_block):
    """The block gathered its own, and the loss was another one, without a word."""
    run_workers(work, 2, tmp_path, is_gathered_by_block)
