"""What the ranks of the tests of shared memory run."""

import copy
import gc
import os
import random
import resource
import signal
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from smpc.errors import ConfigError, TransportError, UsageError
from smpc.executor import collectives
from smpc.executor.collectives import TensorGroup, exchanged, gathered, scattered_sum, sum_over, summed
from smpc.executor.host_memory.shared_memory import VARIABLE
from smpc.executor.host_memory.shared_slots import SUMMED, slot_bytes

SMALL = torch.zeros(4)
LARGE = (4, 16385, 12)  # in pieces between two ranks
SHAPES = [(4, 6, 8), (4, 0, 8), (1, 4, 4), (4, 4096, 4), LARGE]


def over_gloo():
    """A group of all ranks that shares no memory."""
    os.environ[VARIABLE] = "0"
    group = TensorGroup.of(dist.new_group())
    assert group.slots_for(SMALL) is None
    del os.environ[VARIABLE]
    return group


def over_memory(timeout=600.0):
    """A group of all ranks that does."""
    group = TensorGroup.of(dist.new_group(timeout=timedelta(seconds=timeout)))
    assert group.slots_for(SMALL) is not None
    return group


def drawn(dtype, shape, seed):
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(0, 2 if dtype is torch.bool else 100, shape, generator=generator).to(dtype)


def results(group, dtype):
    """Of every collective, for whole, empty, transposed and large tensors of this rank."""
    found = {}
    sums = dtype in SUMMED
    for number, shape in enumerate([*SHAPES, ()]):
        tensor = drawn(dtype, shape, 100 * number + group.rank)
        if sums:
            found["sum", shape] = summed(tensor, group)
            found["in place", shape] = sum_over(tensor.clone(), group)
        if shape == () or group.size == 3:
            continue
        for dim in (0, 2, -1):
            found["gather", shape, dim] = gathered(tensor, dim, group)
            found["gather transposed", shape, dim] = gathered(tensor.transpose(0, 2), dim, group)
            if shape[dim] % group.size == 0 and sums:
                found["scatter", shape, dim] = scattered_sum(tensor, dim, group)
                found["scatter transposed", shape, dim] = scattered_sum(
                    tensor.transpose(0, 1), 1 if dim == 0 else dim, group
                )
            if shape[dim] % group.size == 0 and dtype is not torch.bool:
                found["exchange", shape, dim] = exchanged(tensor, dim, 1, group)
    return found


def compare(rank, folder):
    """The same collectives over gloo and over shared memory; the sums."""
    memory, gloo = over_memory(), over_gloo()
    kept = {}
    for dtype in (*SUMMED, torch.int16, torch.bool, torch.complex64):
        if dtype in (torch.int16, torch.complex64):  # gloo neither sums nor gathers them
            tensor = drawn(dtype, (2, 3), rank)
            parts = gathered(tensor, 0, memory)
            assert torch.equal(parts, torch.cat([drawn(dtype, (2, 3), other) for other in range(memory.size)]))
            continue
        ours, theirs = results(memory, dtype), results(gloo, dtype)
        assert ours.keys() == theirs.keys()
        for key, value in ours.items():
            other = theirs[key]
            assert (value.shape, value.dtype, value.stride()) == (other.shape, other.dtype, other.stride()), key
            if memory.size == 2 or key[0] not in ("sum", "in place") or not dtype.is_floating_point:
                assert torch.equal(value, other), (dtype, key)
        kept[dtype] = {key: value for key, value in ours.items() if key[0] in ("sum", "in place")}
    return kept


def stress(rank, folder, seed, num_rounds):
    """Random collectives of random sizes after random sleeps, against what all ranks must have sent."""
    group, size = over_memory(), dist.get_world_size()
    common, own = random.Random(seed), random.Random(1000 * seed + rank)
    large = slot_bytes(size) // 4 + 64
    num_slow = 0
    for number in range(num_rounds):
        rows = size * common.choice([0, 1, 1, 2, 3, 50, 1000, 16384 // size])
        if common.random() < 0.02:
            rows = size * (large // size + 1)  # in pieces, or over gloo
        inputs = [torch.arange(rows) * (peer + 1) + number for peer in range(size)]
        dtype = common.choice([torch.float32, torch.int64, torch.float64])
        mine = inputs[rank].to(dtype)
        if own.random() < 0.05:
            time.sleep(own.choice([1e-5, 1e-4, 1e-3, 5e-3]))
            num_slow += 1
        kind = common.randrange(4)
        share = slice(rank * rows // size, (rank + 1) * rows // size)
        if kind == 0:
            found, expected = summed(mine, group), sum(inputs)
        elif kind == 1:
            found, expected = gathered(mine, 0, group), torch.cat(inputs)
        elif kind == 2:
            found, expected = scattered_sum(mine, 0, group), sum(inputs)[share]
        else:
            found, expected = exchanged(mine, 0, 0, group), torch.cat([other[share] for other in inputs])
        assert torch.equal(found, expected.to(dtype)), f"round {number}, kind {kind}, {rows} rows of {dtype}"
    assert num_slow > 0
    return num_rounds


def mapped():
    """How many pieces of shared memory this process has, and how many descriptors of it and of processes."""
    links = [str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return (
        sum("/memfd:smpc-" in line for line in Path("/proc/self/maps").read_text().splitlines()),
        sum("/memfd:smpc-" in link for link in links),
        sum("pidfd" in link for link in links),
    )


def lifetimes(rank, folder):
    """Groups come and go, and their memory with them."""
    assert mapped() == (0, 0, 0)
    group = over_memory()
    again = TensorGroup.of(group.process_group)
    module = nn.Linear(1, 1)
    module.group = group
    assert again.slots_for(SMALL) is group.slots_for(SMALL) is copy.deepcopy(module).group.slots_for(SMALL)
    assert mapped() == (1, 1, 1)  # a mapping keeps a descriptor
    other = over_memory()
    assert other.slots_for(SMALL) is not group.slots_for(SMALL)
    for number in range(5):  # the groups' collectives are counted apart
        for each in (group, again, other) if number % 2 else (other, group):
            assert torch.equal(sum_over(torch.ones(3), each), torch.full((3,), 2.0))
    assert mapped() == (2, 2, 2)
    dist.destroy_process_group(group.process_group)
    del group, again, module, each
    gc.collect()
    assert mapped() == (1, 1, 1)
    dist.barrier()
    assert torch.equal(sum_over(torch.ones(3), over_memory()), torch.full((3,), 2.0))
    del other
    return sorted(path.name for path in Path("/dev/shm").iterdir() if "smpc" in path.name)


def modes(rank, folder):
    """Whoever asks first, and in whatever mode."""
    group = TensorGroup.of(dist.new_group())
    with torch.device("meta"), torch.inference_mode():
        assert summed(torch.ones(3, device="cpu"), group).tolist() == [2.0] * 3
    assert group.slots_for(SMALL) is not None
    x = torch.ones(3, requires_grad=True)
    found = summed(x * 2, group)  # outside autograd, though it is on
    assert not found.requires_grad
    assert torch.equal(found, torch.full((3,), 4.0))
    assert torch.equal(sum_over(x.detach()[::2], group), torch.full((2,), 2.0))
    y = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    # y -> partial squares on each rank -> their sum -> cubes: a function of all ranks' alike ys
    total = collectives.all_reduce(collectives.replicate_in(y, group) ** 2 * (rank + 1), group)
    (first,) = torch.autograd.grad((total**2).sum(), y, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), y)
    value = y.detach()  # (3 y^2)^2 = 9 y^4
    torch.testing.assert_close(first.detach(), 36 * value**3)
    torch.testing.assert_close(second, 108 * value**2)


def switched(rank, folder):
    """One rank that says no is enough; a setting that is wrong is an error."""
    os.environ[VARIABLE] = "1" if rank == 0 else "0"
    group = TensorGroup.of(dist.new_group())
    assert group.slots_for(SMALL) is None
    assert torch.equal(summed(torch.ones(3), group), torch.full((3,), 2.0))
    assert mapped() == (0, 0, 0)
    os.environ[VARIABLE] = "yes"
    try:
        summed(SMALL, TensorGroup.of(dist.new_group()))
    except ConfigError as error:
        return str(error)
    return ""


def crowded(rank, folder):
    """The last rank cannot open anything more: all use gloo."""
    group = TensorGroup.of(dist.new_group())
    group.process_group.allreduce([torch.zeros(1)]).wait()  # gloo is connected
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(limits[0], 3), limits[1]))
    assert group.slots_for(SMALL) is None
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert torch.equal(summed(torch.ones(3), group), torch.full((3,), 2.0))
    assert mapped() == (0, 0, 0)


def forked(rank, folder):
    """A forked child can neither use nor end the group of its parent."""
    group = over_memory()
    child = os.fork()
    if child == 0:
        try:
            summed(SMALL, group)
            os._exit(3)
        except UsageError:
            group.slots_for(SMALL).close()
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(summed(torch.ones(3), group), torch.full((3,), 2.0))


def pieces_of_another(rank, folder):
    """One rank's tensor is one piece, as large as the other rank's first one."""
    group = over_memory()
    try:
        summed(torch.zeros((1 + 2 * rank) * slot_bytes(2) // 4), group)
    except TransportError as error:
        return str(error)
    return ""


def fault(rank, folder, action):
    """Rank 1 does something bad while rank 0 waits for it; rank 0's error and how long that took."""
    group = over_memory(timeout=2.0 if action in ("stop", "interrupt") else 600.0)
    summed(SMALL, group)
    if rank == 1:
        time.sleep(0.3)  # rank 0 is past its spinning
        (folder / "new").write_text(str(time.time()))
        (folder / "new").rename(folder / "moment")
        if action in ("kill", "stop"):
            os.kill(os.getpid(), signal.SIGKILL if action == "kill" else signal.SIGSTOP)
        if action == "raise":
            raise ArithmeticError("bomb")
        if action == "shape":
            try:
                summed(torch.zeros(8), group)
            except TransportError as error:
                return str(error)
        if action == "leave":
            dist.destroy_process_group(group.process_group)
            del group
            gc.collect()
        time.sleep(20)
    if action == "interrupt":
        signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(InterruptedError("alarm")))
        while not (folder / "moment").exists():
            time.sleep(0.01)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        summed(SMALL, group)
    except (TransportError, InterruptedError) as error:
        took = time.time() - float((folder / "moment").read_text())
        try:
            summed(SMALL, group)
        except TransportError as second:
            torch.save((f"{type(error).__name__}: {error}", str(second), took), folder / "found.pt")
    os._exit(0)  # without waiting for the other one
