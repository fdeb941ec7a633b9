"""Ranks and sizes: from torch.distributed if it is initialised, else from the launcher's variables, else for a job of one process.

RANK, WORLD_SIZE                 or what mpirun or srun set (`smpc.places`)
LOCAL_RANK, LOCAL_WORLD_SIZE     the same
NODE_RANK, else GROUP_RANK       torchrun sets the second, `smpc run` both
"""

from __future__ import annotations

import os

from torch import distributed

from smpc.errors import GroupError, MissingEnvironmentError
from smpc.places import Place


def is_available() -> bool:
    """Whether this torch has torch.distributed."""
    return distributed.is_available()


def is_initialized() -> bool:
    """Whether the process groups exist."""
    return distributed.is_available() and distributed.is_initialized()


def get_world_size() -> int:
    """How many ranks the job has; 1 alone. Raises GroupError where WORLD_SIZE says something else than the process group."""
    return _agreed_number("WORLD_SIZE", distributed.get_world_size() if is_initialized() else None, 1)


def get_global_rank(group: distributed.ProcessGroup | None = None) -> int:
    """This process's rank in the job, or its position in `group`; 0 alone. Raises GroupError where RANK says something else."""
    if group is not None and is_initialized():
        return distributed.get_rank(group)
    return _agreed_number("RANK", distributed.get_rank() if is_initialized() else None, 0)


def get_local_world_size() -> int:
    """How many ranks of the job run on this node; 1 alone. Raises MissingEnvironmentError where nothing says so."""
    place = _place()
    return _number_of_environment("LOCAL_WORLD_SIZE", None if place is None else place.local_size, 1)


def known_local_size() -> int:
    """How many ranks run on this node, as far as anything says so; otherwise all of the job."""
    try:
        return get_local_world_size()
    except MissingEnvironmentError:
        return get_world_size()


def get_local_rank() -> int:
    """This process's number on its node, from 0. Raises MissingEnvironmentError where nothing says so."""
    place = _place()
    return _number_of_environment("LOCAL_RANK", None if place is None else place.local_rank, 0)


def get_node_rank() -> int:
    """The number of this node, from 0. Raises MissingEnvironmentError where nothing says so."""
    for name in ("NODE_RANK", "GROUP_RANK", "SLURM_NODEID"):
        text = os.environ.get(name, "").strip()
        if text:
            if not (text.isascii() and text.isdigit()):
                raise GroupError(f"{name}: expected a whole number, found {text!r} in the environment")
            return int(text)
    place = _place()
    if place is not None and place.local_size == place.world_size:
        return 0
    return _number_of_environment("NODE_RANK", None, 0)


def _place() -> Place | None:
    return Place.find(os.environ)


def _agreed_number(name: str, of_group: int | None, alone: int) -> int:
    """The process group's number, checked against the environment; without a group, the environment's."""
    place = _place()
    of_launcher = None if place is None else (place.world_size if name == "WORLD_SIZE" else place.rank)
    if of_group is None:
        return alone if of_launcher is None else of_launcher
    if of_launcher is not None and of_launcher != of_group:
        raise GroupError(
            f"{name}: found {of_launcher} in the environment, and {of_group} in torch.distributed; they were the same when the process groups "
            f"were made, or the groups were made with other numbers: set {name}={of_group}"
        )
    return of_group


def _number_of_environment(name: str, found: int | None, alone: int) -> int:
    """A number that the launcher has set; `alone` for a single process."""
    text = os.environ.get(name, "").strip()
    if found is None and text.isascii() and text.isdigit():  # beside process groups that the script has made by itself
        found = int(text)
    if found is not None:
        return found
    if is_initialized() and distributed.get_world_size() > 1:
        raise MissingEnvironmentError(
            f"{name}: expected a whole number in the environment, found nothing; start the script with smpc run or torchrun, or call "
            "smpc.dist.initialize_dist, which sets it"
        )
    return alone
