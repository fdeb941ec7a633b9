"""Ring attention between processes of one host, whose blocks go through memory: the bits of gloo, and ranks that go away."""

import datetime
import gc
import os
import signal

import pytest
import torch
import torch.distributed as dist
from executor_harness import PATIENCE, Launch, run_workers
from shared_slots_jobs import mapped
from torch.utils.checkpoint import checkpoint

from smpc.errors import TransportError, UsageError
from smpc.executor.collectives import TensorGroup, sum_over
from smpc.executor.host_memory.shared_memory import VARIABLE
from smpc.executor.sequence import ring
from smpc.executor.sequence.ring import ring_attention
from smpc.executor.transport.rings import LIMIT, Rings

SMALL = (2, 4, 6, 16)  # samples, heads, positions, size of a head
LARGE = (16, 64, 4, 512)  # keys and values of 16 MiB: more than a ring holds beside anything else


def over_memory(timeout=PATIENCE):
    group = TensorGroup.of(dist.new_group(timeout=timeout))
    assert Rings.of(group.process_group) is not None
    return group


def over_gloo():
    os.environ[VARIABLE] = "0"
    group = TensorGroup.of(dist.new_group(timeout=PATIENCE))
    assert Rings.of(group.process_group) is None
    del os.environ[VARIABLE]
    return group


def drawn(shape, rank, dtype=torch.float32, key_heads=None):
    generator = torch.Generator().manual_seed(rank)
    samples, heads, *rest = shape
    shapes = [(samples, n, *rest) for n in (heads, key_heads or heads, key_heads or heads)]
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


def attention(group, tensors, mirrored=True, causal=True):
    return ring_attention(group, (2, (), mirrored), *tensors, causal=causal)


def with_gradients(group, *args, **ways):
    tensors = drawn(*args)
    out = attention(group, tensors, **ways)
    out.backward(out.detach() + 1)
    return [out.detach(), *(tensor.grad for tensor in tensors)]


def compare(rank, _):
    groups = over_memory(), over_gloo()
    cases = [
        (SMALL, torch.float32, 2),
        (SMALL, torch.float64, 1),
        (SMALL, torch.bfloat16, 4),
        ((1, 3, 2, 5), torch.float16, 3),
        ((0, 2, 4, 8), torch.float32, 2),
        (LARGE, torch.float32, 64),
    ]
    for shape, dtype, key_heads in cases:
        for mirrored, causal in ((True, True), (False, True), (True, False))[: 1 if shape == LARGE else 3]:
            found, expected = (
                with_gradients(group, shape, rank, dtype, key_heads, mirrored=mirrored, causal=causal)
                for group in groups
            )
            for one, other in zip(found, expected, strict=True):
                assert torch.equal(one, other), (shape, dtype, mirrored, causal)
    return len(cases)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_blocks_in_memory_have_the_bits_of_gloo(tmp_path, ranks):
    assert run_workers(compare, ranks, tmp_path) == [6] * ranks


def test_a_large_block_is_more_than_a_ring_holds():
    """Some of its messages go over gloo."""
    samples, heads, positions, size = LARGE
    assert 2 * samples * heads * positions * size * 4 == 4 * LIMIT


def several(rank, _):
    """Forwards of three microbatches before the first backward, one that computes again, and sums between: on one group."""
    memory, gloo = over_memory(), over_gloo()

    def train(group):
        inputs = [drawn(SMALL, 10 * number + rank) for number in range(3)]
        outs = []
        for number, tensors in enumerate(inputs):
            call = attention if number != 1 else lambda *args: checkpoint(attention, *args, use_reentrant=False)
            outs.append(call(group, [t * 2 for t in tensors]))
            sum_over(torch.ones(3), group)
        for out in (outs[1], outs[0], outs[2]):
            out.sum().backward()
        return [tensor.grad for tensors in inputs for tensor in tensors]

    for one, other in zip(train(memory), train(gloo), strict=True):
        assert torch.equal(one, other)


def test_several_rings_are_under_way(tmp_path):
    run_workers(several, 2, tmp_path)


def lifetimes(rank, _):
    """What is mapped while a group's ring is there, and after it."""
    group = over_memory()
    with_gradients(group, SMALL, rank)
    during = mapped()
    dist.destroy_process_group(group.process_group)
    del group
    gc.collect()
    return during, mapped()


def test_memory_goes_with_the_group(tmp_path):
    assert run_workers(lifetimes, 2, tmp_path) == [((1, 1, 1), (0, 0, 0))] * 2


def forked(rank, _):
    group = over_memory()
    with_gradients(group, SMALL, rank)
    child = os.fork()
    if child == 0:
        try:
            attention(group, drawn(SMALL, rank))
        except UsageError:
            os._exit(0)
        os._exit(3)
    assert os.waitpid(child, 0)[1] == 0
    with_gradients(group, SMALL, rank)


def test_a_forked_child_is_refused(tmp_path):
    run_workers(forked, 2, tmp_path)


def broken(rank, _, way):
    """Rank 1 fails in its second ring, in the way that is asked for; what rank 0 hears, and what both hear of a third ring."""
    group = over_memory(datetime.timedelta(seconds=2) if way == "stop" else PATIENCE)
    with_gradients(group, SMALL, rank)
    if rank == 1:
        if way in ("kill", "stop"):
            os.kill(os.getpid(), signal.SIGKILL if way == "kill" else signal.SIGSTOP)
        name = "block_forward" if way == "forward" else "block_backward"
        setattr(ring, name, _bomb)
    expected = ArithmeticError if rank == 1 else TransportError
    with pytest.raises(expected) as error:
        with_gradients(group, SMALL, rank)
    with pytest.raises(TransportError) as after:
        with_gradients(group, SMALL, rank)
    return str(error.value), str(after.value)


def _bomb(*_):
    raise ArithmeticError("bomb")


@pytest.mark.parametrize("way", ["forward", "backward"])
def test_an_error_in_the_middle_of_a_ring_ends_it_on_all_ranks(tmp_path, way):
    """A script that went on after one had its next ring compute with the last one's keys, without a word, and the others waited."""
    (first, after), (second, again) = run_workers(broken, 2, tmp_path, way)
    assert second == "bomb"
    assert first.startswith(
        "Connection closed by peer, which has left the group or failed: this rank waited for rank 1 ("
    )
    assert first.endswith("keys and values'")
    for text in (after, again):
        assert (
            text
            == "the group's collectives through shared memory were closed after a failure; start the processes again"
        )


@pytest.mark.parametrize(
    ("way", "words"), [("kill", "Connection closed by peer, which has ended"), ("stop", "Timed out waiting 2000ms")]
)
def test_a_wait_for_a_rank_that_has_ended_or_stopped_ends(tmp_path, way, words):
    launch = Launch(broken_alone, 2, tmp_path, way)
    launch.processes[0].join()
    if launch.processes[1].is_alive():
        os.kill(launch.processes[1].pid, signal.SIGKILL)
    (status, log), (killed, _) = launch.wait()
    assert (status, killed) == (0, -signal.SIGKILL), log
    assert (tmp_path / "text").read_text().startswith(f"{words}: this rank waited for rank 1 (process ")


def broken_alone(rank, folder, way):
    text, _ = broken(rank, folder, way)
    (folder / "text").write_text(text)
    os._exit(0)  # without waiting for the other one
