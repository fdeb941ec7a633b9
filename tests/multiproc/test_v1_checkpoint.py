"""save_checkpoint and resume_from_checkpoint: on any topology, before and after the first step, full and partial."""

import itertools
import random

import numpy as np
import pytest
import torch
from checkpoint_jobs import TOPOLOGIES, Job, resume, same, size
from executor_harness import run_workers

import smpc.v1 as smp
from smpc.checkpoint import Checkpoint, Root
from smpc.errors import CheckpointError, UsageError


def name_of(topology):
    return "x".join(map(str, topology))


def train_and_save(rank, folder, topology, path, half):
    """Some steps, a checkpoint, one more step: the truth for all who resume."""
    job = Job(topology, half=half)
    job.steps(0, 1, *([3, 4, 5, 6] if half else []))
    assert half == (job.optimizer.loss_scale > 1)
    job.save(path, name_of(topology), user_content={"step": 2, "ema": torch.ones(3)})
    state = job.state()
    loss = job.step(2)
    smp.shutdown()
    return state, loss


def resume_each(rank, folder, topology, path, sources, half):
    """Resume from the checkpoint of each source: the first before the first step of this job, the others later."""
    job = Job(topology, seed=2, half=half)
    results = []
    for source in sources:
        content, texts = resume(path, tag=name_of(source))
        assert content["step"] == 2
        assert torch.equal(content["ema"], torch.ones(3))
        reseeded = any("random state does not fit" in text for text in texts)
        assert reseeded == (rank == 0 and source != topology), texts
        generators = repr((torch.get_rng_state().tolist(), random.getstate(), np.random.get_state(legacy=True)))
        if source != topology:  # on all ranks alike
            assert len(set(smp.allgather(generators, smp.WORLD))) == 1
        loss = None
        if not job.model.partitioned:
            loss = job.step(2)
            resume(path, tag=name_of(source))
        state = job.state()
        loss = job.step(2) if loss is None else loss
        results.append((state, loss, job.model.plan_json))
    smp.shutdown()
    return results


def check_pairs(tmp_path, pairs, half=False):
    path = tmp_path / "run"
    truth = {}
    for topology in sorted({source for source, _ in pairs}):
        folder = tmp_path / f"save{name_of(topology)}"
        folder.mkdir()
        truth[topology] = run_workers(train_and_save, size(topology), folder, topology, path, half)[0]
        state = truth[topology][0]
        with Checkpoint.open(Root(path).find(f"{name_of(topology)}_partial")) as checkpoint:  # whole, read without us
            for (kind, name), _ in checkpoint.entries.items():
                if kind in ("model", "optimizer"):
                    assert torch.equal(checkpoint.read(kind, name), state[kind][name]), (topology, kind, name)
    for target in sorted({target for _, target in pairs}):
        folder = tmp_path / f"load{name_of(target)}"
        folder.mkdir()
        sources = [source for source, other in pairs if other == target]
        found = run_workers(resume_each, size(target), folder, target, path, sources, half)
        for results in found:
            for source, (state, loss, plan) in zip(sources, results, strict=True):
                assert same(state, truth[source][0]) == [], (source, target)
                if source == target:
                    assert torch.equal(loss, truth[source][1])
                    with Checkpoint.open(Root(path).find(f"{name_of(source)}_partial")) as checkpoint:
                        assert plan == checkpoint.plan
                else:
                    rel = 1e-2 if half else 1e-5
                    assert loss.item() == pytest.approx(truth[source][1].item(), rel=rel), (source, target)


@pytest.mark.long
def test_what_one_topology_saves_another_resumes(tmp_path):
    check_pairs(tmp_path, [((2, 1, 1), (1, 2, 1)), ((1, 2, 1), (2, 1, 1))])


@pytest.mark.long
def test_masters_and_loss_scale_resume_on_another_topology(tmp_path):
    check_pairs(tmp_path, [((1, 2, 1), (2, 1, 1))], half=True)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_what_any_topology_saves_every_other_resumes(tmp_path):
    check_pairs(tmp_path, list(itertools.product(TOPOLOGIES, TOPOLOGIES)))


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_in_half_precision_what_any_topology_saves_every_other_resumes(tmp_path):
    check_pairs(tmp_path, list(itertools.product(TOPOLOGIES, TOPOLOGIES)), half=True)


def train_parts(rank, folder, topology, path, parts, half):
    """Train in parts of steps, each of which but the last is saved; resumed where there is something."""
    job = Job(topology, dropout=0.2, half=half)
    first = parts[0]
    if first[0]:
        resume(path)
    losses = []
    for part in parts:
        losses += job.steps(*part)
        job.save(path, f"step{part[-1]}")
    state = job.state()
    smp.shutdown()
    return state, losses


@pytest.mark.long
@pytest.mark.parametrize(
    ("topology", "half"),
    [
        ((2, 1, 1), False),
        *(pytest.param(each, False, marks=pytest.mark.slow) for each in TOPOLOGIES if each != (2, 1, 1)),
        *(pytest.param(each, True, marks=pytest.mark.slow) for each in TOPOLOGIES),
    ],
)
def test_with_dropout_two_halves_of_the_steps_are_the_whole_bitwise(tmp_path, topology, half):
    first, second = ((0, 1, 2, 3, 4), (5, 6, 7, 8)) if half else ((0, 1), (2, 3))
    found = []
    for name, jobs in (("whole", [[first, second]]), ("halves", [[first], [second]])):
        losses = []
        for index, parts in enumerate(jobs):
            folder = tmp_path / f"{name}{index}"
            folder.mkdir()
            results = run_workers(train_parts, size(topology), folder, topology, tmp_path / name, parts, half)
            losses += results[0][1]
        found.append((losses, [state for state, _ in results]))
    (whole_losses, whole), (half_losses, halves) = found
    assert torch.equal(torch.stack(whole_losses), torch.stack(half_losses))
    assert [same(a, b) for a, b in zip(whole, halves, strict=True)] == [[]] * len(whole)


def state_dicts(rank, folder, topology):
    """Local and gathered state dicts of a model that is cut both ways, through smp.save and smp.load."""
    job, path = Job(topology), str(folder / "model.pt")
    job.step(0)
    state = job.state()
    gathered = job.model.state_dict(gather_to_rank0=True), job.optimizer.state_dict(gather_to_rank0=True)
    assert [bool(found) for found in gathered] == [smp.mp_rank() == 0] * 2
    full = {"model": job.model.state_dict(), "optimizer": job.optimizer.state_dict()}
    smp.save({"model": job.model.local_state_dict(), "optimizer": job.optimizer.local_state_dict()}, path, v3=True)
    if rank == 0:
        smp.save(full, path, partial=False)
    smp.barrier()
    own = f"{smp.pp_rank()}_{smp.tp_rank()}_{smp.rdp_rank()}"
    swapped = f"{path}_{smp.pp_size() - 1 - smp.pp_rank()}_{smp.tp_rank()}_0"  # of another stage
    results = []
    for file, options in [
        (f"{path}_{own}", {}),
        (f"{path}_{own}", {"same_partition_load": True}),
        (swapped, {}),
        (path, {}),
    ]:
        job.step(1)
        job.model.cpu()
        loaded = smp.load(file, partial=False)
        job.model.load_state_dict(loaded["model"], **options)
        job.optimizer.load_state_dict(loaded["optimizer"])
        results.append(same(job.state(), state))
    broken = dict(smp.load(path, partial=False)["model"])
    broken["before.0.weight"] = broken["before.0.weight"][:, 1:]
    with pytest.raises(CheckpointError, match=r"shape of before.0.weight: expected \[24, 16\], found \[24, 15\]"):
        job.model.load_state_dict(broken)
    smp.shutdown()
    return results, state["model"]


def state_dict_of_one(rank, folder):
    job = Job((1, 1, 1))
    job.step(0)
    return job.model.state_dict()


@pytest.mark.long
@pytest.mark.parametrize("topology", [(1, 2, 1), pytest.param((2, 2, 1), marks=pytest.mark.slow)])
def test_state_dicts_gather_and_scatter_slices_and_stages(tmp_path, topology):
    found = run_workers(state_dicts, size(topology), tmp_path, topology)
    assert [results for results, _ in found] == [[[]] * 4] * size(topology)
    (tmp_path / "alone").mkdir()
    [alone] = run_workers(state_dict_of_one, 1, tmp_path / "alone")
    assert {k: v.shape for k, v in found[0][1].items()} == {k: v.shape for k, v in alone.items()}


class Normed(torch.nn.Sequential):
    """Replicas have other running statistics, of their own samples."""

    def __init__(self):
        super().__init__(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))


@smp.step
def squares(model, x):
    loss = model(x).square().mean()
    model.backward(loss)
    return loss


def save_statistics(rank, folder, path, partial):
    smp.init({"ddp": True, "microbatches": 2})
    torch.manual_seed(0)
    model = smp.DistributedModel(Normed())
    torch.manual_seed(rank)
    for _ in range(2):
        squares(model, torch.randn(8, 4) + rank)
    own = [tensor.clone() for tensor in model.get_module().buffers()]
    smp.save_checkpoint(path, tag="a", partial=partial, model=model)
    smp.resume_from_checkpoint(path, partial=partial)
    found = [tensor.clone() for tensor in model.get_module().buffers()]
    smp.shutdown()
    return own, found


@pytest.mark.parametrize("partial", [True, False])
def test_a_checkpoint_has_the_buffers_of_the_first_replica(tmp_path, partial):
    """As plain PyTorch's rank 0 would save them, and as DistributedDataParallel gives them to the others in the next step."""
    (first, *found), (second, other) = run_workers(save_statistics, 2, tmp_path, tmp_path / "run", partial)
    assert not torch.equal(first[0], second[0]), "or this tests nothing"
    for loaded in (*found, other):
        assert all(map(torch.equal, loaded, first))


def read_too_early(rank, folder, path):
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
    torch.manual_seed(0)
    model = smp.DistributedModel(Normed())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    squares(model, torch.ones(4, 4))
    optimizer.step()
    smp.save_checkpoint(path, tag="a", model=model, optimizer=optimizer)
    saved = {key: value.clone() for key, value in model.state_dict().items()}
    smp.shutdown()

    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
    model = smp.DistributedModel(Normed())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    smp.resume_from_checkpoint(path)
    assert all(torch.equal(model.state_dict()[key], value) for key, value in saved.items())
    for read in (
        optimizer.state_dict,
        lambda: smp.save_checkpoint(path, tag="b", model=model, optimizer=optimizer),
    ):
        with pytest.raises((UsageError, CheckpointError), match="is filled in by the first step"):
            read()
    kept = []
    model.register_post_partition_hook(
        lambda model, optimizer: kept.append({key: value.clone() for key, value in model.state_dict().items()})
    )
    squares(model, torch.ones(4, 4))
    assert optimizer.state_dict()["state"]
    assert all(torch.equal(kept[0][key], value) for key, value in saved.items())
    smp.shutdown()


def test_state_that_the_first_step_fills_in_is_not_read_before(tmp_path):
    """It had the values from before loading, and a checkpoint of it would have lost the training."""
    run_workers(read_too_early, 2, tmp_path, tmp_path / "run")
