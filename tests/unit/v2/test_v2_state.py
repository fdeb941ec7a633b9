"""`tsm.init` and `tsm.state`: what every rank of a world reads, without communication, against tables made by hand."""

import os
import sys

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import smpc
import smpc.v2 as tsm
from smpc.errors import ConfigError, UsageError


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    monkeypatch.delenv("SM_HP_MP_PARAMETERS", raising=False)
    yield
    tsm.state.reset()
    if dist.is_initialized():
        dist.destroy_process_group()


def on_each_rank(world, config, read):
    """What `read` gives on every rank of a world whose groups do not communicate."""
    found = []
    for rank in range(world):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
        tsm.init(config)
        found.append(read())
        tsm.state.reset()
        dist.destroy_process_group()
    return found


def members(group):
    return None if group is None else dist.get_process_group_ranks(group)


def test_two_replicas_of_two_shards_of_two_slices():
    read = on_each_rank(
        8,
        {"hybrid_shard_degree": 2, "tensor_parallel_degree": 2},
        lambda: (
            tsm.state.tp_rank,
            members(tsm.state.tp_process_group),
            members(tsm.state.rep_rank_process_group),
            tsm.state.ranker.get_rep_rank(tsm.state.rank),
        ),
    )
    assert read == [
        (0, [0, 1], [0, 1, 2, 3], 0),
        (1, [0, 1], [0, 1, 2, 3], 0),
        (0, [2, 3], [0, 1, 2, 3], 0),
        (1, [2, 3], [0, 1, 2, 3], 0),
        (0, [4, 5], [4, 5, 6, 7], 1),
        (1, [4, 5], [4, 5, 6, 7], 1),
        (0, [6, 7], [4, 5, 6, 7], 1),
        (1, [6, 7], [4, 5, 6, 7], 1),
    ]
    groups = on_each_rank(
        8, {"hybrid_shard_degree": 2, "tensor_parallel_degree": 2}, lambda: tsm.state.ranker.get_rep_groups()
    )
    assert groups == [[[0, 4], [1, 5], [2, 6], [3, 7]]] * 8


def test_two_shards_of_two_parts_of_a_sequence_of_two_slices():
    read = on_each_rank(
        8,
        {"hybrid_shard_degree": 4, "context_parallel_degree": 2, "tensor_parallel_degree": 2},
        lambda: (
            tsm.state.cp_rank,
            members(tsm.state.cp_process_group),
            members(tsm.state.tp_process_group),
            members(tsm.state.rep_rank_process_group),
        ),
    )
    everybody = list(range(8))
    assert read == [
        (0, [0, 2], [0, 1], everybody),
        (0, [1, 3], [0, 1], everybody),
        (1, [0, 2], [2, 3], everybody),
        (1, [1, 3], [2, 3], everybody),
        (0, [4, 6], [4, 5], everybody),
        (0, [5, 7], [4, 5], everybody),
        (1, [4, 6], [6, 7], everybody),
        (1, [5, 7], [6, 7], everybody),
    ]


def test_experts_lie_inside_of_the_sharded_ranks():
    read = on_each_rank(
        8,
        {"hybrid_shard_degree": 4, "expert_parallel_degree": 2},
        lambda: (tsm.state.ep_rank, members(tsm.state.ep_process_group)),
    )
    pairs = [[0, 1], [0, 1], [2, 3], [2, 3], [4, 5], [4, 5], [6, 7], [6, 7]]
    assert read == [(rank % 2, pair) for rank, pair in enumerate(pairs)]


@pytest.mark.parametrize("config", [None, {}, {"hybrid_shard_degree": 1}])
def test_native_mode_has_no_groups(config):
    def read():
        s = tsm.state
        groups = (s.tp_process_group, s.rep_rank_process_group, s.cp_process_group, s.ep_process_group)
        sizes = (s.tp_size, s.cp_size, s.ep_size, s.tp_rank, s.cp_rank, s.ep_rank)
        return tsm.is_initialized(), groups, sizes, members(s.world_process_group)

    assert on_each_rank(2, config, read) == [(True, (None,) * 4, (1, 1, 1, 0, 0, 0), [0, 1])] * 2


def test_degrees_are_copies_of_what_was_given():
    def read():
        return tsm.state.hybrid_shard_degree, tsm.state.tensor_parallel_degree, tsm.state.tp_size, tsm.state.world_size

    assert on_each_rank(4, {"tensor_parallel_degree": 2}, read) == [(0, 2, 2, 4)] * 4


def test_degrees_may_be_assigned_before_init_and_after():
    tsm.state.tensor_parallel_degree = 1
    assert tsm.state.tp_size == 1
    assert not tsm.is_initialized()
    tsm.state.tensor_parallel_degree = 8
    tsm.init()
    assert tsm.state.tp_size == 1
    tsm.state.context_parallel_degree = 1
    assert (tsm.state.cp_size, tsm.state.hybrid_shard_degree) == (1, 0)
    tsm.state.reset()
    with pytest.raises(UsageError, match=r"tsm.state.tensor_parallel_degree: expected tsm.init"):
        tsm.state.tensor_parallel_degree  # noqa: B018


def test_what_there_is_not_is_an_attribute_error():
    assert not hasattr(tsm.state, "pp_rank")
    with pytest.raises(UsageError, match="call it at the start"):
        tsm.state.rank  # noqa: B018


def test_init_again_needs_the_same_configuration():
    tsm.init({"random_seed": 1})
    tsm.init({"random_seed": 1})
    with pytest.raises(ConfigError, match=r"random_seed: 1 in the first tsm\.init, 2 in this one"):
        tsm.init({"random_seed": 2})


def test_a_wrong_configuration_starts_nothing(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(ConfigError, match="hybrid_shard_degree: expected 0 or a divisor of 8"):
        tsm.init({"hybrid_shard_degree": 3})
    assert not dist.is_initialized()
    assert not tsm.is_initialized()


def test_init_starts_a_world_of_one_and_reset_ends_it():
    tsm.init('{"random_seed": 3}')
    assert (tsm.state.rank, tsm.state.world_size, tsm.state.random_seed) == (0, 1, 3)
    tsm.state.reset()
    assert not dist.is_initialized()


def test_the_alias_is_the_same_module(monkeypatch):
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(os, "environ", dict(os.environ))
    smpc.alias()
    import torch.sagemaker as alias
    from torch.sagemaker.state_handler import state

    assert state is tsm.state
    assert alias.init is tsm.init
    assert alias.__version__ == "2.6.0"
    with pytest.raises(AttributeError, match=r"has no 'pipeline'; docs/smp_v2.md says"):
        alias.pipeline  # noqa: B018
