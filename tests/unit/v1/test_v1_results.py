"""Results of microbatches as results of a step, and their way through bytes; StepOutput against the same arithmetic on a stacked tensor."""

import collections
import gc
import pickle
import threading
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from transformers.modeling_outputs import CausalLMOutput

from smpc.errors import StepError
from smpc.v1.steps.results import StepOutput, StepResults, pack, take, unpack
from smpc.v1.steps.results import read_results as read_returned


@dataclass
class Result:
    loss: Any
    note: Any = None


def read_results(values, step_name, *, detach=True) -> StepResults:
    return read_returned([take(value, detach) for value in values], step_name)


def over_the_wire(values):
    results = read_results(values, "f")
    form = pickle.loads(pickle.dumps(results.form()))
    payload = pack(results.tensors, torch.device("cpu"))
    assert payload.numel() == form.num_bytes
    return form.build(payload)


def test_structures_are_kept():
    def value(m):
        return {
            "loss": torch.tensor(float(m)),
            "tuple": (torch.full((2,), m), m, None),
            "output": CausalLMOutput(logits=torch.full((1, 2), float(m))),
            "data": Result(torch.tensor([m]), "note"),
            "sometimes": None if m else 1,
            "never": None,
        }

    result = over_the_wire([value(0), value(1)])
    assert isinstance(result["loss"], StepOutput)
    assert result["loss"].outputs == [torch.tensor(0.0), torch.tensor(1.0)]
    assert result["tuple"][1:] == ([0, 1], [None, None])
    assert result["never"] == [None, None]
    assert type(result["output"]) is CausalLMOutput
    assert torch.equal(result["output"].logits.concat(), torch.tensor([[0.0, 0.0], [1.0, 1.0]]))
    assert result["data"].note == ["note", "note"]
    assert torch.equal(result["data"].loss.stack(), torch.tensor([[0], [1]]))
    assert result["sometimes"] == [1, None]


@pytest.mark.parametrize("value", [None, 3, [], ()])
def test_results_without_tensors(value):
    assert over_the_wire([value, value]) == ([3, 3] if value == 3 else value)


def test_every_dtype_survives_the_bytes():
    dtypes = [torch.bool, torch.complex64, torch.bfloat16, torch.uint8, torch.float64, torch.int16, torch.float8_e4m3fn]
    values = [torch.arange(3).to(dtype) for dtype in dtypes] + [torch.empty(0, 2), torch.arange(6).view(2, 3).t()]
    result = over_the_wire([values])
    for value, (got,) in zip(values, result, strict=True):
        assert (got.dtype, got.shape) == (value.dtype, value.shape)
        assert torch.equal(
            got.double() if got.dtype.itemsize == 1 else got, value.double() if value.dtype.itemsize == 1 else value
        )


@pytest.mark.parametrize("detach", [True, False])
def test_a_column_of_a_tensor_survives_the_bytes(detach):
    """`ids[:, 0]` was "stride(-1) must be 1 to view Long as Byte" on the last rank."""
    ids = torch.arange(6).view(2, 3)
    results = read_results([(ids[:, 0], ids[1:, 1]), (ids[:, 2], ids[:1, 0])], "f", detach=detach)
    got = unpack(pack(results.tensors, torch.device("cpu")), results.form().specs)
    assert [tensor.tolist() for tensor in got] == [[0, 3], [2, 5], [4], [0]]


def test_microbatches_that_return_different_structures():
    with pytest.raises(StepError, match=r"(?s)step function f must return the same structure.*microbatch 0.*in 1"):
        read_results([{"a": torch.ones(1)}, {"b": torch.ones(1)}], "f")
    with pytest.raises(StepError, match=r"tensor itself.*value itself"):
        read_results([torch.ones(1), 1], "f")


def test_history_is_kept_or_not():
    loss = torch.ones(1, requires_grad=True) * 2
    results = read_results([{"loss": loss, "n": 1}], "f", detach=False)
    assert results.join()["loss"].outputs[0] is loss
    detached = read_results([{"loss": loss, "n": 1}], "f").join()
    assert detached["loss"].outputs == [torch.tensor([2.0])]
    assert detached["loss"].outputs[0].grad_fn is None
    assert detached["n"] == [1]


class Held:
    pass


def test_nothing_of_a_microbatch_is_kept_but_what_was_returned():
    """A returned loss kept the graph of every microbatch to the end of the step, a returned view the tensor that it was cut from."""
    source = torch.ones(4, 1000, requires_grad=True)
    large = source * 2
    graph, storage = (
        weakref.ref(source.untyped_storage()),
        weakref.ref(large.untyped_storage()),
    )  # the graph holds its leaf
    holder = Held()
    holder.parts = [large[:, 0], {"sum": large.sum()}]
    returned = take({"output": CausalLMOutput(loss=large.mean(), logits=large[0]), "holder": holder}, detach=True)
    del large, holder, source
    gc.collect()
    assert graph() is None
    assert storage() is None
    assert all(not leaf.requires_grad for leaf in returned.leaves)
    assert [leaf.shape for leaf in returned.leaves] == [(), (1000,), (4,), ()]


def test_whole_tensors_are_not_copied():
    logits = torch.ones(4, 10, requires_grad=True) * 2
    (shifted,), (whole,) = take(logits[:3], detach=True).leaves, take(logits, detach=True).leaves
    assert shifted.data_ptr() == whole.data_ptr() == logits.data_ptr()


@pytest.mark.parametrize("members", [{1, 2}, {torch.ones(1), torch.zeros(1)}, {None}, set()])
def test_sets_are_refused_with_their_places(members):
    """Of values they ended in "unhashable type: 'list'"; of tensors, one microbatch's took the place of another's."""
    value = {"x": (members, 1), "y": frozenset(members)}
    with pytest.raises(
        StepError, match=r"^step function f: .* found as \['x'\]\[0\] a set, as \['y'\] a frozenset; .*: return a list"
    ):
        read_results([value, value], "f")
    with pytest.raises(StepError, match="found as the whole value a set"):
        read_results([members, members], "f")


class ReadOnly(dict):
    def __setitem__(self, key, value):
        raise KeyError("read only")


def test_classes_that_cannot_be_rebuilt_are_refused_with_their_places():
    @dataclass
    class Local:
        loss: Any

    local = read_results([(Result(1), Local(torch.ones(1)))], "f")
    with pytest.raises(
        StepError,
        match=r"as \[1\] \S+<locals>.Local\] \(TraceError: expected a class .*; return tensors and values in lists",
    ):
        local.join()
    unnamed = read_results([collections.namedtuple("Other", "loss")(1)], "f")
    with pytest.raises(StepError, match=r"\[as the whole value \S+:Other\] \(TraceError"):
        unnamed.join()
    with pytest.raises(StepError, match=r"ReadOnly\] \(KeyError: 'read only'\)"):
        read_results([ReadOnly(loss=1)], "f").join()


def test_leaves_that_cannot_be_sent_are_refused_with_their_places():
    value = {"loss": torch.ones(1), "lock": threading.Lock(), "more": [iter(x for x in "ab")]}
    results = read_results([value, value], "f")
    assert results.join()["lock"] == [value["lock"]] * 2  # without a pipeline it stays where it is
    found = r"as \['lock'\] a lock \(TypeError: .*\); as \['more'\]\[0\] a generator \(TypeError: .*\); return tensors and plain"
    with pytest.raises(StepError, match=found):
        results.form()


class Counter:
    n = 0


def test_a_form_is_not_equal_to_that_of_other_values():
    """Forms compared the values themselves: an array is no truth value, a changed object equals itself, and 1 is True."""
    counter = Counter()

    def form(value):
        return read_results([value, value], "f").form()

    before = form(counter)
    counter.n += 1
    assert form(counter) != before
    assert form(counter) == form(counter)
    assert form(np.arange(3)) == form(np.arange(3))
    assert form(np.arange(3)) != form(np.arange(3) + 1)
    assert form(1) != form(True)


def test_reductions():
    tensors = [torch.randn(3, 2) for _ in range(4)]
    output = StepOutput(tensors)
    stacked = torch.stack(tensors)
    torch.testing.assert_close(output.reduce_mean(), stacked.mean(0))
    assert torch.equal(output.average(), output.reduce_mean())
    torch.testing.assert_close(output.reduce_sum(), stacked.sum(0))
    assert torch.equal(output.stack(), stacked)
    assert torch.equal(output.concat(), stacked.view(12, 2))


def test_it_is_a_sequence():
    tensors = [torch.tensor(1), torch.tensor(2)]
    output = StepOutput(tensors)
    assert len(output) == 2
    assert output[1] is tensors[1]
    assert list(output) == output.outputs == tensors
    assert repr(output) == "StepOutput([tensor(1), tensor(2)])"
    assert StepOutput([torch.tensor(1), torch.tensor(2)]).reduce_mean().item() == 1.5


def test_an_item_is_the_mean_over_the_microbatches():
    output = StepOutput([torch.tensor(1.0), torch.tensor([[4.0]])])
    assert output.item() == 2.5
    with pytest.raises(StepError, match=r"item: expected tensors of one element, found shape \[2\]"):
        StepOutput([torch.ones(()), torch.ones(2)]).item()


def test_detach():
    output = StepOutput([torch.ones(1, requires_grad=True) * 2])
    assert output[0].requires_grad
    assert not output.detach()[0].requires_grad


def test_scalars_have_no_axis_to_concatenate():
    with pytest.raises(StepError, match="use stack"):
        StepOutput([torch.tensor(1.0)]).concat()
