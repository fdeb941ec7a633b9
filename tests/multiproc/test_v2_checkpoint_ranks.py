"""Checkpoints of several ranks: what FSDP divides, in all kinds, saved by some ranks and loaded by others; failures and kills."""

import os
import random
import shutil
import signal

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoint_harness import KillAt, run_ranks, values_of
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor

from smpc.v2.distributed.checkpoint.async_utils import AsyncCallsQueue
from smpc.v2.distributed.checkpoint.filesystem import DistributedFileSystemWriter
from smpc.v2.distributed.checkpoint.state_dict_loader import load
from smpc.v2.distributed.checkpoint.state_dict_saver import async_save, save
from smpc.v2.distributed.checkpoint.state_dict_utils import SMStateDictType, sm_state_dict_type


def sharded(seed, size):
    """A model with an optimizer after a step; its first dimension, 5, does not divide by the ranks."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    if size > 1:
        fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 3)).square().mean().backward()
    optimizer.step()
    return model, optimizer


def state_of(model, optimizer, step):
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}


def whole(value):
    """Whole tensors, as lists of the same numbers."""
    if isinstance(value, DTensor):
        return value.full_tensor().tolist()
    if isinstance(value, dict):
        return {key: whole(each) for key, each in value.items()}
    return value.tolist() if isinstance(value, torch.Tensor) else value


def saves(rank, channel, path, is_async):
    model, optimizer = sharded(1, channel.size)
    state = state_of(model, optimizer, 7)
    if not is_async:
        save(state, checkpoint_id=path)
        return whole(state)
    queue = AsyncCallsQueue()
    async_save(state, checkpoint_id=path, queue=queue)
    wanted = whole(state)
    for parameter in model.parameters():
        parameter.data.zero_()
    done = []
    while not done:
        done = queue.maybe_finalize_async_calls(blocking=False)
    assert done == [0]
    return wanted


def loads(rank, channel, path, by_torch):
    model, optimizer = sharded(2, channel.size)
    state = state_of(model, optimizer, 0)
    if by_torch:
        dcp.load(state, checkpoint_id=path)
    else:
        load(state, checkpoint_id=path)
    return whole(state)


@pytest.mark.long
@pytest.mark.parametrize("is_async", [pytest.param(False, marks=pytest.mark.slow), True])
def test_other_numbers_of_ranks_load_what_two_saved(is_async, tmp_path):
    path = str(tmp_path / "c")
    wanted, also = values_of(run_ranks(2, saves, tmp_path, path, is_async))
    assert wanted == also
    for size, by_torch in ((3, False), (1, False), (2, True)):
        for found in values_of(run_ranks(size, loads, tmp_path, path, by_torch)):
            assert found == wanted


def goes_on_with_few_rows(rank, channel, path):
    """FSDP1 gives rank 2 nothing of two rows. What is another after another model has loaded the first one's state."""
    states = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        options = {"device_id": torch.device("cpu"), "use_orig_params": True}
        model = FullyShardedDataParallel(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)), **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model(torch.ones(2, 3)).square().mean().backward()
        optimizer.step()
        model_state, optimizer_state = get_state_dict(model, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state}
        if seed == 1:
            save(state, checkpoint_id=path)
        else:
            load(state, checkpoint_id=path)
            found = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
            set_state_dict(model, optimizer, **found)
        full = StateDictOptions(full_state_dict=True)
        model_state, optimizer_state = get_state_dict(model, optimizer, options=full)
        moments = {name: each["exp_avg"] for name, each in optimizer_state["state"].items()}
        states.append(model_state | {f"moment of {name}": value for name, value in moments.items()})
    first, second = states
    return [name for name, value in first.items() if not torch.equal(value, second[name])]


def test_ranks_that_have_nothing_of_a_tensor_load_the_others(tmp_path):
    """torch took the checkpoint for one of an old version, in which it found no groups of parameters."""
    assert values_of(run_ranks(3, goes_on_with_few_rows, tmp_path, str(tmp_path / "c"))) == [[]] * 3


def saves_locally(rank, channel, path):
    model, optimizer = sharded(1, channel.size)
    with sm_state_dict_type(model, SMStateDictType.SM_LOCAL_STATE_DICT):
        save(state_of(model, optimizer, 7 + rank), checkpoint_id=f"{path}/tp0_ep0_fsdp{rank}")
    return whole(state_of(model, optimizer, 0))


def loads_locally(rank, channel, path):
    model, optimizer = sharded(2, channel.size)
    with sm_state_dict_type(model, SMStateDictType.SM_LOCAL_STATE_DICT):
        state = state_of(model, optimizer, 0)
        load(state, checkpoint_id=f"{path}/tp0_ep0_fsdp{rank}")
        model.load_state_dict(state["model"])
    assert state["step"] == 7 + rank
    return whole(state_of(model, optimizer, 0))


def test_each_rank_saves_its_own_part(tmp_path):
    path = str(tmp_path / "c")
    wanted = values_of(run_ranks(2, saves_locally, tmp_path, path))
    found = values_of(run_ranks(2, loads_locally, tmp_path, path))
    assert wanted[0] == found[0]
    assert wanted[1] == found[1]
    outcomes = run_ranks(3, loads_locally, tmp_path, path)
    assert all("CheckpointError" in outcome.classes for outcome in outcomes)
    assert "rank 2: no checkpoint in" in outcomes[0].error


def fails_on_one(rank, channel, path, is_async):
    save({"x": torch.full((4,), 1.0)}, checkpoint_id=path)

    def hook():
        if rank == 1:
            raise OSError(28, "No space left on device", path)

    writer = DistributedFileSystemWriter(path, post_write_hooks=[hook])
    state = {"x": torch.full((4,), 2.0)}
    if not is_async:
        save(state, storage_writer=writer)
    queue = AsyncCallsQueue()
    async_save(state, storage_writer=writer, queue=queue)
    queue.maybe_finalize_async_calls(blocking=True)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_failure_of_one_rank_is_one_of_all(is_async, tmp_path):
    path = str(tmp_path / "c")
    for outcome in run_ranks(2, fails_on_one, tmp_path, path, is_async):
        assert "CheckpointError" in outcome.classes
        assert "rank 1: No space left on device" in outcome.error
    state = {"x": torch.zeros(4)}
    load(state, checkpoint_id=path)
    assert state["x"].tolist() == [1.0] * 4


def disagrees(rank, channel, path):
    save({"x": torch.ones(2), "y": torch.ones(2)}, checkpoint_id=path)
    load({"x": torch.ones(2)} if rank else {"x": torch.ones(2), "y": torch.ones(2)}, checkpoint_id=path)


def test_ranks_with_other_keys_are_told(tmp_path):
    for outcome in run_ranks(2, disagrees, tmp_path, str(tmp_path / "c")):
        assert "rank 1 has no y, which rank 0 has" in outcome.error


def dies(rank, channel, path, is_async, victim, point):
    """Saves step 1, then step 2 over it, in which the victim dies at a call of the checkpoint code into C; how many calls there were."""
    model, optimizer = sharded(1, channel.size)
    save(state_of(model, optimizer, 1), checkpoint_id=path)
    for parameter in model.parameters():
        parameter.data.add_(1.0)
    kill = KillAt(point if rank == victim else None)
    dist.barrier()
    if rank == victim:
        kill.arm()
    if is_async:
        queue = AsyncCallsQueue()
        async_save(state_of(model, optimizer, 2), checkpoint_id=path, queue=queue)
        queue.close()
    else:
        save(state_of(model, optimizer, 2), checkpoint_id=path)
    kill.disarm()
    return kill.count


def goes_on(rank, channel, path):
    """What a job of one process finds, by torch's load, too; it saves step 3 over that."""
    found, plain = loads(rank, channel, path, False), loads(rank, channel, path, True)
    model, optimizer = sharded(3, 1)
    save(state_of(model, optimizer, 3), checkpoint_id=path)
    assert loads(rank, channel, path, True) == whole(state_of(model, optimizer, 3))
    return found, plain, sorted(os.listdir(path))


def check_alive(folder, pick, is_async, calls):
    """Saves until one is killed: afterwards the folder has step 1 or step 2, whole, and takes the next save. Returns the step."""
    killed = False
    while not killed:
        victim = pick.randrange(2)
        path = str(folder / "c")
        before_end = int(
            calls[is_async, victim] * pick.random() ** 2
        )  # more of them late, where the checkpoint is replaced
        point = calls[is_async, victim] - 1 - before_end
        outcomes = run_ranks(2, dies, folder, path, is_async, victim, point)
        killed = outcomes[victim].exitcode == -signal.SIGKILL
        assert killed or outcomes[victim].error is None, outcomes[victim].error
        ((found, plain, names),) = values_of(run_ranks(1, goes_on, folder, path))
        assert found == plain
        is_done = any(outcome.error is None for outcome in outcomes)  # on some rank the save has returned
        assert found["step"] in ((2,) if is_done else (1, 2))
        torch.manual_seed(1)
        model, _ = sharded(1, 1)
        assert found["model"]["1.bias"] == (model[1].bias.detach() + (found["step"] - 1.0)).tolist()
        assert len(names) == 2  # .metadata and the data of one process: nothing of the killed save is left
        shutil.rmtree(path)
    return found["step"]


def rehearse(folder):
    return {
        (is_async, victim): values_of(
            run_ranks(2, dies, folder, str(folder / f"r{is_async}{victim}"), is_async, victim, None)
        )[victim]
        for is_async in (False, True)
        for victim in (0, 1)
    }


@pytest.mark.long
@pytest.mark.parametrize("number", [4, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
def test_kills_while_saving_over_a_checkpoint_lose_nothing(number, tmp_path):
    seed = int(os.environ.get("SMPC_KILL_SEED", "20240"))
    pick, calls = random.Random(seed), rehearse(tmp_path)
    print(f"SMPC_KILL_SEED={seed}; calls to die at, by (is async, rank): {calls}")
    found = {
        is_async: [check_alive(tmp_path, pick, is_async, calls) for _ in range(number // 2)]
        for is_async in (False, True)
    }
    for is_async, steps in found.items():
        kind = "async" if is_async else "sync"
        print(
            f"{len(steps)} kills of {kind} saves: {steps.count(1)} left the older checkpoint, {steps.count(2)} the newer one"
        )
    assert [len(steps) for steps in found.values()] == [number // 2] * 2
