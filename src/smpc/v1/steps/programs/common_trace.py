"""One trace for all ranks of a pipeline, where they have recorded the same operations in different orders."""

from __future__ import annotations

from smpc.tracer.ir import Trace
from smpc.tracer.same_model import same_model
from smpc.v1.session.control import Control


def one_trace(trace: Trace, control: Control) -> Trace | None:
    """Pipeline rank 0's trace, if the others differ from it only in order; else None. Collective, and the same on all ranks.

    The order of a set's strings differs between processes. More than fingerprints is sent only if traces differ.
    """
    text = control.broadcast_object(trace.to_json() if control.rank == 0 else None, 0)
    first = trace if control.rank == 0 else Trace.from_json(text)
    return first if all(control.gather(same_model(trace, first))) else None
