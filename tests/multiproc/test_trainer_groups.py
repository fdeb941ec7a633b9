"""Units in process groups of their own: beside sliced layers, and in sharded checkpoints, under `name@group`."""

import os
import warnings

import pytest
import torch
from support.executor_harness import run_workers
from support.trainer_cases import Block, classifier, dataset, trainer
from torch import distributed, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.utils.data import DataLoader

from smpc import dist
from smpc.composer import Trainer
from smpc.errors import CheckpointError, ConfigError

PLAN = {"model.blocks.*.up": ColwiseParallel(), "model.blocks.*.down": RowwiseParallel()}


def _place(rank, local_size=None):
    size = distributed.get_world_size()
    local_size = local_size or size
    os.environ |= {
        "LOCAL_RANK": str(rank % local_size),
        "LOCAL_WORLD_SIZE": str(local_size),
        "NODE_RANK": str(rank // local_size),
    }
    warnings.simplefilter("ignore")


def _alone_in(model, group, chosen):
    """The first block is a unit over all ranks, and `chosen`, the second or its last layer, one over a group."""
    last = model.model.blocks[1]
    own = last.down if chosen == "layer" else last
    model.model.fsdp_wrap_fn = lambda module: {"process_group": group} if module is own else isinstance(module, Block)
    return model


def _sliced(batch_size, model, fsdp, **options):
    data = dataset()
    replica = {"num_replicas": dist.get_world_size() // 2, "rank": dist.get_global_rank() // 2}
    loader = DataLoader(data, batch_size=batch_size, sampler=dist.get_sampler(data, **replica))
    options = {"max_duration": "4ba", "device": "cpu", "train_dataloader": loader, **options}
    config = {"fsdp": fsdp, "tp": {"tensor_parallel_degree": 2, "layer_plan": PLAN}}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return Trainer(model=model, optimizers=optimizer, parallelism_config=config, **options)


def _apart(world, batch_size, groups, chosen):
    """One process for each of the groups: all with the mean of all gradients, except `chosen` with the mean over its group's ranks."""
    models = [classifier() for _ in groups]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in models]
    data = dataset()
    for batch in range(4):
        for model in models:
            model.zero_grad()
        for members, model in zip(groups, models, strict=True):
            for rank in members:
                rows = list(range(rank, 16, world))
                start = batch % -(-len(rows) // batch_size) * batch_size
                rows = rows[start : start + batch_size]
                (model.loss(model((data.tensors[0][rows],)), (None, data.tensors[1][rows])) / world).backward()
        own = {id(parameter) for model in models for parameter in _chosen(model, chosen).parameters()}
        for same in zip(*(model.parameters() for model in models), strict=True):
            if id(same[0]) in own:
                for members, parameter in zip(groups, same, strict=True):
                    parameter.grad *= world / len(members)
                continue
            total = sum(parameter.grad for parameter in same)
            for parameter in same:
                parameter.grad = total.clone()
        for optimizer in optimizers:
            optimizer.step()
    return [torch.cat([p.detach().reshape(-1) for p in model.parameters()]) for model in models]


def _chosen(model, chosen):
    return model.model.blocks[1].down if chosen == "layer" else model.model.blocks[1]


def _parameters(made):
    return torch.cat([
        (p.full_tensor() if isinstance(p, DTensor) else p).detach().reshape(-1) for p in made.state.model.parameters()
    ])  # fmt: skip


CASES = {  # the group of a unit, and what it means for data-parallel ranks
    "self": ("self", [[0], [1], [2], [3]]),
    "set2": ("set2", [[0], [1], [2], [3]]),
    "set4": ("set4", [[0, 1], [2, 3]]),
    "node": ("node", [[0, 1], [2, 3]]),
    "mod4": ("mod4", [[0, 2], [1, 3]]),
    "local_rank_across_nodes": ("local_rank_across_nodes", [[0, 2], [1, 3]]),
    "pair": (("set2", "mod4"), [[0, 2], [1, 3]]),
    "list": ("list", [[0, 2], [1, 3]]),
}


def beside_slices(rank, folder, names):
    _place(rank, local_size=4)
    lists = [members for members in ((0, 1, 4, 5), (2, 3, 6, 7)) if rank in members]
    found = {}
    for name in names:
        group = list(lists[0]) if name == "list" else CASES[name][0]
        for chosen in ("block", "layer"):
            made = _sliced(2, _alone_in(classifier(), group, chosen), {})
            made.fit()
            found[name, chosen] = _parameters(made)
    return found


def _check_beside_slices(folder, world, names):
    for rank, found in enumerate(run_workers(beside_slices, world, folder, names)):
        for (name, chosen), values in found.items():
            groups = [members for members in CASES[name][1] if members[0] < world // 2]
            expected = _apart(world // 2, 2, groups, chosen)
            own = next(index for index, members in enumerate(groups) if rank // 2 in members)
            torch.testing.assert_close(values, expected[own], rtol=1e-4, atol=2e-6, msg=f"{name} {chosen}")


@pytest.mark.slow
def test_units_by_themselves_beside_slices(tmp_path):
    """Four ranks, in pairs that slice layers together: a group is of those with one slice, and has the values of one process."""
    _check_beside_slices(tmp_path, 4, ["self"])


@pytest.mark.slow
def test_units_in_groups_beside_slices(tmp_path):
    _check_beside_slices(tmp_path, 8, list(CASES))


def refused_beside_slices(rank, folder):
    _place(rank)
    own = {"uneven": [0, 1] if rank < 2 else [2, 3, 4, 5], "parting": [0, 2, 4] if rank % 2 == 0 else [1, 3, 5]}
    own |= {"torn": [0, 1, 2] if rank < 3 else [3, 4, 5], "distances": [0, 1, 2, 3] if rank < 4 else [4, 5]}
    found = {}
    for name, group in own.items():
        try:
            _sliced(2, _alone_in(classifier(), group, "block"), {})
            found[name] = "taken"
        except ConfigError as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def test_groups_that_cannot_be_beside_slices(tmp_path):
    for found in run_workers(refused_beside_slices, 6, tmp_path):
        assert found["parting"] == "taken"  # each is all ranks of one slice
        assert "ConfigError: process_group: expected groups that have all or none of 2 ranks" in found["torn"]
        for name in ("uneven", "distances"):
            assert "ConfigUnsupportedError: process_group: expected groups of one size" in found[name]


SHARDED = {"state_dict_type": "sharded", "sharded_ckpt_prefix_dir": "ba{batch}"}


class Normed(Block):
    """With statistics of its own, if there are some, and dropout."""

    def __init__(self, has_statistics):
        super().__init__()
        self.norm, self.dropout = nn.BatchNorm1d(8) if has_statistics else nn.Identity(), nn.Dropout(0.2)

    def forward(self, x):
        return self.norm(self.dropout(super().forward(x)))


def _normed(group, has_statistics=False):
    model = classifier()
    model.model.blocks[1] = Normed(has_statistics)
    model.model.head.requires_grad_(False)
    return _alone_in(model, group, "block")


def _values(made):
    """What this rank's unit has, whole: parameters, statistics, moments."""
    found = [value for _, value in sorted(made.state.model.state_dict().items())]
    for parameter in made.state.model.parameters():
        found += [value for _, value in sorted(made.state.optimizer.state.get(parameter, {}).items())]
    return torch.cat([(t.full_tensor() if isinstance(t, DTensor) else t).detach().reshape(-1).float() for t in found])


def saved(rank, folder, *how):
    _place(rank)
    options = {"save_folder": str(folder / "run"), "save_interval": "2ba", "max_duration": "2ba", "seed": 1}
    made = trainer(2, model=_normed(*how), fsdp_config=SHARDED, **options)
    made.fit()
    halfway = _values(made)
    made.fit("2ba")
    other = trainer(2, model=_normed(*how), fsdp_config=SHARDED, load_path=str(folder / "run" / "ba2"), seed=7)
    loaded = _values(other)
    other.fit()
    return halfway, loaded, _values(made), _values(other)


def _saved(folder, world, *how):
    """What each rank had when it saved; a run that goes on from there has the bits of one that never stopped."""
    folder.mkdir()
    ranks = run_workers(saved, world, folder, *how)
    for halfway, loaded, end, again in ranks:
        assert torch.equal(loaded, halfway)
        assert torch.equal(again, end)
    return [halfway for halfway, *_ in ranks]


def resumed(rank, folder, path):
    _place(rank)
    found = [_values(trainer(4, model=_normed("self"), fsdp_config=SHARDED, load_path=path))]
    options = {"fsdp_config": SHARDED, "load_path": path}
    trainer(4, model=_normed("set2"), load_ignore_keys=["state/model/model.blocks.1.*", "state/optimizers"], **options)
    for is_strict in (True, False):
        with pytest.raises(CheckpointError, match=r"blocks.1.up.weight as 2 groups have it, the model as 1"):
            trainer(4, model=_normed("set2"), load_strict_model_weights=is_strict, **options)
    for options in ({"save_folder": str(folder)}, {}):
        with pytest.raises(ConfigError, match="state_dict_type: expected sharded, as units"):
            trainer(4, model=_normed("self"), fsdp_config={}, **options).save_checkpoint(str(folder / "whole.pt"))
    return found


@pytest.mark.long
def test_sharded_checkpoints_have_the_values_of_every_group(tmp_path):
    """Two groups of two ranks come back to two groups of one; as one, or in a file, they are refused."""
    values = _saved(tmp_path / "saved", 4, "mod2")
    assert not torch.equal(values[0], values[1])
    (tmp_path / "resumed").mkdir()
    path = str(tmp_path / "saved" / "run" / "ba2")
    for rank, (found,) in enumerate(run_workers(resumed, 2, tmp_path / "resumed", path)):
        assert torch.equal(found, values[rank])


def sliced(rank, folder, path):
    _place(rank)
    made = _sliced(4, _normed("self", True), SHARDED, load_path=path)
    again = made.save_checkpoint(str(folder / "again"))
    return _values(made), _values(_sliced(4, _normed("self", True), SHARDED, load_path=again))


@pytest.mark.long
def test_checkpoints_of_groups_with_and_without_slices(tmp_path):
    values = _saved(tmp_path / "saved", 2, "self", True)
    (tmp_path / "resumed").mkdir()
    path = str(tmp_path / "saved" / "run" / "ba2")
    for rank, found in enumerate(run_workers(sliced, 4, tmp_path / "resumed", path)):
        for each in found:
            assert torch.equal(each, values[rank // 2])
