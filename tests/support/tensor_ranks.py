"""Tensor-parallel ranks as threads of one process, each with its own gloo group, and what compares them with one whole module."""

import functools
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _register_process_group, _resolve_process_group

from smpc.executor.collectives import TensorGroup
from smpc.nn.parallel import distributed_modules

LIMIT = 300  # seconds; a hang fails the test, and a busy machine does not


def tensor_groups(size):
    """The same group of `size` ranks, once for each rank."""
    groups = _tensor_groups(size)
    for group in groups if size > 1 else ():
        _make_known(group.process_group)
    return groups


def _make_known(group):
    """Operations find a group by its name; a test of this process that has destroyed its own groups has made all names forgotten."""
    try:
        _resolve_process_group(group.group_name)
    except RuntimeError:
        _register_process_group(group.group_name, group)


@functools.cache
def _tensor_groups(size):
    store = dist.HashStore()

    def connect(rank):
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=LIMIT)
        backend = dist.ProcessGroupGloo(dist.PrefixStore(str(size), store), rank, size, options)
        group = dist.ProcessGroup(dist.PrefixStore(f"{size}-group", store), rank, size)
        group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
        group._set_group_name(f"{size} ranks, {rank}")
        return TensorGroup(group, rank, size)

    return run_ranks(size, connect) if size > 1 else [TensorGroup()]


def run_ranks(size, work):
    """`work(rank)` on every rank at the same time; the results by rank. The first rank's error is raised."""
    with ThreadPoolExecutor(size) as pool:
        return [future.result(LIMIT) for future in [pool.submit(work, rank) for rank in range(size)]]


def whole_parameters(modules, value=lambda parameter: parameter):
    """The whole of every parameter (or of `value` of it), from the same module on every rank. Replicas must be equal."""
    owners = [dict(distributed_modules(module)) for module in modules]
    found = {}
    for name, _ in modules[0].named_parameters():
        prefix, _, own = name.rpartition(".")
        slices = [value(module.get_parameter(name)).detach() for module in modules]
        owner = owners[0].get(prefix)
        shard = owner.shards.get(own) if owner is not None else None
        if shard is not None:
            found[name] = torch.cat(slices, shard.dim)
            assert found[name].shape[shard.dim] == shard.size
        elif owner is not None and own in owner.local_batch and not owner.parallel.prescaled_batch:
            found[name] = slices
        else:
            assert all(torch.equal(slices[0], other) for other in slices), f"{name} differs between ranks"
            found[name] = slices[0]
    return found
