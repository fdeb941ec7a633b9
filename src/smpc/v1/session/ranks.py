"""Ranks, sizes and groups of the calling process. `smpc.mesh` has the terms.

    function                         of                                     counts
    rank, size                       all processes                          from 0
    local_rank, local_size           the processes of this host
    pp_rank, pp_size                 the stages of one replica
    tp_rank, tp_size                 the slices of a tensor-parallel module
    rdp_rank, rdp_size               the holders of the same parameters     replicas of the model
    dp_rank, dp_size                 all that run the same stage            tp_size * rdp_size
    mp_rank, mp_size                 the processes of one replica           pp_size * tp_size
    cp_rank, cp_size                 the slices of a sequence               they are among the rdp_size
    data_rank, data_size             the parts of the data: processes that must be given the same batch have the same data_rank

`get_<axis>_group()` lists the global ranks of the caller's group, ascending; `get_<axis>_process_group()` is the
same as a `torch.distributed` group. Axes whose groups have the same members share one process group.

Every function but `is_initialized` and `is_tracing` raises UsageError before `smp.init`.

Source: public SMP v1 API ("PyTorch API", "Ranking Basics"). That reference requires `ddp` for the process groups;
here they always exist.
"""

from __future__ import annotations

import torch.distributed as dist

from smpc.mesh import Axis
from smpc.v1.session.process_state import state


def is_initialized() -> bool:
    """Whether `smp.init` has been called in this process."""
    return state.initialized


def is_tracing() -> bool:
    """Whether a model is being recorded right now."""
    return state.tracing


def rank() -> int:
    """Global rank of this process."""
    return state.session.rank


def size() -> int:
    """Number of processes."""
    return state.session.mesh.world_size


def local_rank() -> int:
    """Position of this process on its host; the index of its GPU."""
    return state.session.local_rank


def local_size() -> int:
    """Number of processes on this host."""
    return state.session.local_size


def pp_rank() -> int:
    """Pipeline rank: which stage of the model this process runs."""
    return _rank(Axis.PP)


def pp_size() -> int:
    """Number of pipeline ranks, `pipeline_parallel_degree`."""
    return _size(Axis.PP)


def tp_rank() -> int:
    """Tensor-parallel rank: which slice of tensor-parallel modules this process holds."""
    return _rank(Axis.TP)


def tp_size() -> int:
    """Number of tensor-parallel ranks, `tensor_parallel_degree`."""
    return _size(Axis.TP)


def rdp_rank() -> int:
    """Reduced-data-parallel rank: position among the processes that hold the same parameters."""
    return _rank(Axis.RDP)


def rdp_size() -> int:
    """Number of processes that hold the same parameters, which is the number of replicas of the model."""
    return _size(Axis.RDP)


def dp_rank() -> int:
    """Data-parallel rank: position among the processes that run the same stage."""
    return _rank(Axis.DP)


def dp_size() -> int:
    """Number of processes that run the same stage."""
    return _size(Axis.DP)


def mp_rank() -> int:
    """Model-parallel rank: position among the processes of this replica."""
    return _rank(Axis.MP)


def mp_size() -> int:
    """Number of processes of one replica."""
    return _size(Axis.MP)


def cp_rank() -> int:
    """Context-parallel rank: which slice of sequences this process computes."""
    return _rank(Axis.CP)


def cp_size() -> int:
    """Number of context-parallel ranks, `context_parallel_degree`."""
    return _size(Axis.CP)


def data_rank() -> int:
    """The number of the part of the data that this process reads.

    It is equal for ranks of a pipeline and of a context-parallel group, and with `prescaled_batch` also for ranks of a tensor-parallel
    group.
    """
    return _data_place()[0]


def data_size() -> int:
    """The number of parts of the data; each process reads one."""
    return _data_place()[1]


def get_cp_group() -> list[int]:
    """Global ranks that have slices of this process's sequences."""
    return _group(Axis.CP)


def get_pp_group() -> list[int]:
    """Global ranks that run the stages of this replica, in the order of the stages."""
    return _group(Axis.PP)


def get_tp_group() -> list[int]:
    """Global ranks that hold the slices of this process's tensor-parallel modules."""
    return _group(Axis.TP)


def get_rdp_group() -> list[int]:
    """Global ranks that hold the same parameters as this process."""
    return _group(Axis.RDP)


def get_dp_group() -> list[int]:
    """Global ranks that run the same stage as this process."""
    return _group(Axis.DP)


def get_mp_group() -> list[int]:
    """Global ranks of this process's replica."""
    return _group(Axis.MP)


def get_world_process_group() -> dist.ProcessGroup:
    """The `torch.distributed` group of all processes."""
    return state.session.groups[Axis.WORLD]


def get_pp_process_group() -> dist.ProcessGroup:
    """The `torch.distributed` group of `get_pp_group`."""
    return state.session.groups[Axis.PP]


def get_tp_process_group() -> dist.ProcessGroup:
    """The `torch.distributed` group of `get_tp_group`."""
    return state.session.groups[Axis.TP]


def get_rdp_process_group() -> dist.ProcessGroup:
    """The `torch.distributed` group of `get_rdp_group`."""
    return state.session.groups[Axis.RDP]


def get_dp_process_group() -> dist.ProcessGroup:
    """The `torch.distributed` group of `get_dp_group`."""
    return state.session.groups[Axis.DP]


def get_mp_process_group() -> dist.ProcessGroup:
    """The `torch.distributed` group of `get_mp_group`."""
    return state.session.groups[Axis.MP]


def _data_place() -> tuple[int, int]:
    session = state.session
    return session.mesh.data_place(session.rank, tensor_ranks_share=session.config.prescaled_batch)


def _rank(axis: Axis) -> int:
    return state.session.mesh.axis_rank(axis, state.session.rank)


def _size(axis: Axis) -> int:
    return state.session.mesh.size(axis)


def _group(axis: Axis) -> list[int]:
    return list(state.session.mesh.group(axis, state.session.rank))
