"""What forward leaves in the containers of its inputs, in a trace and in the script's own containers."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from smpc.codegen.rewrite.outputs import return_left_inputs, return_written_inputs, written_inputs
from smpc.errors import StepError, TraceError
from smpc.tracer import Trace, flatten, record
from smpc.tracer.constants import Ref, SameInput
from smpc.tracer.left_inputs import LeftInputs


@dataclass
class Batch:
    x: torch.Tensor
    extra: list


class Changes(nn.Module):
    def __init__(self, change):
        super().__init__()
        self.scale, self.change = nn.Parameter(torch.ones(3)), change

    def forward(self, given):
        x = given.x if isinstance(given, Batch) else given["x"]
        y = x * self.scale
        self.change(given, x, y)
        return y


def reassign(given, x, y):
    given["x"] = y
    given["n"] += 1


def grow(given, x, y):
    given.extra.append({"y": y, "x": x})


def write(given, x, y):
    with torch.no_grad():
        x[0].fill_(2)


def nothing(given, x, y):
    given["x"] = x


def mapping():
    return {"x": torch.zeros(2, 3), "n": 1, "rest": ("a", [torch.ones(1)])}


def holding(trace, name):
    return trace.left.unflatten(trace.left_leaves)[0][0][name]


def test_a_trace_says_what_is_left_and_reads_it_back():
    trace = record(Changes(reassign), (mapping(),))
    assert (holding(trace, "x"), holding(trace, "n")) == (trace.output_leaves[0], 2)
    assert trace.left.unflatten(trace.left_leaves)[0][0]["rest"] == (SameInput(2), [SameInput(3)])
    assert Trace.from_json(trace.to_json()) == trace
    returned = return_left_inputs(trace)
    assert (returned.left, returned.left_leaves) == (trace.left, ())
    assert returned.output_leaves == (*trace.output_leaves, *trace.left_leaves)


@pytest.mark.parametrize("change", [nothing, write])
def test_inputs_whose_containers_stay_are_not_in_it(change):
    trace = record(Changes(change), (mapping(),))
    assert trace.left is None
    assert return_left_inputs(trace) == trace
    assert bool(written_inputs(trace)) == (change is write)


def test_what_is_written_is_copied_after_the_last_write():
    trace = return_written_inputs(record(Changes(write), (mapping(),)))
    (name,) = trace.written
    copied = trace.node(trace.output_leaves[-1].name)
    writer = max(i for i, node in enumerate(trace.nodes) if node.mutates)
    assert (copied.target, copied.inputs) == ("torch.Tensor.clone", (name,))
    assert trace.position(copied.name) == writer + 1
    assert trace.calls[0].last == len(trace.nodes)
    assert trace.storages[copied.storage] == copied.spec.num_bytes


def give_other_memory(given, x, y):
    x.data = 2 * x


def test_an_input_may_not_get_other_memory():
    trace = record(Changes(give_other_memory), (mapping(),))
    with pytest.raises(TraceError, match=r"forward sets \.data of an input \(test_tracer_left_inputs"):
        return_written_inputs(trace)


def test_a_container_that_is_held_twice_is_refused():
    trace = record(Changes(grow), (Batch(torch.zeros(2, 3), [[], []]),))
    leaves = [0 if isinstance(leaf, Ref) else leaf for leaf in trace.left_leaves]
    left, inner = LeftInputs(trace.inputs, trace.left, leaves), []
    with pytest.raises(StepError, match="found a list that they hold twice"):
        left.put_into(((Batch(torch.zeros(2, 3), [inner, inner]),), {}))
    left.put_into(((Batch(torch.zeros(2, 3), [inner, []]),), {}))


def test_it_is_put_into_the_containers_themselves():
    trace = record(Changes(reassign), (mapping(),))
    given, y = mapping(), torch.ones(2, 3)
    rest, first = given["rest"], given["rest"][1]
    leaves = [y if leaf == trace.output_leaves[0] else leaf for leaf in trace.left_leaves]
    LeftInputs(trace.inputs, trace.left, leaves).put_into(((given,), {}))
    assert given["x"] is y
    assert given["n"] == 2
    assert given["rest"] is rest
    assert given["rest"][1] is first


def test_objects_grow_and_tensors_are_written():
    trace = record(Changes(grow), (Batch(torch.zeros(2, 3), []),))
    given, y = Batch(torch.zeros(2, 3), []), torch.ones(2, 3)
    x, extra = given.x, given.extra
    leaves = [y if leaf == trace.output_leaves[0] else leaf for leaf in trace.left_leaves]
    written = LeftInputs(trace.inputs, trace.left, leaves, [(0, 3 * y)]).put_into(((given,), {}))
    assert given.extra is extra
    assert [list(each) for each in extra] == [["y", "x"]]
    assert extra[0]["y"] is y
    assert given.x is x is written[0]
    assert torch.equal(x, 3 * y)


def test_other_inputs_than_the_recordings_are_refused():
    trace = record(Changes(grow), (Batch(torch.zeros(2, 3), []),))
    given = Batch(torch.zeros(2, 3), [1])
    left = LeftInputs(trace.inputs, trace.left, trace.left_leaves)
    with pytest.raises(StepError, match=r"expected them to be .* still, found"):
        left.put_into(((given,), {}))
    assert flatten(given)[0][1:] == [1]
