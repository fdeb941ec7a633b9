"""State of a model on two processes: saved, loaded, gathered."""

import pytest
import torch
from executor_harness import run_workers
from v1_harness import AROUND, batches, feed, make_model, start, train_step

import smpc.v1 as smp
from smpc.errors import CheckpointError, UsageError


def save_and_load(rank, folder, by_hand):
    path = str(folder / "checkpoint.pt")
    module, model, optimizer, kwargs = start(by_hand=by_hand)
    data = batches(kwargs)

    def step(ids):
        optimizer.zero_grad()
        loss = train_step(model, feed(ids), 1.0)["loss"].reduce_mean()
        optimizer.step()
        return loss

    with pytest.raises(UsageError, match="partitioned by the first step"):
        model.local_state_dict()
    step(data[0])
    smp.save({"model": model.local_state_dict(), "optimizer": optimizer.local_state_dict()}, path)
    full = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    gathered = model.state_dict(gather_to_rank0=True)
    assert bool(gathered) == (rank == 0)
    if rank == 0:
        smp.save(full, path, partial=False)
    smp.barrier()
    expected = [step(ids) for ids in data[1:]]
    state = model.state_dict()

    def check(load):
        load()
        assert all(torch.equal(a, b) for a, b in zip(expected, [step(ids) for ids in data[1:]], strict=True))
        assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())

    def load(partial, **options):
        loaded = smp.load(path, partial=partial)
        model.load_state_dict(loaded["model"], **options)
        optimizer.load_state_dict(loaded["optimizer"])

    check(lambda: load(True))
    check(lambda: load(True, same_partition_load=True))
    check(lambda: load(False))
    # In a new session, before the first step: loaded when the model is partitioned.
    for partial in (True, False):
        smp.shutdown()
        module, model, optimizer, kwargs = start(by_hand=by_hand)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.zero_()
        check(lambda partial=partial: load(partial))
    swapped = smp.load(f"{path}_{1 - rank}_0", partial=False)
    model.load_state_dict(swapped["model"])
    optimizer.load_state_dict(swapped["optimizer"])
    broken = dict(smp.load(path)["model"])
    key = next(key for key in broken if broken[key] is not True)
    broken[key] = broken[key][1:]
    broken["more"] = torch.ones(1)
    before = model.state_dict()
    with pytest.raises(CheckpointError, match=r"(?s)unexpected: more.*shape of "):
        model.load_state_dict(broken)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    return list(full["model"])


@pytest.mark.long
@pytest.mark.matrix(1)
@pytest.mark.parametrize("by_hand", [None, AROUND], ids=["auto", "by hand"])
def test_save_and_load(tmp_path, by_hand):
    keys, _ = run_workers(save_and_load, 2, tmp_path, by_hand)
    assert keys == list(make_model()[0].state_dict())
    assert sorted(path.name for path in tmp_path.glob("*check*")) == [
        "checkpoint.pt",
        "checkpoint.pt_0_0",
        "checkpoint.pt_1_0",
    ]


def late_gather(rank, folder):
    _, model, optimizer, kwargs = start(config={"checkpoint_timeout": 100.0})
    train_step(model, feed(batches(kwargs)[0]), 1.0)
    others = (model.state_dict, optimizer.state_dict), (model.state_dict, model.cpu)
    for calls in others:
        with pytest.raises(
            CheckpointError, match=r"same calls, in the same order; found state_dict on rank 0, .* on rank 1"
        ):
            calls[rank]()
    assert model.state_dict(gather_to_rank0=True).keys() == (model.module.state_dict().keys() if rank == 0 else set())
    if rank == 0:
        object.__setattr__(smp.state.cfg, "checkpoint_timeout", 1.0)  # of the call alone that waits in vain
        with pytest.raises(CheckpointError, match=r"(?s)state_dict must be called on all 2 ranks .* within 1 s"):
            model.state_dict()
    smp.barrier()
    return True


@pytest.mark.long
def test_gathering_on_some_ranks_only_or_other_things_is_an_error(tmp_path):
    assert run_workers(late_gather, 2, tmp_path) == [True, True]
