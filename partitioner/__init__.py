"""Turns a trace into a plan: costs, coarsening, exact solvers, checks."""

if not __name__.startswith("smpc."):
    raise ImportError(
        f"import smpc.partitioner, not {__name__}: the folders at the top of the repository are parts of smpc"
    )

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from smpc.partitioner.instances.instance import Instance, Link, Node, Processor
    from smpc.partitioner.instances.placement_file import read_instance
    from smpc.partitioner.instances.solve_instance import InstanceSolution, solve_instance

__all__ = ["Instance", "InstanceSolution", "Link", "Node", "Processor", "read_instance", "solve_instance"]
_MODULES = {"InstanceSolution": "solve_instance", "solve_instance": "solve_instance", "read_instance": "placement_file"}


def __getattr__(name: str) -> Any:
    """Names are loaded when they are first used, so that `smpc.partitioner.costs.device` needs no torch."""
    if name not in __all__:
        raise AttributeError(f"module 'smpc.partitioner' has no attribute {name!r}")
    module = _MODULES.get(name, "instance")
    return getattr(importlib.import_module(f"smpc.partitioner.instances.{module}"), name)
