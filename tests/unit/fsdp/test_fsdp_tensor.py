"""The fields of `parallelism_config["tp"]`, and the sizes of what is left for FSDP."""

import pytest
from torch.distributed.tensor.parallel import ColwiseParallel

from smpc.errors import ConfigError, ConfigTypeError
from smpc.fsdp import TensorConfig
from smpc.fsdp.tensor_slices import data_sizes

PLAN = {"model.up": ColwiseParallel()}


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ([], ConfigTypeError, "tp: expected a dict, found"),
        (
            {"tensor_parallel_degree": "2"},
            ConfigTypeError,
            "tensor_parallel_degree: expected a whole number, found '2'",
        ),
        ({"tensor_parallel_degree": 0}, ConfigError, "tensor_parallel_degree: expected at least 1, found 0"),
        (
            {"tensor_parallel_degree": 2},
            ConfigError,
            "layer_plan: expected layers to slice beside tensor_parallel_degree 2",
        ),
        ({"layer_plan": [PLAN]}, ConfigTypeError, "layer_plan: expected a dict of names and styles"),
        ({"layer_plan": {"up": "colwise"}}, ConfigTypeError, r"layer_plan\['up'\]: expected a style of torch"),
    ],
)
def test_fields_that_cannot_be(given, error, says):
    with pytest.raises(error, match=says):
        TensorConfig.read(given)
    assert TensorConfig.read({"tensor_parallel_degree": 2, "layer_plan": PLAN}) == TensorConfig(2, PLAN)


@pytest.mark.parametrize(
    ("world", "local", "slices", "expected"),
    [(8, 8, 2, (4, 4)), (8, 4, 2, (4, 2)), (8, 2, 4, (2, 1)), (8, 8, 3, None), (12, 6, 4, None), (8, 8, 16, None)],
)
def test_sizes_that_slices_leave(monkeypatch, world, local, slices, expected):
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": local}.items():
        monkeypatch.setenv(name, str(value))
    if expected is not None:
        assert data_sizes(slices) == expected
        return
    with pytest.raises(ConfigError, match=f"expected a divisor of the {world} processes, and of the {local} on a node"):
        data_sizes(slices)
