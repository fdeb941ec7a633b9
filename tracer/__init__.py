"""Records a model: one run of its own Python over fake tensors, written down as a `Trace`."""

if not __name__.startswith("smpc."):
    raise ImportError(f"import smpc.tracer, not {__name__}: the folders at the top of the repository are parts of smpc")

from smpc.tracer.constants import Opaque, Ref, TraceDevice
from smpc.tracer.fx import to_fx
from smpc.tracer.ir import Autocast, ModuleCall, Node, NodeKind, StateSpec, TensorSpec, Trace
from smpc.tracer.operations.opaque import register_shape_rule
from smpc.tracer.record import mark_leaf, record
from smpc.tracer.replay import replay, verify
from smpc.tracer.structure import Structure, flatten

__all__ = [
    "Autocast",
    "ModuleCall",
    "Node",
    "NodeKind",
    "Opaque",
    "Ref",
    "StateSpec",
    "Structure",
    "TensorSpec",
    "Trace",
    "TraceDevice",
    "flatten",
    "mark_leaf",
    "record",
    "register_shape_rule",
    "replay",
    "to_fx",
    "verify",
]
