"""Runs programs: the interpreter and its transports."""

if not __name__.startswith("smpc."):
    raise ImportError(
        f"import smpc.executor, not {__name__}: the folders at the top of the repository are parts of smpc"
    )

from smpc.executor.failure.monitor import FailureMonitor
from smpc.executor.program.interpreter import Interpreter, run_loopback
from smpc.executor.replicas.data_parallel import StageReplicas

__all__ = ["FailureMonitor", "Interpreter", "StageReplicas", "run_loopback"]
