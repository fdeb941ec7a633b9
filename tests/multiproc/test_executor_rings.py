"""Messages through the rings that pipeline ranks on one host share: under stress, with rings that are full, and with ranks that go away."""

import datetime
import os
import random
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
from executor_harness import PATIENCE, Launch, run_workers

from smpc.errors import TransportError
from smpc.executor.host_memory.shared_memory import VARIABLE
from smpc.executor.transport import GlooTransport, WireFormat
from smpc.executor.transport.gloo import RingReceipt
from smpc.executor.transport.rings import LIMIT
from smpc.tracer.ir import TensorSpec

LARGEST = LIMIT + 64  # elements of one byte: more than a ring takes


def form_of(size, dtype="uint8"):
    return WireFormat.of("h", TensorSpec((size,), dtype, (1,)))


def payload(source, destination, number, size):
    """Other bytes in every message."""
    start = hash((source, destination, number)) % 251
    return (torch.arange(size) % 251 + start).to(torch.uint8)


def stress(rank, _, seed, rounds):
    """Every rank sends to every other, of all sizes; what has been posted is waited for in any order."""
    transport, size = GlooTransport(dist.new_group()), dist.get_world_size()
    count = 0
    for step in range(rounds):
        script = random.Random(f"{seed} {step}")  # the same on all ranks
        own = random.Random(f"{seed} {step} {rank}")
        sizes = [0, 1, 3, 64, 1000, 65536, 300_000, LIMIT, LARGEST]
        weights = [1, 5, 5, 9, 9, 5, 3, 0.5, 0.5]
        messages = [
            (source, destination, number, script.choices(sizes, weights)[0])
            for number in range(script.randrange(1, 40))
            for source, destination in [script.sample(range(size), 2)]
        ]
        posted = []
        for source, destination, number, length in messages:
            if source == rank:
                transport.send(destination, payload(source, destination, number, length), form_of(length))
            if destination == rank:
                posted.append((transport.receive(source, form_of(length)), source, number, length))
            if own.random() < 0.05:
                time.sleep(own.random() * 0.003)
        own.shuffle(posted)
        for receipt, source, number, length in posted:
            assert torch.equal(receipt.wait(), payload(source, rank, number, length)), (step, source, number, length)
            count += 1
        transport.flush()
    return count


@pytest.mark.long
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_what_is_sent_arrives_whole_and_in_order(tmp_path, size):
    assert all(count > 100 for count in run_workers(stress, size, tmp_path, 1, 30))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_what_is_sent_arrives_whole_and_in_order_for_long(tmp_path, size, seed):
    assert all(count > 1000 for count in run_workers(stress, size, tmp_path, seed, 600))


def full(rank, _):
    """More than a ring holds, before the other takes anything; both directions."""
    transport = GlooTransport(dist.new_group())
    numbers = range(12)
    for number in numbers:
        transport.send(1 - rank, payload(rank, 1 - rank, number, LIMIT), form_of(LIMIT))
    dist.barrier()
    receipts = [transport.receive(1 - rank, form_of(LIMIT)) for _ in numbers]
    assert all(isinstance(receipt, RingReceipt) for receipt in receipts)
    found = [torch.equal(r.wait(), payload(1 - rank, rank, n, LIMIT)) for n, r in zip(numbers, receipts, strict=True)]
    transport.flush()
    return found


@pytest.mark.long
def test_a_full_ring_keeps_no_sender_waiting(tmp_path):
    assert run_workers(full, 2, tmp_path) == [[True] * 12] * 2


def switched(rank, _):
    if rank == 1:
        os.environ[VARIABLE] = "0"
    transport = GlooTransport(dist.new_group())
    transport.send(1 - rank, torch.ones(3, dtype=torch.uint8), form_of(3))
    receipt = transport.receive(1 - rank, form_of(3))
    found = receipt.wait().tolist()
    transport.flush()
    dist.barrier()
    return isinstance(receipt, RingReceipt), found


def test_one_rank_turns_it_off_for_all(tmp_path):
    assert run_workers(switched, 2, tmp_path) == [(False, [1, 1, 1])] * 2


def dropped(rank, _):
    """How many descriptors are open after one transport, and after five more."""
    group = dist.new_group()
    counts = []
    for times in (1, 5):
        for _ in range(times):
            transport = GlooTransport(group)
            transport.send(1 - rank, torch.ones(3, dtype=torch.uint8), form_of(3))
            transport.receive(1 - rank, form_of(3)).wait()
            transport.flush()
            del transport
        counts.append(len(os.listdir("/proc/self/fd")))
    return counts


def test_a_transport_that_is_dropped_leaves_no_descriptor(tmp_path):
    for first, last in run_workers(dropped, 2, tmp_path):
        assert first == last


def lost(rank, _, way):
    """Rank 0 waits for rank 1."""
    transport = GlooTransport(dist.new_group(), timeout=datetime.timedelta(seconds=2) if way == "silence" else PATIENCE)
    if rank == 1:
        size = 4 if way == "size" else 3
        transport.send(0, torch.ones(size, dtype=torch.uint8), form_of(size))
        if way == "death":
            os.kill(os.getpid(), signal.SIGKILL)
        if way == "failure":
            transport.close()
        dist.barrier()
        return ""
    first, second = transport.receive(1, form_of(3)), transport.receive(1, form_of(3))
    if way == "own":
        threading.Timer(0.3, transport.close).start()
    start = time.monotonic()
    if way != "size":
        assert first.wait().tolist() == [1, 1, 1]
    with pytest.raises(TransportError) as error:
        (first if way == "size" else second).wait()
    assert time.monotonic() - start < 300
    if way != "death":
        dist.barrier()
    return str(error.value)


@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("failure", "Connection closed by peer, which has left the group or failed"),
        ("own", "The process group was destroyed"),
        ("silence", "Timed out waiting 2000ms"),
    ],
)
def test_a_wait_in_vain_ends(tmp_path, way, words):
    text = run_workers(lost, 2, tmp_path, way)[0]
    assert text.startswith(
        f"value 'h' did not arrive from pipeline rank 1: {words}: this rank waited for rank 1 (process "
    )
    assert text.endswith(" to send value 'h'")


def test_a_wait_for_a_process_that_has_ended_ends(tmp_path):
    (status, log), (killed, _) = Launch(lost, 2, tmp_path, "death").wait()
    assert (status, killed) == (0, -signal.SIGKILL), log


def test_other_sizes_than_planned_are_noticed(tmp_path):
    (text, _) = run_workers(lost, 2, tmp_path, "size")
    assert text == "value 'h' did not arrive from pipeline rank 1: expected value 'h' of 3 bytes, found 4"
