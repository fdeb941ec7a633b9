"""torch.distributed.checkpoint of a job's model and optimizer: every rank writes what it holds, and anybody loads it."""

import copy
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_harness import peak_of
from checkpoint_jobs import LENGTH, Job, batch, same, size, train_step
from executor_harness import run_workers
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.stateful import Stateful

import smpc.v1 as smp
from smpc.checkpoint import Shard
from smpc.checkpoint.stateful import held
from smpc.errors import CheckpointError


@smp.step
def evaluate(model, x):
    return model(x).sum()


class Both(Stateful):
    """A user's own, which computes with the whole tensors that it asks for."""

    def __init__(self, model):
        self.model = model

    def state_dict(self):
        return {key: value * 1 for key, value in self.model.state_dict().items()}

    def load_state_dict(self, found):
        self.model.load_state_dict(found)


def save(rank, folder, topology, path, half):
    job = Job(topology, half=half)
    job.steps(0, 1, *([3, 4, 5, 6] if half else []))
    dcp.save({"model": job.model, "optimizer": job.optimizer}, checkpoint_id=path)
    before = job.state()
    whole = {"model": before["model"], "optimizer": copy.deepcopy(job.optimizer.state_dict())}
    dcp.save({"both": Both(job.model)}, checkpoint_id=folder / "both")
    job.steps(2)
    dcp.load({"both": Both(job.model)}, checkpoint_id=folder / "both")
    wrong = same({**job.state(), **{key: before[key] for key in ("optimizer", "groups")}}, before)
    smp.shutdown()
    return before, whole, wrong


def load(rank, folder, topology, path, half):
    """Into a job that has made other steps, and into one whose optimizer has made none."""
    found = []
    for steps in (1, 0):
        job = Job(topology, seed=2, half=half)
        if steps:
            job.steps(*range(5, 10))
        else:
            train_step(job.model, batch(5).view(smp.dp_size(), -1, LENGTH)[smp.dp_rank()])
        dcp.load({"model": job.model, "optimizer": job.optimizer}, checkpoint_id=path)
        found.append(job.state())
        smp.shutdown()
    return found


def unequal(found, expected):
    """Paths of numbers and tensors that differ."""
    leaves, structure = torch.utils._pytree.tree_flatten_with_path(expected)
    others, other_structure = torch.utils._pytree.tree_flatten(found)
    assert structure == other_structure
    return [
        torch.utils._pytree.keystr(path)
        for (path, a), b in zip(leaves, others, strict=True)
        if not (torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b)
    ]


@pytest.mark.long
@pytest.mark.parametrize(
    ("origin", "targets", "half"),
    [
        ((1, 2, 2), [(2, 1, 2)], True),
        pytest.param((2, 2, 1), [(1, 2, 1)], False, marks=pytest.mark.slow),
        pytest.param((1, 2, 2), [(1, 1, 1), (4, 1, 1), (2, 2, 1), (1, 1, 4)], False, marks=pytest.mark.slow),
        pytest.param((1, 1, 4), [(1, 1, 1), (2, 1, 2), (1, 2, 1)], True, marks=pytest.mark.slow),
    ],
)
def test_ranks_write_their_own_and_others_load_it(tmp_path, origin, targets, half):
    path = tmp_path / "run"
    results = run_workers(save, size(origin), tmp_path, origin, path, half)
    expected, whole, _ = results[0]
    assert [wrong for _, _, wrong in results] == [[]] * size(origin)
    described = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    pieces = [len(each.chunks) for each in described.values() if isinstance(each, TensorStorageMetadata)]
    assert max(pieces) > 1
    plain = copy.deepcopy(whole)
    for leaf in torch.utils._pytree.tree_leaves(plain):
        if isinstance(leaf, torch.Tensor):
            leaf.fill_(-1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(plain, checkpoint_id=path, no_dist=True)
    assert unequal(plain, whole) == []
    for number, topology in enumerate(targets):
        folder = tmp_path / str(number)
        folder.mkdir()
        for found in run_workers(load, size(topology), folder, topology, path, half):
            assert [same(each, expected) for each in found] == [[], []]


def large(rank, folder):
    """Two layers of 64 MB, sliced for two ranks; what saving and loading takes beside them."""
    smp.init(
        {
            "pipeline_parallel_degree": 1,
            "tensor_parallel_degree": 2,
            "ddp": True,
            "microbatches": 1,
            "checkpoint_timeout": 60.0,
        }
    )
    with smp.tensor_parallelism():
        layers = nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(4)))
    model = smp.DistributedModel(layers)
    own = sum(parameter.nbytes for parameter in model.parameters())
    values = [parameter.detach().double().sum() for parameter in model.parameters()]
    evaluate(model, torch.ones(1, 4096))
    save = peak_of(lambda: dcp.save({"model": model}, checkpoint_id=folder / "run"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    load = peak_of(lambda: dcp.load({"model": model}, checkpoint_id=folder / "run"))
    assert [parameter.detach().double().sum() for parameter in model.parameters()] == values
    gather = peak_of(lambda: model.state_dict())
    smp.shutdown()
    return own, save, load, gather


@pytest.mark.long
def test_no_rank_holds_the_whole(tmp_path):
    for own, save_, load_, gather in run_workers(large, 2, tmp_path):
        print(
            f"share {own / 1e6:.0f} MB: save +{save_ / 1e6:.0f} MB, load +{load_ / 1e6:.0f} MB, gather +{gather / 1e6:.0f} MB"
        )
        one = 4096 * 4096 * 4
        assert own == 2 * one
        assert max(save_, load_) < 2 * one  # a tensor, and what torch.distributed.checkpoint itself takes
        assert gather > 2 * one  # the measure is not blind


def test_a_held_tensor_is_no_tensor_to_compute_with():
    tensor = held([Shard.of("model", "a", torch.ones(2, 3), (4, 3), (2, 0))])
    assert tensor.shape == (4, 3)
    assert "boxes=[([2, 0], [2, 3])]" in repr(tensor)
    with pytest.raises(CheckpointError, match="call state_dict"):
        tensor + 1
