"""What crosses between stages, on small traces written by hand."""

from __future__ import annotations

import pytest

from smpc.errors import PartitionError
from smpc.partitioner.costs.device_file import find_device
from smpc.partitioner.costs.node_costs import CostModel
from smpc.partitioner.graph.plan import INPUTS
from smpc.partitioner.graph.trace_graph import check_assignment
from smpc.partitioner.planner import plan_from_assignment
from smpc.tracer import ModuleCall, Node, NodeKind, Ref, StateSpec, Structure, TensorSpec, Trace

WIDE = TensorSpec((1024, 1024), "float32", (1024, 1), True)
MASK = TensorSpec((1024, 1024), "float32", (1024, 1), False)
INPUT = TensorSpec((1024,), "float32", (1,), False)


def node(name, *reads, kind=NodeKind.CALL_FUNCTION, spec=WIDE, storage=0, **fields):
    target = fields.pop("target", f"torch.{name}")
    return Node(name, kind, target, tuple(Ref(read) for read in reads), spec=spec, storage=storage, **fields)


def trace_of(nodes, outputs, state=(), sizes=()):
    numbered = []
    for i, item in enumerate(nodes):
        fields = {name: getattr(item, name) for name in item.__dataclass_fields__}
        numbered.append(Node(**{**fields, "storage": i}))
    leaf, call = Structure(), ModuleCall("", "Model", -1, 0, len(nodes), Structure(), (), Structure(), ())
    storages = tuple(item.spec.num_bytes if item.spec else 0 for item in nodes)
    leaves = tuple(Ref(name) for name in outputs)
    return Trace("Model", True, tuple(numbered), (call,), leaf, (), leaf, leaves, tuple(state), storages)


def x(name="x", **fields):
    return node(name, kind=NodeKind.PLACEHOLDER, target=name, spec=INPUT, **fields)


def edges(trace, assignment, num_stages):
    plan = plan_from_assignment(trace, assignment, num_stages=num_stages, in_flight=(1,) * num_stages)
    return [(edge.source, edge.destination, edge.values) for edge in plan.edges], plan


def test_a_value_travels_along_the_chain_of_its_consumers():
    trace = trace_of(
        [x(), node("a", "x"), node("b", "a"), node("c", "b"), node("d", "c", "a"), node("e", "d", "a")], ["e"]
    )
    found, plan = edges(trace, {"a": 0, "b": 1, "c": 1, "d": 2, "e": 3}, 4)
    assert found == [
        (INPUTS, 0, ("x",)),
        (0, 1, ("a",)),
        (1, 2, ("a", "c")),
        (2, 3, ("a", "d")),
    ]
    assert [edge.num_bytes for edge in plan.edges] == [4096, WIDE.num_bytes, 2 * WIDE.num_bytes, 2 * WIDE.num_bytes]


def test_stages_that_do_not_use_a_value_are_skipped():
    trace = trace_of([x(), node("a", "x"), node("b", "a"), node("c", "b"), node("d", "c", "a")], ["d"])
    found, _ = edges(trace, {"a": 0, "b": 1, "c": 2, "d": 3}, 4)
    assert (0, 1, ("a",)) in found
    assert (1, 3, ("a",)) in found
    assert (2, 3, ("c",)) in found


def test_outputs_go_to_the_last_stage_and_inputs_to_whoever_reads_them():
    trace = trace_of([x(), x("y"), node("a", "x"), node("b", "a", "x")], ["a", "b", "y"])
    found, _ = edges(trace, {"a": 0, "b": 1}, 2)
    assert found == [(INPUTS, 0, ("x",)), (INPUTS, 1, ("x", "y")), (0, 1, ("a",))]


def test_an_early_output_travels_through_its_consumers_to_the_end():
    trace = trace_of([x(), node("a", "x"), node("b", "a"), node("c", "b")], ["a", "c"])
    found, _ = edges(trace, {"a": 0, "b": 1, "c": 2}, 3)
    assert found == [(INPUTS, 0, ("x",)), (0, 1, ("a",)), (1, 2, ("a", "b"))]


def test_a_mask_is_recomputed_where_it_is_used():
    nodes = [
        x(),
        node("row", "x", spec=INPUT, bytes_moved=8192),
        node("mask", "row", spec=MASK, bytes_moved=4 << 20),
        node("a", "x", "mask"),
        node("b", "a", "mask"),
    ]
    found, plan = edges(trace_of(nodes, ["b"]), {"row": 0, "mask": 0, "a": 0, "b": 1}, 2)
    assert found == [(INPUTS, 0, ("x",)), (INPUTS, 1, ("x",)), (0, 1, ("a",))]
    assert plan.stages[1].recomputed == ("row", "mask")
    assert plan.stages[0].recomputed == ()


def test_a_mask_that_takes_longer_than_its_transfer_is_sent():
    nodes = [x(), node("mask", "x", spec=MASK, flops=10**12), node("a", "x"), node("b", "a", "mask")]
    found, plan = edges(trace_of(nodes, ["b"]), {"mask": 0, "a": 0, "b": 1}, 2)
    assert (0, 1, ("mask", "a")) in found
    assert plan.stages[1].recomputed == ()


def test_parameters_never_cross():
    weight = StateSpec(("w", "tied"), INPUT, is_parameter=True, storage=1)
    nodes = [x(), node("w", kind=NodeKind.GET_ATTR, target="w", spec=INPUT), node("a", "x", "w"), node("b", "a", "w")]
    found, plan = edges(trace_of(nodes, ["b"], [weight]), {"a": 0, "b": 1}, 2)
    assert found == [(INPUTS, 0, ("x",)), (0, 1, ("a",))]
    assert [stage.parameters for stage in plan.stages] == [("w",), ("w",)]
    assert [(item.name, item.stages) for item in plan.shared_parameters] == [("w", (0, 1))]


def test_a_returned_parameter_is_held_by_the_last_stage():
    weight = StateSpec(("w",), INPUT, is_parameter=True, storage=1)
    nodes = [x(), node("w", kind=NodeKind.GET_ATTR, target="w", spec=INPUT), node("a", "x"), node("b", "a")]
    _, plan = edges(trace_of(nodes, ["b", "w"], [weight]), {"a": 0, "b": 1}, 2)
    assert [stage.parameters for stage in plan.stages] == [(), ("w",)]


def test_activations_count_what_is_saved_and_received():
    # a is saved by b, so stage 1 holds it; c is returned by the last stage. Two a's wait on stage 0 over gloo, where the message of
    # the first is known to have arrived only when its gradient comes back, when the second has been made.
    trace = trace_of([x(), node("a", "x"), node("b", "a", saved=(1,)), node("c", "b", saved=())], ["c"])
    peaks = []
    for device in ("h100", "cpu"):
        cost_model = CostModel.of(find_device(device), 2)
        assignment = {"a": 0, "b": 1, "c": 1}
        plan = plan_from_assignment(trace, assignment, num_stages=2, in_flight=(2, 1), cost_model=cost_model)
        assert [stage.activation_bytes_per_microbatch for stage in plan.stages] == [0, 2 * WIDE.num_bytes]
        peaks.append(plan.stages[0].peak_memory_bytes)
    assert peaks[1] - peaks[0] == WIDE.num_bytes


@pytest.mark.parametrize(
    ("assignment", "num_stages", "text"),
    [
        ({"a": 1, "b": 0, "c": 1}, 2, r"a \(stage 1\) is read by b \(stage 0\)"),
        ({"a": 0, "b": 0, "c": 0}, 2, "stage 1 is empty"),
        ({"a": 0, "b": 1}, 2, "no stage for node c"),
        ({"a": 0, "b": 1, "c": 1, "x": 0}, 2, "node x computes nothing"),
        ({"a": 0, "b": 1, "c": 2}, 2, "node c is on stage 2"),
    ],
)
def test_impossible_assignments_are_refused(assignment, num_stages, text):
    trace = trace_of([x(), node("a", "x"), node("b", "a"), node("c", "b")], ["c"])
    with pytest.raises(PartitionError, match=text) as caught:
        check_assignment(trace, assignment, num_stages)
    assert "\n" not in str(caught.value)


def test_a_tuple_does_not_cross():
    trace = trace_of([x(), node("a", "x", spec=None), node("b", "a")], ["b"])
    with pytest.raises(PartitionError, match="share a stage"):
        check_assignment(trace, {"a": 0, "b": 1}, 2)
    check_assignment(trace_of([x(), node("a", "x"), node("b", "a")], ["b"]), {"a": 0, "b": 1}, 2)


def test_writers_share_a_stage():
    trace = trace_of([x(), node("a", "x"), node("b", "a", mutates=("a",)), node("c", "a")], ["c"])
    with pytest.raises(PartitionError, match="in-place"):
        check_assignment(trace, {"a": 0, "b": 1, "c": 1}, 2)
    check_assignment(trace, {"a": 0, "b": 0, "c": 1}, 2)
