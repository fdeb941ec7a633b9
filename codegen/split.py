"""Cuts a traced model into stages: the code of each stage, and the channels between them. `smpc.codegen.stage_source` writes the code.

>>> codes = split(trace, plan)                  # doctest: +SKIP
>>> print(codes[1].source)                      # doctest: +SKIP
class Stage1(StageModule):
    def forward(self, h_0, labels):
        h_1 = self.transformer.h[1](h_0)
        ...
"""

from __future__ import annotations

from collections.abc import Collection

from smpc.codegen.program import Channel, StageCode
from smpc.codegen.stage_source import StageWriter, TraceFacts
from smpc.errors import CodegenError
from smpc.partitioner.graph.plan import INPUTS, Plan
from smpc.tracer.ir import Trace


def split(trace: Trace, plan: Plan, units: Collection[str] = ()) -> tuple[StageCode, ...]:
    """Stage codes in stage order. `units`: names of modules that run what is inside of them. CodegenError for a plan of another trace."""
    _check_same(trace, plan)
    program = TraceFacts(trace, plan, units)
    return tuple(StageWriter(program, index).write() for index in range(len(plan.stages)))


def plan_channels(trace: Trace, plan: Plan) -> tuple[Channel, ...]:
    """One channel for each edge of the plan, with the specs of its values. CodegenError for a plan of another trace."""
    _check_same(trace, plan)
    ranks = {stage.index: stage.rank for stage in plan.stages} | {INPUTS: 0}
    channels = []
    for edge in plan.edges:
        specs = []
        for name in edge.values:
            spec = trace.node(name).spec
            assert spec is not None, f"edge {edge.index} carries {name}, which is no tensor"
            specs.append(spec)
        channels.append(
            Channel(
                edge.index,
                edge.source,
                edge.destination,
                ranks[edge.source],
                ranks[edge.destination],
                edge.values,
                tuple(specs),
            )
        )
    return tuple(channels)


def _check_same(trace: Trace, plan: Plan) -> None:
    if plan.trace_fingerprint != trace.fingerprint:
        raise CodegenError(
            f"the plan was made for trace {plan.trace_fingerprint[:12]}, found trace {trace.fingerprint[:12]}; plan again"
        )
