"""Expert parallelism in training scripts where ranks do not do the same: programs give way, ranks fail, some have errors."""

import os
from functools import partial

import pytest
import torch
import torch.distributed as dist
from executor_harness import Launch, run_workers
from mixtures import MB, batch_of, made, train_step
from torch import nn

import smpc.v1 as smp
from smpc.errors import PeerError, StepError, TransportError
from smpc.executor.collectives import TensorGroup, sum_over
from smpc.sharding.whole_parameters import WholeParameters, sum_together


@smp.step
def look(model, batch):
    """An evaluation that records gradients and never uses them."""
    return model(**batch).loss


def begin(**config):
    smp.init({"expert_parallel_degree": 2, "microbatches": MB, "ddp": True} | config)
    return smp.DistributedModel(made("by hand"))


def of_length(length, part=0):
    batch = batch_of(0, part)
    return {key: value[:, :1].expand(-1, length).contiguous() for key, value in batch.items()}


def evicted(rank, folder):
    """Pipelines of which one meets ever new lengths, more than it keeps programs of."""
    model = begin(pipeline_parallel_degree=2, program_cache_size=2)
    lengths = [4, 5, 6, 7, 4, 5] if smp.rdp_rank() else [4] * 6
    found = [look(model, of_length(length)).reduce_mean().item() for length in lengths]
    found.append(train_step(model, of_length(lengths[-1])).reduce_mean().item())
    smp.shutdown()
    return found


@pytest.mark.long
def test_what_is_known_of_a_step_function_outlives_its_programs(tmp_path):
    """A rank whose program is new took an evaluation for training, and others did not: StepError, after an eviction alone."""
    found = run_workers(evicted, 4, tmp_path)
    model = made("by hand")
    for rank, losses in enumerate(found):
        lengths = [4, 5, 6, 7, 4, 5, 5] if rank // 2 else [4] * 7
        for loss, length in zip(losses, lengths, strict=True):
            parts = [{key: v.chunk(MB)[i] for key, v in of_length(length).items()} for i in range(MB)]
            expected = sum(model(**part).loss.item() for part in parts) / MB
            assert loss == pytest.approx(expected, rel=1e-5)


calls = []


@smp.step
def look_and_fail(model, batch):
    """Rank 1 fails when no token of the step is left to travel."""
    loss = model(**batch).loss
    calls.append(loss)
    if smp.rank() == 1 and len(calls) == MB:
        raise ValueError("of my own")
    return loss


def fail(rank, folder):
    """Rank 0 hears of it in its next step."""
    model = begin()
    look_and_fail(model, batch_of(0, rank))
    try:
        look_and_fail(model, batch_of(1, rank))
    except PeerError as error:
        print(f"found: {error}", flush=True)
        os._exit(0)


def test_a_rank_that_has_failed_is_named_at_the_start_of_the_next_step(tmp_path):
    """What ranks of a group tell each other there was outside of what watches for failures: an error of gloo's, without a name."""
    (status, log), (failed, _) = Launch(fail, 2, tmp_path).wait()
    assert (status, failed) == (0, 1), log
    found = log.split("found: ")[1]
    assert "rank 1 failed" in found
    assert "ValueError: of my own" in found


def end_between_steps(rank, folder, config):
    """The last rank ends where no other waits for it yet, as one whose data has run out."""
    model = begin(**config)
    train_step(model, batch_of(0, smp.data_rank()))
    if rank == dist.get_world_size() - 1:
        os._exit(0)
    try:
        train_step(model, batch_of(1, smp.data_rank()))
    except TransportError as error:
        print(f"found: {error}", flush=True)
        os._exit(0)


@pytest.mark.parametrize(
    ("size", "config"),
    [
        (2, {}),
        (2, {"expert_parallel_degree": 1}),
        (2, {"expert_parallel_degree": 1, "context_parallel_degree": 2}),
        pytest.param(4, {"pipeline_parallel_degree": 2}, marks=pytest.mark.long),
    ],
)
def test_a_rank_that_has_ended_between_steps_is_named(tmp_path, size, config):
    """Others had gloo's error, which names nobody."""
    *others, _ = Launch(end_between_steps, size, tmp_path, config).wait()
    for status, log in others:
        assert status == 0, log
        assert f"rank {size - 1}: no answer; process " in log.split("found: ")[1]


def overflow(rank, folder):
    group = TensorGroup.of(dist.group.WORLD)
    grads = [torch.full((3,), 40000.0, dtype=torch.float16), torch.full((2, 2), -40000.0, dtype=torch.float16)]
    sum_together(grads, partial(sum_over, group=group), divided_by=2)
    module = nn.Module()
    module.scale = nn.Parameter(torch.ones((), dtype=torch.float16))
    module.scale.grad = torch.full((), 40000.0, dtype=torch.float16)
    WholeParameters([module], [dist.group.WORLD]).average()
    return [*grads, module.scale.grad]


def test_averages_in_half_precision_do_not_pass_through_their_sum(tmp_path):
    for grads in run_workers(overflow, 2, tmp_path):
        assert grads[0].tolist() == [40000.0] * 3
        assert grads[1].tolist() == [[-40000.0] * 2] * 2
        assert grads[2].item() == 40000.0


def differ(rank, folder, config, wrong):
    """Ranks `wrong` call another function; then all go on, where no other rank had to be told."""
    model = begin(**config)
    batch = batch_of(0, smp.data_rank())
    train_step(model, batch)
    said = ""
    try:
        (look if rank in wrong else train_step)(model, batch)
    except (StepError, PeerError) as error:
        said = f"{type(error).__name__}: {error}"
    if "PeerError" in said or config.get("context_parallel_degree"):
        torch.save(said, folder / f"{rank}.pt")
        os._exit(0)
    loss = train_step(model, batch).reduce_mean().item()
    smp.shutdown()
    return said, loss


@pytest.mark.long
def test_an_error_that_all_ranks_have_agreed_on_ends_no_job(tmp_path):
    """All replicas are in the group: none waits, and none is told."""
    config = {"pipeline_parallel_degree": 2}
    found = run_workers(differ, 4, tmp_path, config, [2, 3])
    assert all(said.startswith("StepError: step function") for said, _ in found)


@pytest.mark.long
def test_an_error_of_some_ranks_is_told_to_those_that_would_wait(tmp_path):
    """Experts inside of a context-parallel group, whose ranks agree: the other replica would wait for their gradients."""
    Launch(differ, 4, tmp_path, {"context_parallel_degree": 2}, [1]).wait()
    found = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(4)]
    assert all("call the same step function" in said for said in found)
    assert [said.partition(":")[0] for said in found] == ["StepError", "StepError", "PeerError", "PeerError"]
