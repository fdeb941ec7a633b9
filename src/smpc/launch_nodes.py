"""A job of several nodes: this node's place in it, from command-line options and the environment.

Terms
    node        what one launcher starts; usually a host
    base rank   the lowest global rank of this node; its ranks follow one another
    master      where node 0's launcher listens; the others connect to it

Options that are not given come from the environment, as with the `composer` launcher: WORLD_SIZE, BASE_RANK, NODE_RANK, MASTER_ADDR,
MASTER_PORT.
Nodes of equal size need `--nnodes` and `--node-rank`; of unequal size `--world-size`, `--base-rank` and `--node-rank`.

Example, the same on both hosts but for the last option:

    smpc run -n 8 --nnodes 2 --master-addr host0 --master-port 29500 --node-rank 0 train.py
    smpc run -n 8 --nnodes 2 --master-addr host0 --master-port 29500 --node-rank 1 train.py
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from smpc.errors import ConfigError
from smpc.launch_store import LOOPBACK


@dataclass(frozen=True, slots=True)
class Place:
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
        """What names of log files may contain."""
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

    def place(self, num_ranks: int, environ: Mapping[str, str]) -> Place:
        """This node's place, with `num_ranks` ranks of its own. Raises ConfigError, listing everything that is wrong."""
        reader = _Reader(environ)
        world_size = reader.number("--world-size", self.world_size, None if self.num_nodes else "WORLD_SIZE", 1)
        num_nodes = reader.number("--nnodes", self.num_nodes, None, 1)
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
        node_rank = reader.number("--node-rank", self.node_rank, "NODE_RANK", 0)
        base_rank = reader.number("--base-rank", self.base_rank, "BASE_RANK", 0)
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
        base_rank = (node_rank or 0) * num_ranks if base_rank is None else base_rank
        node_rank = base_rank // num_ranks if node_rank is None else node_rank
        num_nodes = -(-world_size // num_ranks) if num_nodes is None else num_nodes
        if base_rank + num_ranks > world_size:
            violations.append(
                f"--world-size: expected at least base rank {base_rank} + {num_ranks} ranks of this node = {base_rank + num_ranks}, "
                f"found {world_size}{reader.origin('--world-size')}"
            )
        if (node_rank == 0) != (base_rank == 0):
            violations.append(f"--base-rank: node 0 has base rank 0, found node {node_rank} with base rank {base_rank}")
        if violations:
            raise ConfigError("\n".join(violations))
        assert port is not None, "it is among the violations"
        return Place(num_ranks, world_size, base_rank, node_rank, num_nodes, address, port)

    def _alone(self, num_ranks: int, reader: _Reader) -> Place:
        """A job of one node, which meets on loopback. An environment that describes a node of a larger job does not matter."""
        port = reader.number("--master-port", self.master_port, None, 1, 65535)
        for option, value in (("--node-rank", self.node_rank), ("--base-rank", self.base_rank)):
            if value:
                reader.violations.append(f"{option}: expected 0 in a job of one node, found {value}; set --nnodes")
        if reader.violations:
            raise ConfigError("\n".join(reader.violations))
        return Place(num_ranks, num_ranks, 0, 0, 1, LOOPBACK, port or 0)


class _Reader:
    """Takes numbers from options, else from the environment, and collects what is wrong with them."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._origins: dict[str, str] = {}
        self.violations: list[str] = []

    def number(
        self, option: str, given: int | None, variable: str | None, minimum: int, maximum: int | None = None
    ) -> int | None:
        """The number, None if there is none."""
        name, text = option, "" if given is None else str(given)
        if given is None and variable is not None and variable in self._environ:
            name, text = variable, self._environ[variable].strip()
            self._origins[option] = f" (from {variable} in the environment)"
        if not text:
            return None
        bounds = f"a whole number from {minimum} to {maximum}" if maximum else f"a whole number, at least {minimum}"
        value = int(text) if text.lstrip("-").isascii() and text.lstrip("-").isdigit() else None
        if value is None or value < minimum or (maximum is not None and value > maximum):
            self.violations.append(f"{name}: expected {bounds}, found {text!r}{self.origin(option)}")
            return None
        return value

    def origin(self, option: str) -> str:
        """Where an option's value comes from, if not from the command line."""
        return self._origins.get(option, "")
