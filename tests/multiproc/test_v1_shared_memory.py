"""A buffer, or an attribute, in the memory of a trained parameter: one rank's optimizer would write into it, and no other rank's would."""

import pytest
import torch
from executor_harness import run_workers
from torch import nn

import smpc.v1 as smp
from smpc.errors import SmpcError
from smpc.fsdp import FSDPConfig, prepare

CONFIGS = {
    "stages": {"pipeline_parallel_degree": 2},
    "slices": {"tensor_parallel_degree": 2, "tensor_parallel_plan": "auto", "prescaled_batch": True, "ddp": True},
    "parts": {"ddp": True, "fully_shard": True},
}


class Reads(nn.Module):
    """Uses the embedding's values again, by another tensor."""

    def __init__(self, kind):
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        if kind == "buffer":
            self.register_buffer("again", self.first.weight.data)
        else:
            self.again = self.first.weight.data if kind == "attribute" else nn.Parameter(self.first.weight.data[:3])

    def forward(self, x):
        return torch.tanh(self.last(torch.tanh(self.first(x)))) @ self.again.t()


@smp.step
def train(model, x):
    loss = model(x).square().mean()
    model.backward(loss)
    return loss


def work(rank, folder, config, kind):
    smp.init(config)
    with pytest.raises(SmpcError, match=r"in the same: on another rank|which shares the memory of first.weight"):
        train(smp.DistributedModel(Reads(kind)), torch.ones(4, 6))


@pytest.mark.long
@pytest.mark.parametrize("kind", ["buffer", "parameter", "attribute"])
@pytest.mark.parametrize("name", CONFIGS)
def test_other_tensors_in_the_memory_of_a_parameter_are_refused(tmp_path, name, kind):
    run_workers(work, 2, tmp_path, CONFIGS[name], kind)


def prepares(rank, folder, kind):
    with pytest.raises(SmpcError, match=r"in the same: on another rank"):
        prepare(Reads(kind), FSDPConfig.read({}), "fp32")


@pytest.mark.long
@pytest.mark.parametrize("kind", ["buffer", "attribute"])
def test_a_prepared_model(tmp_path, kind):
    run_workers(prepares, 2, tmp_path, kind)
