"""Step arguments from pipeline rank 0 merged into those of the last rank."""

import pickle

import pytest
import torch

from smpc.errors import StepError
from smpc.v1.steps.arguments import Plain, Slot, form_of, merge_arguments


class Unknown:
    pass


def sent(arguments):
    form, tensors = form_of(arguments)
    return pickle.loads(pickle.dumps(form)), tensors


def test_rank_0s_tensors_take_the_place_of_anything():
    x, y = torch.ones(2), torch.zeros(3)
    form, tensors = sent({"model": Unknown(), "batch": {"x": x, "n": [3, "t"]}, "y": y, "flag": True})
    assert form.skeleton == {"batch": {"x": Slot(0), "n": [Plain(3, True), Plain("t", True)]}, "y": Slot(1)}
    model = Unknown()
    own = {"model": model, "batch": None, "y": torch.empty(0), "flag": False}
    merged = merge_arguments(form, own, tensors)
    assert merged == {"model": model, "batch": {"x": x, "n": [3, "t"]}, "y": y, "flag": False}


def test_plain_leaves_of_a_like_container_are_the_last_ranks_own():
    form, tensors = sent({"batch": {"x": torch.ones(2), "n": 3, "o": Unknown()}})
    own = Unknown()
    merged = merge_arguments(form, {"batch": {"x": torch.empty(0), "n": 7, "o": own}}, tensors)
    assert (merged["batch"]["n"], merged["batch"]["o"]) == (7, own)


def test_a_tensor_that_occurs_twice_is_sent_once():
    x = torch.ones(2)
    form, tensors = form_of({"ids": x, "labels": x, "both": [x, x]})
    assert len(tensors) == 1
    assert form.skeleton == {"ids": Slot(0), "labels": Slot(0), "both": [Slot(0), Slot(0)]}


def test_what_cannot_be_sent_and_is_not_there_is_an_error():
    form, tensors = form_of({"batch": [torch.ones(1), Unknown()]})
    with pytest.raises(StepError, match=r"argument batch\[1\]"):
        merge_arguments(form, {"batch": None}, tensors)


def test_forms_are_equal_while_only_values_of_tensors_change():
    first, _ = form_of({"x": [torch.ones(2), 1]})
    assert form_of({"x": [torch.zeros(2), 1]})[0] == first
    assert form_of({"x": [torch.zeros(3), 1]})[0] != first
    assert form_of({"x": [torch.zeros(2), 2]})[0] != first
