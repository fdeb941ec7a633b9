"""`shard_optimizer_state` with real replicas: the same training, bit by bit, with a share of the state on each rank."""

import copy
import itertools

import pytest
import torch
from executor_harness import run_workers
from precision_jobs import Job, differences, optimizer_of, whole

import smpc.v1 as smp
from smpc.errors import CheckpointError

STEPS = 5
CONFIGS = {
    "fp32": ({}, {}),
    "fp16": (
        {"fp16": True},
        {"static_loss_scale": None, "dynamic_loss_scale": True, "init_scale": 2.0**20, "scale_window": 2},
    ),
    "bf16": ({"bf16": True}, {}),
}


def state_bytes(job):
    """Of this rank's optimizer state and masters; counts of steps, which are a few bytes, left out."""
    own = job.optimizer.local_state_dict(gather_if_shard=False)["state"].values()
    return sum(value.nbytes for items in own for key, value in items.items() if key != "step")


def train(topology, kind, shard, optimizer, distributed=True):
    config, options = CONFIGS[kind]
    job = Job(topology, {**config, "shard_optimizer_state": shard}, optimizer, distributed, **options)
    losses, overflows = [], []
    for step in range(STEPS):
        loss, _ = job.step(step, max_norm=0.5)
        losses.append(loss)
        overflows.append(job.optimizer.overflow)
    return job, losses, overflows


def resume_masters(job, path):
    """Only masters and the loss scale come back; the optimizer's state stays as it is."""
    smp.save_checkpoint(path, "a", model=job.model, optimizer=job.optimizer)
    saved = copy.deepcopy(job.optimizer.local_state_dict(gather_if_shard=False))
    for step in (10, 11):
        job.step(step)
    now = copy.deepcopy(job.optimizer.local_state_dict(gather_if_shard=False))
    assert now["loss_scaler"] != saved["loss_scaler"]
    smp.resume_from_checkpoint(path, load_sharded_optimizer_state=False)
    found = job.optimizer.local_state_dict(gather_if_shard=False)
    assert found["loss_scaler"] == saved["loss_scaler"]
    for name, items in found["state"].items():
        for key, value in items.items():
            expected = saved if key == "master" else now
            assert torch.equal(value, expected["state"][name][key]), (name, key)


def overflow_on_one_rank(job):
    """Gradients of the last rank alone are not finite, as averaging would never leave them: still nobody steps."""
    scale = job.optimizer.loss_scale
    job.forward_backward(12)
    if smp.rank() == smp.size() - 1:
        for parameter in job.model.local_parameters():
            parameter.grad.view(-1)[-1] = torch.nan
    before = [parameter.detach().clone() for parameter in job.model.local_parameters()]
    assert float(job.optimizer.clip_master_grads(1.0)) == -1.0
    job.optimizer.step()
    assert job.optimizer.overflow
    assert job.optimizer.loss_scale == scale / 2
    assert all(map(torch.equal, before, job.model.local_parameters()))


def compare(rank, folder, topology, kinds):
    found = {}
    for kind in kinds:
        job, losses, overflows = train(topology, kind, False, optimizer_of)
        expected, all_bytes = whole(job), state_bytes(job)
        smp.shutdown()
        job, sharded_losses, sharded_overflows = train(topology, kind, True, optimizer_of)
        assert torch.equal(torch.stack(sharded_losses), torch.stack(losses))
        assert sharded_overflows == overflows
        assert any(overflows) == (kind == "fp16")
        assert not all(overflows)
        own = whole(job)
        wrong = [differences(a, b) for a, b in zip(own, expected, strict=True)]
        gathered = job.optimizer.local_state_dict()["state"]
        held = [name for name, _ in job.model.local_named_parameters()]
        assert sorted(gathered) == sorted(held)
        before = copy.deepcopy(job.optimizer.local_state_dict(gather_if_shard=False))
        assert before["_smp_is_sharded"]  # it lacks what others own
        assert set(before["state"]) < set(gathered)
        for loaded in copy.deepcopy([job.optimizer.state_dict(), job.optimizer.local_state_dict(), before]):
            job.step(9)
            job.optimizer.load_state_dict(loaded)
            after = job.optimizer.local_state_dict(gather_if_shard=False)["state"]
            assert after.keys() == before["state"].keys()
            assert [differences(after[name], before["state"][name]) for name in after] == [[]] * len(after)
        found[kind] = wrong, state_bytes(job), all_bytes
        if kind == "fp16":
            resume_masters(job, str(folder / "checkpoint"))
            overflow_on_one_rank(job)
        smp.shutdown()
    return found


@pytest.mark.long
@pytest.mark.parametrize(
    ("topology", "kinds"),
    [
        ((2, 1, 2), ["fp32", "fp16"]),
        pytest.param((1, 1, 4), list(CONFIGS), marks=pytest.mark.slow),
        pytest.param((1, 2, 2), list(CONFIGS), marks=pytest.mark.slow),
    ],
)
def test_results_are_the_same_bits_and_state_is_shared_out(tmp_path, topology, kinds):
    pp, tp, rdp = topology
    found = run_workers(compare, pp * tp * rdp, tmp_path, topology, kinds)
    for kind in kinds:
        shares = [each[kind][1] for each in found]
        assert [each[kind][0] for each in found] == [[[], []]] * len(found)
        if pp == 1:  # all ranks hold the same parameters, or slices of them
            average = sum(each[kind][2] for each in found) / len(found) / rdp
            assert min(shares) > 0
            assert sum(shares) <= average * len(found) * 1.001
        else:  # stages are of different sizes; the ranks of one share its state
            stages = {}
            for each in found:
                stages.setdefault(each[kind][2], []).append(each[kind][1])
            assert all(sum(own) == whole_stage for whole_stage, own in stages.items())


def alone(rank, folder):
    """Only replica 0 asks for state of all ranks: an error, and no hang."""
    job = Job((1, 1, 3), {"shard_optimizer_state": True, "checkpoint_timeout": 2.0})
    job.step(0)
    if smp.rdp_rank() == 0:
        with pytest.raises(CheckpointError, match="state_dict must be called on all 3 ranks"):
            job.optimizer.state_dict()
    smp.barrier()
    smp.shutdown()


def balance(rank, folder):
    """Bytes of this rank, of a model with many parameters of different sizes."""
    smp.init({"pipeline_parallel_degree": 1, "ddp": True, "fp16": True, "shard_optimizer_state": True})
    torch.manual_seed(0)
    sizes = [3 + 7 * i % 41 for i in range(60)]
    layers = torch.nn.Sequential(*[torch.nn.Linear(a, b) for a, b in itertools.pairwise(sizes)])
    model = smp.DistributedModel(layers)
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters()))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    own = optimizer.local_state_dict(gather_if_shard=False)["state"]
    smp.shutdown()
    alone(rank, folder)
    count = sum(parameter.numel() for parameter in layers.parameters())
    return sum(value.nbytes for items in own.values() for key, value in items.items() if key != "step"), 12 * count


@pytest.mark.long
def test_equal_shares_and_a_state_dict_on_one_replica_alone(tmp_path):
    found = run_workers(balance, 3, tmp_path)
    total = found[0][1]
    assert sum(share for share, _ in found) == total
    assert max(share for share, _ in found) <= 1.001 * total / 3


def norms_over_owners(rank, folder, topology):
    """LAMB takes norms of parameters, of slices, and of all gradients."""

    def lamb(parameters):
        return smp.optimizers.FusedLamb(parameters, lr=0.01, max_grad_norm=0.3)

    losses = []
    for shard in (False, True):
        _, found, _ = train(topology, "bf16", shard, lamb)
        losses.append(torch.stack(found).tolist())
        smp.shutdown()
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("topology", [(1, 2, 2), (2, 1, 2)])
def test_an_optimizer_that_takes_norms(tmp_path, topology):
    for plain, sharded in run_workers(norms_over_owners, 4, tmp_path, topology):
        assert sharded == pytest.approx(plain, rel=1e-4)
