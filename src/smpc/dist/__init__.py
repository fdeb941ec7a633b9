"""This process's rank in its job, and collectives between ranks. Can be imported by itself.

    from smpc import dist

    dist.initialize_dist("cpu")                          after `smpc run`, torchrun, mpirun or srun; alone, a world of one
    dist.get_global_rank(), dist.get_world_size()        also before: from the launcher's variables, else 0 and 1
    dist.all_reduce(tensor); dist.all_gather(tensor)     alone they change nothing

    place         ranks and sizes                            start        process groups
    collectives   tensors and objects of all ranks           waiting      local rank 0 goes first
    sampling      which samples a rank reads            ending       what a process waits for at its end

Alone means: not initialised, and a world of one. Not initialised in a larger world, what needs the others raises GroupError, which is a
UsageError and a RuntimeError, and names `initialize_dist`. Nothing waits longer than the timeout that `initialize_dist` was given.
"""

from smpc.dist.collectives import all_gather, all_gather_object, all_reduce, barrier, broadcast, broadcast_object_list
from smpc.dist.rank_and_size import (
    get_global_rank,
    get_local_rank,
    get_local_world_size,
    get_node_rank,
    get_world_size,
    is_available,
    is_initialized,
)
from smpc.dist.sampling import get_sampler
from smpc.dist.process_groups import initialize_dist
from smpc.dist.waiting import (
    busy_wait_for_local_rank_zero,
    get_node_signal_file_name,
    local_rank_zero_download_and_wait,
    run_local_rank_zero_first,
    write_signal_file,
)
from smpc.errors import MissingEnvironmentError

__all__ = [
    "MissingEnvironmentError",
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "busy_wait_for_local_rank_zero",
    "get_global_rank",
    "get_local_rank",
    "get_local_world_size",
    "get_node_rank",
    "get_node_signal_file_name",
    "get_sampler",
    "get_world_size",
    "initialize_dist",
    "is_available",
    "is_initialized",
    "local_rank_zero_download_and_wait",
    "run_local_rank_zero_first",
    "write_signal_file",
]
