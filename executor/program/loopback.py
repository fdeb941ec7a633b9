"""Runs the programs of all pipeline ranks in one process and one thread.

Ranks take turns; each runs until it needs a message that has not been sent. The result equals real processes', bit by
bit. For tests, debugging and training on one device.
"""

from __future__ import annotations

from collections.abc import Sequence

from smpc.errors import ScheduleError
from smpc.executor.program.handler import Inputs, OnOutput
from smpc.executor.program.interpreter import Interpreter


def run_loopback(interpreters: Sequence[Interpreter], inputs: Inputs, on_output: OnOutput | None) -> None:
    """One step on all ranks; `interpreters[r]` is rank r's, over the transports of `loopback_transports`.

    `inputs` go to rank 0 and `on_output` to the last stage's rank, as in `Interpreter.run`. ScheduleError if no rank
    can continue.
    """
    try:
        for rank, interpreter in enumerate(interpreters):
            interpreter.start(inputs if rank == 0 else None, on_output)
        while not all(interpreter.finished for interpreter in interpreters):
            progress = [_run_until_blocked(interpreter) for interpreter in interpreters]
            if not any(progress):
                raise ScheduleError(_deadlock(interpreters))
        for interpreter in interpreters:
            interpreter.finish()
    except BaseException:
        for interpreter in interpreters:
            interpreter.abandon()
            interpreter.close()
        raise


def _run_until_blocked(interpreter: Interpreter) -> bool:
    progress = False
    while interpreter.advance():
        progress = True
    return progress


def _deadlock(interpreters: Sequence[Interpreter]) -> str:
    waiting = [interpreter.where() for interpreter in interpreters if not interpreter.finished]
    lines = "\n".join(f"  {where} waits for a message" for where in waiting)
    return f"deadlock: no rank can go on\n{lines}\nverify the programs before running them"
