"""Collectives through shared memory: against gloo, under stress, with ranks that go away, and what is left of them."""

import os
import signal

import pytest
import shared_slots_jobs as jobs
import torch
from executor_harness import Launch, run_workers

from smpc.executor.host_memory.shared_slots import num_bytes, slot_bytes

LIMIT = 300.0  # seconds, on a loaded machine; the longest timeout is 2


@pytest.mark.long
def test_two_ranks_get_what_gloo_gives_them(tmp_path):
    first, second = run_workers(jobs.compare, 2, tmp_path)
    for dtype, sums in first.items():
        for key, value in sums.items():
            assert torch.equal(value, second[dtype][key])


def test_three_ranks_get_the_same_sums(tmp_path):
    found = run_workers(jobs.compare, 3, tmp_path)
    for dtype, sums in found[0].items():
        for key, value in sums.items():
            assert all(torch.equal(value, other[dtype][key]) for other in found[1:])
            if key[0] == "sum" and key[1] != jobs.LARGE:  # which goes over gloo
                number = [*jobs.SHAPES, ()].index(key[1])
                parts = [jobs.drawn(dtype, key[1], 100 * number + rank) for rank in range(3)]
                if dtype in (torch.bfloat16, torch.float16):  # rounded once
                    assert torch.equal(value, sum(part.float() for part in parts).to(dtype))
                else:
                    assert torch.equal(value, (parts[0] + parts[1]) + parts[2])


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_no_rank_reads_what_another_one_overwrites(tmp_path, size):
    assert run_workers(jobs.stress, size, tmp_path, 1, 400) == [400] * size


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_no_rank_reads_what_another_one_overwrites_for_long(tmp_path, size, seed):
    assert run_workers(jobs.stress, size, tmp_path, seed, 20000 // size) == [20000 // size] * size


def test_memory_goes_with_the_group(tmp_path):
    assert run_workers(jobs.lifetimes, 2, tmp_path) == [[], []]


def test_modes_of_torch_do_not_matter(tmp_path):
    assert run_workers(jobs.modes, 2, tmp_path) == [None] * 2


def test_the_switch(tmp_path):
    for text in run_workers(jobs.switched, 2, tmp_path):
        assert text == "SMPC_SHARED_MEMORY: expected 0 (off) or 1 (on, the default), found 'yes' in the environment"


def test_a_rank_that_cannot_share_is_enough(tmp_path):
    assert run_workers(jobs.crowded, 2, tmp_path) == [None] * 2


def test_a_forked_child_is_refused(tmp_path):
    assert run_workers(jobs.forked, 2, tmp_path) == [None] * 2


@pytest.mark.parametrize(
    ("action", "expected"),
    [
        ("kill", "TransportError: Connection closed by peer, which has ended: this rank waited for rank 1 (process "),
        ("raise", "TransportError: Connection closed by peer, which has "),
        ("leave", "TransportError: Connection closed by peer, which has left the group or failed: this rank waited for rank 1"),
        ("stop", "TransportError: Timed out waiting 2000ms: this rank waited for rank 1 (process "),
        ("shape", "TransportError: expected rank 1 to call what this rank calls, a collective of 16 bytes, found one of 32 bytes"),
        ("interrupt", "InterruptedError: alarm"),
    ],
)  # fmt: skip
def test_a_rank_that_waits_hears_of(tmp_path, action, expected):
    launch = Launch(jobs.fault, 2, tmp_path, action)
    launch.processes[0].join(LIMIT)
    assert launch.processes[0].exitcode == 0, (tmp_path / "0.log").read_text()
    other = launch.processes[1]
    if other.is_alive():
        os.kill(other.pid, signal.SIGKILL)
    launch.wait()
    error, second, took = torch.load(tmp_path / "found.pt")
    assert error.startswith(expected)
    assert second.startswith("the group's collectives through shared memory were closed after a failure")
    assert took < LIMIT


def test_a_mismatch_is_told_to_both(tmp_path):
    _, (status, log) = Launch(jobs.fault, 2, tmp_path, "shape").wait()
    assert status == 0, log
    assert "a collective of 32 bytes, found one of 16 bytes" in torch.load(tmp_path / "1.pt")


def test_pieces_of_another_tensor_are_told_apart(tmp_path):
    for text in run_workers(jobs.pieces_of_another, 2, tmp_path):
        assert text.startswith("expected rank ")


@pytest.mark.parametrize("size", [2, 3, 4, 7, 64, 1000])
def test_slots_do_not_grow_with_the_group(size):
    assert slot_bytes(size) % 4096 == 0
    assert slot_bytes(size) > 0
    assert num_bytes(size) <= max(1 << 22, 8192 * size) + 192 * size + 4096
