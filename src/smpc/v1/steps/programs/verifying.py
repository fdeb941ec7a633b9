"""The key `verify`: pipeline rank 0 runs the first microbatch in plain PyTorch and as compiled, and all ranks learn whether the results
agree.

It happens in the first step, after its programs are made and before the model is divided among the ranks: the one moment at which a rank
has the whole model and its programs. Nothing of the model, of the script's data or of the random generators is changed by it.

    rank 0                                              others
    -----------------------------------------------------------------
    eager, loopback, comparison                         wait
    result                                      <->     result          VerificationError on all of them, or the step goes on

The step function is not called: its code around the model is not compiled. Backward starts from the model's outputs
(`smpc.verification.runs`).
"""

from __future__ import annotations

import warnings

import torch
from torch import nn

from smpc.compile.result import Compilation
from smpc.executor.failure.start import Phase
from smpc.nn.init.delayed import is_delayed
from smpc.sample_inputs import Inputs
from smpc.tracer.record import Recording
from smpc.v1.session.control import Control
from smpc.v1.session.state import Session
from smpc.v1.session.step_errors import describe, raise_first
from smpc.v1.session.wait_limits import enter
from smpc.v1.steps.programs.signature import Signature
from smpc.verification import Conditions, verify_compilation

_ELSEWHERE = "smpc compile --verify checks the same model in a smaller configuration"


def verify_first(
    module: nn.Module,
    session: Session,
    control: Control,
    signature: Signature,
    compiled: tuple[Compilation, Recording],
    inputs: Inputs | None,
) -> None:
    """Compare the first program with the model, on pipeline rank 0's first microbatch; None elsewhere, and without data. Collective.

    Raises VerificationError on all ranks of the pipeline. If it cannot be done, rank 0 warns, and training continues.
    """
    enter(Phase.STEP, "verifying the programs on pipeline rank 0")
    failure: Exception | None = None
    if inputs is not None:
        try:
            skipped = _why_not(module) or _verified(module, session, signature, compiled, inputs)
            if skipped:
                warnings.warn(f"verify: the programs have not been compared with the model: {skipped}", stacklevel=2)
        except Exception as error:
            failure = error
    raise_first(control.gather(describe(failure)), failure)


def _why_not(module: nn.Module) -> str:
    """Why the whole model cannot be run here; "" if it can."""
    if is_delayed(module):
        return f"its initialization is delayed, so that no rank ever has all of it; {_ELSEWHERE}"
    return ""


def _verified(
    module: nn.Module,
    session: Session,
    signature: Signature,
    compiled: tuple[Compilation, Recording],
    inputs: Inputs,
) -> str:
    """Compare; why that could not be done, "" if it was."""
    compilation, recording = compiled
    conditions = Conditions(session.device, signature.grad_enabled, signature.autocast)
    try:
        verify_compilation(
            module, compilation, inputs, conditions, environment=recording.environment, shown=signature.ones
        )
    except torch.OutOfMemoryError:
        return f"the whole model does not fit on {session.device}, with two sets of gradients; {_ELSEWHERE}"
    return ""
