"""What a rank's operations read and write is what their own inputs and outputs say, as in the trace that was recorded."""

import pytest
from tensor_models import gpt2, llama

from smpc.codegen.rewrite.context_parallel.rewrite import share_sequence
from smpc.codegen.rewrite.tensor_parallel.choose_layouts import choose
from smpc.codegen.rewrite.tensor_parallel.rewrite import rewrite
from smpc.tracer.ir import NodeKind
from smpc.tracer.record import record


def moved(trace):
    """(name, bytes by the trace, bytes of its inputs and its output) of torch's own operations."""
    for node in trace.nodes:
        if node.kind is not NodeKind.CALL_FUNCTION or not node.target.startswith("torch.") or not node.bytes_moved:
            continue
        specs = [trace.node(name).spec for name in node.inputs] + [node.spec]
        if None not in specs:
            yield node.name, node.bytes_moved, sum(spec.touched_bytes for spec in specs)


@pytest.mark.parametrize("make", [gpt2, llama])
@pytest.mark.parametrize("way", ["tensor", "context"])
def test_slices_count_as_slices_and_whole_tensors_as_whole(make, way):
    model, inputs = make()
    trace = record(model, (), inputs)
    own = rewrite(trace, choose(trace, 2)).trace if way == "tensor" else share_sequence(trace, 2).sharded.trace
    recorded = {name: (found, expected) for name, found, expected in moved(trace)}
    compared = 0
    for name, found, expected in moved(own):
        if name in recorded and recorded[name][0] == recorded[name][1]:  # else it was not counted so before, either
            assert found == expected, name
            compared += expected < recorded[name][1]
    assert compared > 10
