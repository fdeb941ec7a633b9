"""smp.model_creation: distribution, delay and dtype in one context."""

import pytest
import torch
from torch import nn

import smpc.v1 as smp
from smpc.nn.distribution.distribute import distribute
from smpc.nn.distribution.registry import Registry
from smpc.nn.parallel import TensorParallel


def kinds(model):
    return [type(module).__name__ for module in distribute(model, Registry(), TensorParallel())]


def test_what_is_created_is_distributed_and_of_the_dtype():
    with smp.model_creation(tensor_parallelism=True, dtype=torch.bfloat16):
        model = nn.Sequential(nn.Linear(4, 4))
    assert torch.get_default_dtype() is torch.float32
    assert kinds(model) == ["DistributedLinear"]
    assert model[0].weight.dtype is torch.bfloat16
    with smp.model_creation():
        model = nn.Sequential(nn.Linear(4, 4))
    assert kinds(model) == ["Linear"]
    assert model[0].weight.dtype is torch.float32


def test_it_decorates_functions_and_restores_the_dtype_after_errors():
    @smp.model_creation(dtype=torch.float64)
    def make():
        raise RuntimeError(torch.get_default_dtype())

    with pytest.raises(RuntimeError, match="float64"):
        make()
    assert torch.get_default_dtype() is torch.float32


def test_the_configuration_says_whether_parameters_are_delayed():
    smp.init({"pipeline_parallel_degree": 1, "delayed_parameter_initialization": True})
    try:
        with smp.model_creation(tensor_parallelism=True):
            model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        assert model[0].weight.is_meta
        model = smp.DistributedModel(model)
        assert model.get_module()[0].weight.isfinite().all()
        assert torch.equal(model.state_dict()["1.weight"], torch.ones(4))
    finally:
        smp.shutdown()


@pytest.mark.parametrize(
    ("arguments", "expected", "text"),
    [
        ({"tensor_parallelism": 1}, TypeError, "expected tensor_parallelism to be a bool, found int 1"),
        ({"dtype": "float16"}, TypeError, "dtype to be a torch.dtype or None, found 'float16'"),
        ({"dtype": torch.int8}, ValueError, "floating-point dtype, found torch.int8"),
    ],
)
def test_bad_arguments(arguments, expected, text):
    with pytest.raises(expected, match=text), smp.model_creation(**arguments):
        pass


def test_arguments_without_effect_are_named():
    unused = smp.model_creation(tensor_parallelism=True, fused_softmax=True, activation="relu")
    with pytest.warns(UserWarning, match="fused_softmax has no effect: torch chooses"), unused:
        pass
    two = smp.model_creation(tensor_parallelism=True, fused_softmax=True, zero_init=True)
    with pytest.warns(UserWarning, match="fused_softmax") as told, two:
        pass
    [one] = told
    assert str(one.message).count("has no effect: ") == 2
    plain = smp.model_creation(activation="relu")
    with pytest.warns(UserWarning, match="activation have no effect: tensor_parallelism is False"), plain:
        pass
