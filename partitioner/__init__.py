"""Turns a trace into a plan: costs, coarsening, exact solvers, checks."""

if not __name__.startswith("smpc."):
    raise ImportError(
        f"import smpc.partitioner, not {__name__}: the folders at the top of the repository are parts of smpc"
    )

from smpc.partitioner.instance import Instance, InstanceSolution, Link, Node, Processor, solve_instance

__all__ = ["Instance", "InstanceSolution", "Link", "Node", "Processor", "solve_instance"]
