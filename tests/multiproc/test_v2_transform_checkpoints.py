"""Checkpoints of transformed models on real ranks: other arrangements of ranks, and plain PyTorch, go on from them."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoint_harness import run_ranks, values_of
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from transformed import (
    BOTH,
    EXPERTS,
    SHARED,
    STEPS,
    WHOLE,
    WITH_CONTEXT,
    WITH_TENSOR,
    batch,
    build,
    loss_of_model,
    reference,
    slow,
    train,
    wrapped,
)

import smpc.v2 as tsm
from smpc.errors import CheckpointError
from smpc.v2.distributed.checkpoint.state_dict_loader import load
from smpc.v2.distributed.checkpoint.state_dict_saver import save
from smpc.v2.distributed.checkpoint.state_dict_utils import SMStateDictType, init_optim_state, sm_state_dict_type


def options(kind, loading):
    return StateDictOptions(full_state_dict=True, cpu_offload=not loading) if kind == "full" else StateDictOptions()


def trains_and_saves(rank, channel, family, degrees, fsdp, kind, path):
    tsm.init(degrees)
    model = wrapped(tsm.transform(build(family)), fsdp, use_orig_params=kind == "full")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = train(model, loss_of_model, range(2), optimizer)
    if kind == "local":
        with sm_state_dict_type(model, SMStateDictType.SM_LOCAL_STATE_DICT):
            found = model.state_dict(), optimizer.state_dict()
    else:
        found = get_state_dict(model, optimizer, options=options(kind, False))
    save({"model": found[0], "optimizer": found[1], "step": 2}, checkpoint_id=place(path, kind))
    return losses


def place(path, kind):
    return (
        f"{path}/{tsm.state.rank}" if kind == "local" else f"{path}/tp{tsm.state.tp_rank}" if kind == "apart" else path
    )


def resumes(rank, channel, family, degrees, fsdp, kind, path):
    tsm.init(degrees)
    torch.manual_seed(5)
    model = wrapped(tsm.transform(build(family, seed=5)), fsdp, use_orig_params=kind == "full")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if kind == "local":
        init_optim_state(optimizer, skip_empty_param=True)
        with sm_state_dict_type(model, SMStateDictType.SM_LOCAL_STATE_DICT):
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 0}
            load(state, checkpoint_id=place(path, kind))
            model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    else:
        found = get_state_dict(model, optimizer, options=options(kind, True))
        state = {"model": found[0], "optimizer": found[1], "step": 0}
        load(state, checkpoint_id=place(path, kind))
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=options(kind, True),
        )
    return train(model, loss_of_model, range(state["step"], STEPS), optimizer)


@pytest.mark.matrix(1)
@pytest.mark.parametrize(
    ("kind", "family", "first", "second", "num_last"),
    [
        ("sharded", "mixtral", (2, EXPERTS, 1), (2, WHOLE, 1), 2),
        ("full", "llama", (2, WHOLE, 1), (2, WHOLE, 1), 2),
        slow("sharded", "mixtral", (2, WHOLE, 2), (2, EXPERTS, 2), 2),
        ("sharded", "llama", (4, SHARED, 1), (2, WHOLE, 1), 2),
        slow("sharded", "gpt_neox", (2, WHOLE, 1), (4, SHARED, 1), 2),
        slow("sharded", "llama", (4, SHARED, 2), (4, BOTH, 2), 1),
        slow("full", "gpt_neox", (4, SHARED, 2), (2, WHOLE, 2), 2),
        slow("sharded", "mixtral", (4, SHARED, 2), (2, WHOLE, 2), 2),
        slow("full", "mixtral", (4, SHARED, 2), (2, WHOLE, 2), 2),
        slow("full", "mixtral", (2, WHOLE, 2), (4, SHARED, 2), 2),
        slow("full", "mixtral", (4, SHARED, 1), (4, BOTH, 2), 1),
        slow("full", "mixtral", (2, EXPERTS, 2), (2, EXPERTS, 1), 2),
        slow("full", "mixtral", (2, EXPERTS, 1), (2, WHOLE, 1), 2),
        slow("sharded", "mixtral", (4, WITH_TENSOR, 1), (2, WITH_CONTEXT, 2), 1),
        slow("sharded", "listed", (2, EXPERTS, 2), (2, WHOLE, 2), 2),
        slow("sharded", "listed", (4, WITH_TENSOR, 2), (4, BOTH, 2), 1),
        slow("full", "listed", (2, EXPERTS, 2), (2, WHOLE, 1), 2),
        slow("full", "listed", (2, WHOLE, 1), (2, EXPERTS, 2), 2),
        slow("sharded", "mixtral", (4, WITH_TENSOR, 2), (4, {**WITH_TENSOR, "context_parallel_degree": 2}, 1), 1),
        slow("apart", "llama", (4, SHARED, 1), (4, SHARED, 1), 2),
        slow("local", "llama", (4, SHARED, 1), (4, SHARED, 1), 2),
    ],
)
def test_checkpoints_of_slices_are_resumed(kind, family, first, second, num_last, tmp_path):
    path = str(tmp_path / "c")
    size, *how = first
    trained = values_of(run_ranks(size, trains_and_saves, tmp_path, family, *how, kind, path))[0]
    size, *how = second
    resumed = values_of(run_ranks(size, resumes, tmp_path, family, *how, kind, path))[0]
    torch.testing.assert_close(trained + resumed, reference(family, 2, loss_of_model, num_last), rtol=1e-5, atol=0)


def train_plainly(model, optimizer, steps):
    """Losses of one process in plain PyTorch."""
    losses = []
    for step in steps:
        optimizer.zero_grad()
        found = [loss_of_model(model, batch(step, sample)) for sample in range(2)]
        (sum(found) / 2).backward()
        optimizer.step()
        losses.append(sum(loss.item() for loss in found) / 2)
    return losses


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["sharded", "full"])
@pytest.mark.parametrize(
    ("family", "size", "how"),
    [
        *(("mixtral", *each) for each in ((4, (SHARED, 1)), (4, (SHARED, 2)), (2, (EXPERTS, 1)), (2, (EXPERTS, 2)))),
        ("listed", 2, (EXPERTS, 2)),
    ],
)
def test_plain_torch_goes_on_from_checkpoints_and_is_gone_on_from(family, size, how, kind, tmp_path):
    path, other, wanted = str(tmp_path / "c"), str(tmp_path / "d"), reference(family, 2, loss_of_model)

    trained = values_of(run_ranks(size, trains_and_saves, tmp_path, family, *how, kind, path))[0]
    model = build(family, seed=7)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    torch.testing.assert_close(trained + train_plainly(model, optimizer, range(2, STEPS)), wanted, rtol=1e-5, atol=0)

    model = build(family)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    trained = train_plainly(model, optimizer, range(2))
    found = get_state_dict(model, optimizer)
    dcp.save({"model": found[0], "optimizer": found[1], "step": 2}, checkpoint_id=other)
    resumed = values_of(run_ranks(size, resumes, tmp_path, family, *how, kind, other))[0]
    torch.testing.assert_close(trained + resumed, wanted, rtol=1e-5, atol=0)


def full_state(model, optimizer):
    """The full state dict of rank 0, flat; the others have nothing."""
    found = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    assert tsm.state.rank == 0 or found == ({}, {})
    return copy.deepcopy(found)


def passes_rank_0s_state_on(rank, channel, degrees, fsdp, family):
    """Of rank 0's state after a step: shapes, and what is another in a model, beside the first, that all ranks have loaded it into."""
    tsm.init(degrees)
    states, alive = [], []
    for seed in (0, 5):
        model = wrapped(tsm.transform(build(family, seed)), fsdp, use_orig_params=True)
        alive.append(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        train(model, loss_of_model, range(1), optimizer)
        if seed:
            chosen = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
            set_model_state_dict(model, copy.copy(states[0][0]), options=chosen)
            set_optimizer_state_dict(model, optimizer, copy.copy(states[0][1]), options=chosen)
        states.append(full_state(model, optimizer))
    dist.barrier()
    if rank:
        return None
    (model, optimizer), (again, optimizer_again) = states
    moments, moments_again = (
        {n: s["exp_avg"] for n, s in each["state"].items()} for each in (optimizer, optimizer_again)
    )
    return [
        (
            {name: list(value.shape) for name, value in first.items()},
            [n for n in first if not torch.equal(first[n], second[n])],
        )
        for first, second in ((model, again), (moments, moments_again))
    ]


@pytest.mark.parametrize(
    ("family", "degrees", "fsdp"),
    [
        pytest.param("llama", SHARED, 1, marks=pytest.mark.long),
        *(slow("mixtral", degrees, fsdp) for degrees in (SHARED, EXPERTS) for fsdp in (0, 1, 2)),
        *(slow("listed", EXPERTS, fsdp) for fsdp in (0, 2)),
    ],
)
def test_a_full_state_dict_of_rank_0_is_loaded_on_all_ranks(family, degrees, fsdp, tmp_path):
    found, *_ = values_of(run_ranks(4, passes_rank_0s_state_on, tmp_path, degrees, fsdp, family))
    model = build(family)
    wanted = {name: list(value.shape) for name, value in model.state_dict().items()}
    moments = {name: shape for name, shape in wanted.items() if name in dict(model.named_parameters())}
    assert found == [(wanted, []), (moments, [])]


def loads_a_part(rank, channel, path):
    tsm.init(WHOLE)
    model = wrapped(tsm.transform(build("llama")), 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = get_state_dict(model, optimizer)
    with pytest.raises(CheckpointError, match="Size mismatch"):
        load({"model": found[0]}, checkpoint_id=f"{path}/tp0")
    return True


@pytest.mark.slow
def test_a_part_of_the_slices_is_not_loaded_as_the_whole(tmp_path):
    path = str(tmp_path / "c")
    values_of(run_ranks(4, trains_and_saves, tmp_path, "llama", SHARED, 1, "apart", path))
    assert all(values_of(run_ranks(2, loads_a_part, tmp_path, path)))
