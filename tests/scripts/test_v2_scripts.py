"""`v2_train.py` on some ranks, saved in all kinds and resumed on others: every loss is that of one process in plain PyTorch."""

import argparse
import dataclasses
import functools
import itertools
import warnings

import pytest
import torch
import v2_train
from checkpoint_harness import run_ranks, values_of

import smpc

STEPS, SAVED = 4, 2


def ranks(rank, channel, arguments):
    smpc.alias()
    return v2_train.main(arguments)


def run(size, folder, *arguments):
    found = values_of(run_ranks(size, ranks, folder, [str(each) for each in arguments]))
    assert all(losses == found[0] for losses in found)
    return found[0]


@functools.cache
def reference(family, delayed, samples, balancing=None):
    """Losses of one process, which has so many batches in each step."""
    smpc.alias()
    import smpc.v2 as tsm

    given = {"family": family, "delayed": delayed, "fsdp": 0, "offload": False, "kind": "", "balancing": balancing}
    tsm.init()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # sinkhorn tells what it changes
            model = v2_train.make(argparse.Namespace(**given), tsm)
    finally:
        tsm.state.reset()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step, count in enumerate(samples):
        optimizer.zero_grad()
        total = 0.0
        for number in range(count):
            ids = v2_train.batch(step, number)
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()  # of each by itself: losses that routers join have no part in its scale
            total += loss.item()
        for parameter in model.parameters():
            parameter.grad /= count
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(total / count)
    return losses


@dataclasses.dataclass(frozen=True)
class Ranks:
    """How a model is divided: the number of ranks, and degrees."""

    size: int = 2
    shard: int = 2
    tensor: int = 1
    context: int = 1
    expert: int = 1

    @property
    def arguments(self):
        degrees = zip(v2_train.DEGREES, (self.shard, self.tensor, self.context, self.expert), strict=True)
        return [text for name, degree in degrees for text in (f"--{name.replace('_', '-')}", str(degree))]

    @property
    def samples(self):
        return self.size // (self.tensor * self.context)


SHARDS, WHOLE = Ranks(), Ranks(shard=0)
TENSOR, CONTEXT, EXPERT = Ranks(shard=0, tensor=2), Ranks(context=2), Ranks(expert=2)
WIDE = Ranks(size=4, shard=2, tensor=2)  # beside FSDP
ALL = Ranks(size=4, tensor=2, context=2)
FLAGS = ("is_async", "delayed", "offload")


def check(folder, family, fsdp, kind, first, second, flags=(), balancing=None):
    """Losses of a run of some ranks, and of one of others that goes on from its checkpoint."""
    given = ["--family", family, "--fsdp", fsdp, "--kind", kind, "--folder", folder / "checkpoint"]
    given += [f"--{flag.replace('_', '-')}" for flag in flags] + (["--balancing", balancing] if balancing else [])
    trained = run(first.size, folder, *given, *first.arguments, "--steps", SAVED)
    resumed = run(second.size, folder, *given, *second.arguments, "--steps", STEPS, "--resume")
    samples = (first.samples,) * SAVED + (second.samples,) * (STEPS - SAVED)
    wanted = reference(family, "delayed" in flags, samples, balancing)
    torch.testing.assert_close(trained + resumed, wanted, rtol=1e-5, atol=0)


@pytest.mark.matrix(1)
@pytest.mark.parametrize(
    ("family", "fsdp", "kind", "first", "second", "flags"),
    [
        ("llama", 1, "sharded", TENSOR, CONTEXT, FLAGS),
        ("gpt_neox", 2, "full", SHARDS, WHOLE, ("offload",)),
        ("mixtral", 1, "local", SHARDS, SHARDS, ()),
        ("llama", 2, "local", SHARDS, SHARDS, ("is_async", "delayed")),
    ],
)
def test_losses_are_those_of_one_process(family, fsdp, kind, first, second, flags, tmp_path):
    check(tmp_path, family, fsdp, kind, first, second, flags)


def cases():
    """Every family, FSDP, kind and division of the model, each resumed on another; what is left rotates."""
    ways = [SHARDS, TENSOR, CONTEXT, WIDE]
    flags = itertools.cycle([FLAGS, ("delayed",), ("is_async", "offload"), ("offload",), ("is_async", "delayed"), ()])
    for family, fsdp, kind in itertools.product(v2_train.FAMILIES, (1, 2), ("full", "sharded", "local")):
        for number, first in enumerate(ways):
            second = first if kind == "local" else ways[(number + 1) % len(ways)]
            yield pytest.param(family, fsdp, kind, first, second, next(flags), id=f"{family}-{fsdp}-{kind}-{number}")


@pytest.mark.slow
@pytest.mark.parametrize(("family", "fsdp", "kind", "first", "second", "flags"), list(cases()))
def test_every_division_of_a_model(family, fsdp, kind, first, second, flags, tmp_path):
    check(tmp_path, family, fsdp, kind, first, second, flags)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("balancing", "fsdp", "kind", "flags"),
    [
        ("aux_loss", 1, "full", FLAGS),
        ("aux_loss", 2, "sharded", ("offload",)),
        ("sinkhorn", 1, "sharded", ("delayed",)),
        ("sinkhorn", 2, "full", ("is_async",)),
        ("balanced", 1, "local", ("is_async", "offload")),
        ("balanced", 2, "local", FLAGS),
        ("none", 1, "sharded", ("is_async",)),
        ("none", 2, "full", ("delayed", "offload")),
    ],
)
def test_every_way_to_balance_experts(balancing, fsdp, kind, flags, tmp_path):
    second = EXPERT if kind == "local" else SHARDS
    check(tmp_path, "mixtral", fsdp, kind, EXPERT, second, flags, balancing)


@pytest.mark.slow
@pytest.mark.parametrize(("fsdp", "kind"), [(1, "full"), (2, "sharded")])
def test_four_ranks_go_on_from_others(fsdp, kind, tmp_path):
    check(tmp_path, "llama", fsdp, kind, ALL, WIDE, ("delayed", "offload"))


@pytest.mark.long
def test_a_replica_is_loaded_from_fewer_shards(tmp_path):
    check(tmp_path, "llama", 2, "sharded", Ranks(size=4), Ranks(size=4, shard=4))
