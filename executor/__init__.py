"""Runs programs: the interpreter and its transports."""

if not __name__.startswith("smpc."):
    raise ImportError(
        f"import smpc.executor, not {__name__}: the folders at the top of the repository are parts of smpc"
    )

from smpc.executor.data_parallel import StageReplicas
from smpc.executor.failure import FailureMonitor
from smpc.executor.interpreter import Interpreter
from smpc.executor.loopback import run_loopback

__all__ = ["FailureMonitor", "Interpreter", "StageReplicas", "run_loopback"]
