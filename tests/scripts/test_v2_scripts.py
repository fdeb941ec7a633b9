"""`v2_train.py` on two ranks, saved in all kinds and resumed on other degrees: every loss is that of one process in plain PyTorch."""

import argparse
import itertools
import multiprocessing
import multiprocessing.forkserver

import pytest
import torch
import v2_train
from checkpoint_harness import run_ranks, values_of

import smpc

STEPS, SAVED = 4, 2
_IMPORTED = (
    "smpc.v2.delayed_param",
    "smpc.v2.distributed.checkpoint.state_dict_loader",
    "smpc.v2.grad_norm",
    "torch.distributed.checkpoint.state_dict",
    "transformers.models.gpt_neox.modeling_gpt_neox",
    "transformers.models.llama.modeling_llama",
    "transformers.models.mixtral.modeling_mixtral",
)


@pytest.fixture(scope="module", autouse=True)
def server():
    """All ranks are forked from one process that has imported what they need."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(_IMPORTED))
    multiprocessing.forkserver.ensure_running()


def ranks(rank, channel, arguments):
    smpc.alias()
    return v2_train.main(arguments)


def run(size, folder, *arguments):
    found = values_of(run_ranks(size, ranks, folder, [str(each) for each in arguments], timeout=200))
    assert all(losses == found[0] for losses in found)
    return found[0]


def reference(family, delayed, num_ranks):
    """Losses of one process on the batches of all ranks."""
    smpc.alias()
    import smpc.v2 as tsm

    tsm.init()
    try:
        model = v2_train.make(argparse.Namespace(family=family, delayed=delayed, fsdp=0, offload=False, kind=""), tsm)
    finally:
        tsm.state.reset()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        found = []
        for rank in range(num_ranks):
            ids = v2_train.batch(step, rank)
            found.append(model(input_ids=ids, labels=ids).loss)
        mean = sum(found) / num_ranks
        mean.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(mean.item())
    return losses


def check(folder, family, fsdp, kind, is_async, delayed, offload):
    flags = [name for name, on in (("--is-async", is_async), ("--delayed", delayed), ("--offload", offload)) if on]
    given = ("--family", family, "--fsdp", fsdp, "--kind", kind, "--folder", folder / "checkpoint", *flags)
    trained = run(2, folder, *given, "--steps", SAVED, "--hybrid-shard-degree", 2)
    other = 2 if kind == "local" else 0
    resumed = run(2, folder, *given, "--steps", STEPS, "--hybrid-shard-degree", other, "--resume")
    torch.testing.assert_close(trained + resumed, reference(family, delayed, 2), rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("family", "fsdp", "kind", "is_async", "delayed", "offload"),
    [
        ("llama", 1, "sharded", True, True, True),
        ("gpt_neox", 2, "full", False, False, True),
        ("mixtral", 1, "local", False, False, False),
        ("llama", 2, "local", True, True, False),
    ],
)
def test_losses_are_those_of_one_process(family, fsdp, kind, is_async, delayed, offload, tmp_path):
    check(tmp_path, family, fsdp, kind, is_async, delayed, offload)


@pytest.mark.slow
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("delayed", [False, True])
def test_every_combination(delayed, offload, tmp_path):
    for number, case in enumerate(
        itertools.product(v2_train.FAMILIES, (1, 2), ("full", "sharded", "local"), (False, True))
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        check(folder, *case, delayed, offload)


def test_a_replica_is_loaded_from_fewer_shards(tmp_path):
    given = ("--family", "llama", "--fsdp", 2, "--folder", tmp_path / "checkpoint")
    trained = run(4, tmp_path, *given, "--steps", SAVED, "--hybrid-shard-degree", 2)
    resumed = run(4, tmp_path, *given, "--steps", STEPS, "--hybrid-shard-degree", 4, "--resume")
    torch.testing.assert_close(trained + resumed, reference("llama", False, 4), rtol=1e-5, atol=0)
