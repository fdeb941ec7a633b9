"""A parameter that modules of several units of FSDP1 share: torch would give each unit one of its own."""

import copy

import torch
from executor_harness import run_workers
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import smpc.v2 as tsm
from smpc.errors import UsageError


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 8), nn.Linear(8, 32, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.embed(ids)).square().mean()


def wrap(rank, folder):
    tsm.init({"hybrid_shard_degree": 2})
    found = []
    for original in (False, True):
        for kinds in ({nn.Embedding}, {Tied}):
            kwargs = {"use_orig_params": original, "device_id": torch.device("cpu")}
            try:
                model = FullyShardedDataParallel(Tied(), auto_wrap_policy=ModuleWrapPolicy(kinds), **kwargs)
                model(torch.arange(32)).backward()
                found.append("")
            except UsageError as error:
                found.append(str(error))
    tsm.state.reset()
    return found


def test_a_parameter_in_several_units_is_refused(tmp_path):
    for apart, together, *others in run_workers(wrap, 2, tmp_path):
        assert "found embed.weight and head.weight, which are one parameter, in several" in apart
        assert together == ""
        assert others == [apart, together]


def wrap_by_hand(rank, folder):
    """Units that a script makes one by one, inside first."""
    tsm.init({"hybrid_shard_degree": 2})
    found = []
    for original in (False, True):
        for names in (("head",), ("embed",), ("embed", "head"), ()):
            model, kwargs = Tied(), {"use_orig_params": original, "device_id": torch.device("cpu")}
            try:
                for name in names:
                    setattr(model, name, FullyShardedDataParallel(getattr(model, name), **kwargs))
                FullyShardedDataParallel(model, **kwargs)(torch.arange(32)).backward()
                found.append("")
            except UsageError as error:
                found.append(str(error))
    tsm.state.reset()
    return found


def test_a_parameter_that_a_unit_made_by_hand_shares_is_refused(tmp_path):
    """Without `use_orig_params` the unit took it for itself, and it was two parameters from then on, without a word."""
    for found in run_workers(wrap_by_hand, 2, tmp_path):
        for head, embed, both, none in (found[:4], found[4:]):
            assert all("which are one parameter, in several" in each for each in (head, embed, both))
            assert none == ""


def shared_with_outside(rank, folder):
    """A unit of the embedding alone; the head, which no unit has, shares its weight. What a backward and an update say."""
    tsm.init({"hybrid_shard_degree": 2})
    model = Tied()
    earlier = torch.optim.SGD(model.parameters(), lr=0.1)
    model.embed = FullyShardedDataParallel(model.embed, device_id=torch.device("cpu"))
    found = []
    for line in (model(torch.arange(32)).backward, earlier.step, lambda: copy.deepcopy(model)):
        try:
            line()
            found.append("")
        except UsageError as error:
            found.append(str(error))
    torch.optim.SGD(model.embed.parameters(), lr=0.1).step()
    tsm.state.reset()
    return found


def test_a_parameter_that_a_module_outside_of_all_units_shares_is_refused(tmp_path):
    """It was two parameters from then on; an optimizer made before the unit trained the one that nothing used."""
    for backward, update, copied in run_workers(shared_with_outside, 2, tmp_path):
        assert "found a gradient of Embedding.weight as it was before" in backward
        assert "found an update of Embedding.weight as it was before" in update
        assert copied.startswith("FullyShardedDataParallel of Embedding: expected not to be copied or pickled")


def clipped_in_fp64(rank, folder):
    tsm.init({"hybrid_shard_degree": 2})
    torch.manual_seed(0)
    model = FullyShardedDataParallel(Tied().double(), device_id=torch.device("cpu"))
    model(torch.arange(32)).backward()
    norm = model.clip_grad_norm_(0.25)
    after = model.clip_grad_norm_(1e9)
    tsm.state.reset()
    return norm, after


def test_fsdp1_clips_gradients_in_fp64(tmp_path):
    """torch takes the norm in fp32, and its own check refuses that."""
    torch.manual_seed(0)
    model = Tied().double()
    model(torch.arange(32)).backward()
    expected = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    for norm, after in run_workers(clipped_in_fp64, 2, tmp_path):
        torch.testing.assert_close(norm, expected, rtol=1e-14, atol=0)
        torch.testing.assert_close(after.item(), min(0.25, expected.item()), rtol=1e-5, atol=0)
