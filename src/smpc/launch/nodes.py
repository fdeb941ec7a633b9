"""A job of several nodes: this node's place in it, from command-line options and the environment.

Terms
    node        what one launcher starts; usually a host
    base rank   the lowest global rank of this node; its ranks follow one another
    master      where node 0's launcher listens; the others connect to it

Options that are not given come from the environment, as with the `composer` launcher: WORLD_SIZE, BASE_RANK, NODE_RANK, MASTER_ADDR,
MASTER_PORT. The WORLD_SIZE of a job that is on one node (it equals LOCAL_WORLD_SIZE), and of a job of which this process is a rank
(LOCAL_RANK is set), is that job's own, and does not count.
Nodes of equal size need `--nnodes` and `--node-rank`; of unequal size `--world-size`, `--base-rank` and `--node-rank`. Of the last two, one
follows from the other if it is 0, or if the number of ranks of this node divides what they are counted in.

A launcher that mpirun or srun has started once on every node takes the number of nodes and its own from them, and under Slurm the master,
as long as none of these is given. `--nnodes 1` makes a job of its own in each task.

Example, the same on both hosts but for the last option:

    smpc run -n 8 --nnodes 2 --master-addr host0 --master-port 29500 --node-rank 0 train.py
    smpc run -n 8 --nnodes 2 --master-addr host0 --master-port 29500 --node-rank 1 train.py
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from smpc.config.numbers import MAX_WORLD_SIZE, shown
from smpc.errors import ConfigError
from smpc.places import LOOPBACK, meeting_port
from smpc.places import Place as ProcessPlace

_TORCH_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@dataclass(frozen=True, slots=True)
class NodePlace:
    """This node among the others. `master_port` 0: any free one."""

    num_ranks: int
    world_size: int
    base_rank: int
    node_rank: int
    num_nodes: int
    master_addr: str
    master_port: int

    @property
    def hosts_store(self) -> bool:
        """Whether this node's launcher serves the store."""
        return self.node_rank == 0

    def fields(self, local_rank: int) -> dict[str, int]:
        """The fields that names of log files may contain."""
        return {
            "rank": self.base_rank + local_rank,
            "local_rank": local_rank,
            "world_size": self.world_size,
            "local_world_size": self.num_ranks,
            "node_rank": self.node_rank,
        }


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """The options; None for one that is not given."""

    num_nodes: int | None = None
    node_rank: int | None = None
    world_size: int | None = None
    base_rank: int | None = None
    master_addr: str | None = None
    master_port: int | None = None

    def place(self, num_ranks: int, environ: Mapping[str, str]) -> NodePlace:
        """This node's place, with `num_ranks` ranks of its own. Raises ConfigError, listing everything that is wrong."""
        outer = self._of_launcher(environ)
        if outer is not None:
            return outer.place(num_ranks, environ)
        reader = _NumberReader(environ)
        counts = self.num_nodes is None and not _is_of_another_job(environ)
        variable = "WORLD_SIZE" if counts else None
        world_size = reader.number("--world-size", self.world_size, variable, 1, MAX_WORLD_SIZE)
        num_nodes = reader.number("--nnodes", self.num_nodes, None, 1, MAX_WORLD_SIZE)
        if reader.violations:
            raise ConfigError("\n".join(reader.violations))
        if world_size is None:
            world_size = (num_nodes or 1) * num_ranks
        if world_size < num_ranks:
            raise ConfigError(
                f"--world-size: expected at least the {num_ranks} ranks of this node, found {world_size}{reader.origin('--world-size')}"
            )
        if world_size == num_ranks and (num_nodes or 1) == 1:
            return self._alone(num_ranks, reader)
        node_rank = reader.number("--node-rank", self.node_rank, "NODE_RANK", 0, MAX_WORLD_SIZE)
        base_rank = reader.number("--base-rank", self.base_rank, "BASE_RANK", 0, MAX_WORLD_SIZE)
        port = reader.number("--master-port", self.master_port, "MASTER_PORT", 1, 65535)
        address = self.master_addr or environ.get("MASTER_ADDR", "")
        violations = reader.violations
        what = f"{world_size} ranks, {num_ranks} of them on this node,"
        if node_rank is None and base_rank is None and not violations:
            violations.append(f"--node-rank: {what} need --node-rank, the number of this node from 0")
        if not address:
            violations.append(f"--master-addr: {what} need --master-addr, the address of node 0")
        if port is None and not violations:
            violations.append(f"--master-port: {what} need --master-port, a free port of node 0")
        if not violations:
            node_rank, base_rank = _completed_node_numbers(node_rank, base_rank, num_ranks, world_size, violations)
        if node_rank is not None and base_rank is not None and not violations:
            violations += self._contradictions(node_rank, base_rank, num_ranks, world_size, reader)
        num_nodes = -(-world_size // num_ranks) if num_nodes is None else num_nodes
        if violations:
            raise ConfigError("\n".join(violations))
        assert port is not None, "it is among the violations"
        assert node_rank is not None, "it is among the violations"
        assert base_rank is not None, "it is among the violations"
        return NodePlace(num_ranks, world_size, base_rank, node_rank, num_nodes, address, port)

    def _of_launcher(self, environ: Mapping[str, str]) -> NodeOptions | None:
        """These options completed from MPI's or Slurm's variables, with one task per node; None if options or variables say it already."""
        numbers = (self.num_nodes, self.node_rank, self.world_size, self.base_rank)
        told = any(environ.get(name, "").strip() for name in ("WORLD_SIZE", "NODE_RANK", "BASE_RANK", "LOCAL_RANK"))
        if told or any(number is not None for number in numbers):
            return None
        task = ProcessPlace.find(_outer_variables(environ))
        if task is None or task.world_size == 1:
            return None
        if (task.local_size or 1) > 1 or (task.local_rank or 0) > 0:
            raise ConfigError(
                f"--nnodes: {task.launcher} says {task.origin}, with several tasks on this node; start one smpc run on each node (srun "
                "--ntasks-per-node=1, mpirun --map-by ppr:1:node), the script without smpc run, or --nnodes 1 for a job in each task"
            )
        address = self.master_addr or environ.get("MASTER_ADDR", "").strip() or task.first_host
        port = self.master_port
        if port is None and task.job and not environ.get("MASTER_PORT", "").strip():
            port = meeting_port(f"{task.launcher} {task.job}")
        return NodeOptions(task.world_size, task.rank, None, None, address or None, port)

    def _contradictions(
        self, node_rank: int, base_rank: int, num_ranks: int, world_size: int, reader: _NumberReader
    ) -> list[str]:
        """The first error of a complete set of numbers."""
        if base_rank + num_ranks > world_size:
            return [
                f"--world-size: expected at least base rank {base_rank} + {num_ranks} ranks of this node = {base_rank + num_ranks}, "
                f"found {world_size}{reader.origin('--world-size')}"
            ]
        if (node_rank == 0) != (base_rank == 0):
            return [f"--base-rank: node 0 has base rank 0, found node {node_rank} with base rank {base_rank}"]
        if base_rank < node_rank:
            return [
                f"--base-rank: expected at least {node_rank}, as each of the {node_rank} nodes before it has a rank, found {base_rank}"
            ]
        if self.num_nodes is not None and node_rank >= self.num_nodes:
            return [f"--node-rank: expected a number below --nnodes {self.num_nodes}, found {node_rank}"]
        if self.num_nodes is not None and self.world_size is None and base_rank != node_rank * num_ranks:
            return [
                f"--base-rank: expected {node_rank * num_ranks}, as node {node_rank} of nodes with {num_ranks} ranks each has, found "
                f"{base_rank}; for nodes of different size, give --world-size"
            ]
        return []

    def _alone(self, num_ranks: int, reader: _NumberReader) -> NodePlace:
        """A job of one node, which meets on loopback. An environment that describes a node of a larger job does not matter."""
        port = reader.number("--master-port", self.master_port, None, 1, 65535)
        for option, value in (("--node-rank", self.node_rank), ("--base-rank", self.base_rank)):
            if value:
                reader.violations.append(f"{option}: expected 0 in a job of one node, found {value}; set --nnodes")
        if reader.violations:
            raise ConfigError("\n".join(reader.violations))
        return NodePlace(num_ranks, num_ranks, 0, 0, 1, LOOPBACK, port or 0)


def _completed_node_numbers(
    node_rank: int | None, base_rank: int | None, num_ranks: int, world_size: int, violations: list[str]
) -> tuple[int | None, int | None]:
    """Both numbers, of which one may follow from the other."""
    if base_rank is None and node_rank is not None:
        if node_rank == 0 or world_size % num_ranks == 0:
            return node_rank, node_rank * num_ranks
        violations.append(
            f"--base-rank: {world_size} ranks, {num_ranks} of them on node {node_rank}, need --base-rank, the lowest rank of this node: "
            "nodes have different numbers of ranks"
        )
    elif node_rank is None and base_rank is not None:
        if base_rank == 0 or (world_size % num_ranks == 0 and base_rank % num_ranks == 0):
            return base_rank // num_ranks, base_rank
        violations.append(
            f"--node-rank: {world_size} ranks, {num_ranks} of them on this node, from rank {base_rank} on, need --node-rank, the number of "
            "this node from 0: nodes have different numbers of ranks"
        )
    return node_rank, base_rank


def _outer_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without torch's variables, and outside of a step of Slurm (a batch script is no task) without Slurm's."""
    in_step = bool(environ.get("SLURM_STEP_ID"))
    return {
        name: value
        for name, value in environ.items()
        if name not in _TORCH_VARIABLES and (in_step or not name.startswith("SLURM_"))
    }


def _is_of_another_job(environ: Mapping[str, str]) -> bool:
    """Whether WORLD_SIZE describes a job around this launcher, and not the nodes that it is one of."""
    if environ.get("LOCAL_RANK", "").strip():
        return True
    world_size = environ.get("WORLD_SIZE", "").strip()
    return world_size != "" and world_size == environ.get("LOCAL_WORLD_SIZE", "").strip()


class _NumberReader:
    """Takes numbers from options, else from the environment, and collects what is wrong with them."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._origins: dict[str, str] = {}
        self.violations: list[str] = []

    def number(self, option: str, given: int | None, variable: str | None, minimum: int, maximum: int) -> int | None:
        """The number, None if there is none."""
        if given is not None and not -1 <= given <= maximum + 1:
            given = maximum + 1 if given > maximum else -1  # what is wrong with it stays so, in few digits
        name, text = option, "" if given is None else str(given)
        if given is None and variable is not None and variable in self._environ:
            name, text = variable, self._environ[variable].strip()
            self._origins[option] = f" (from {variable} in the environment)"
        if not text:
            return None
        value = int(text) if re.fullmatch(r"-?[0-9]{1,18}", text) else None
        if value is None or not minimum <= value <= maximum:
            bounds = f"a whole number from {minimum} to {maximum}"
            self.violations.append(f"{name}: expected {bounds}, found {shown(text)}{self.origin(option)}")
            return None
        return value

    def origin(self, option: str) -> str:
        """Where an option's value comes from, if not from the command line."""
        return self._origins.get(option, "")
