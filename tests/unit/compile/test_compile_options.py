"""Options are declared once: configuration, functions and command have the same ones, with the same bounds."""

import dataclasses
import inspect

import pytest
import torch
from torch import nn

import smpc
from smpc.cli.compile import compile_command
from smpc.compile import PipelineOptions
from smpc.config import Config
from smpc.config.key import keys_of
from smpc.config.planner import PlannerKeys
from smpc.errors import ConfigError

MODEL, X = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.zeros(4, 4)
DECLARED = {field.name: (field, key) for field, key in keys_of(PipelineOptions)}


@pytest.mark.parametrize("function", [smpc.compile_model, smpc.partition])
def test_functions_list_and_describe_every_option(function):
    parameters = inspect.signature(function).parameters
    for name, (field, key) in DECLARED.items():
        expected = inspect.Parameter.empty if key.required else field.default
        assert parameters[name].default == expected
        assert f"{name}: " in function.__doc__
    assert not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


def test_the_command_has_every_option_with_a_flag():
    flagged = {name for name, (_, key) in DECLARED.items() if key.flag is not None}
    assert flagged <= set(inspect.signature(compile_command).parameters)
    assert set(DECLARED) - flagged == {"manual", "leaf_modules"}


@pytest.mark.parametrize("function", [smpc.compile_model, smpc.partition])
def test_unknown_and_missing_names(function):
    with pytest.raises(TypeError, match=rf"{function.__name__}\(\).*'microbatch'; did you mean 'microbatches'"):
        function(MODEL, X, pipeline_parallel_degree=2, microbatch=2)
    with pytest.raises(TypeError, match="unexpected keyword argument 'xyz'; expected some of pipeline_parallel_degree"):
        function(MODEL, X, pipeline_parallel_degree=2, xyz=2)
    with pytest.raises(TypeError, match=r"missing required keyword-only argument: 'pipeline_parallel_degree'"):
        function(MODEL, X)


def test_what_a_script_does_not_say_is_the_default_of_a_call():
    """But for the weight of memory, which scripts have of SMP."""
    assert PipelineOptions.of(Config(2, active_microbatches=1)) == PipelineOptions(
        2, active_microbatches=1, memory_weight=0.8
    )


def test_settings_become_options():
    config = Config.parse(
        {
            "partitions": 2,
            "microbatches": 4,
            "schedule": "interleaved-1f1b",
            "virtual_pipeline_degree": 3,
            "optimize": "speed",
            "tensor_parallel_degree": 2,
            "tensor_parallel_plan": {"fc": "colwise"},
            "tensor_parallel_outputs": "loss, logits",
            "prescaled_batch": True,
            "ddp": True,
        }
    )
    options = PipelineOptions.of(config, device="cpu", microbatches=8)
    assert (options.schedule, options.virtual_pipeline_degree) == ("interleaved-1f1b", 3)
    assert (options.memory_weight, options.active_microbatches) == (0.2, 4)
    assert (options.tensor_parallel_plan, options.tensor_parallel_outputs) == ({"fc": "colwise"}, ("loss", "logits"))
    assert (options.device, options.microbatches) == ("cpu", 8)


@pytest.mark.parametrize(
    ("name", "value"),
    [(f.name, key.minimum - 1) for f, key in keys_of(PlannerKeys) if key.minimum is not None],
)
def test_bounds_hold_in_both(name, value):
    text = f"^{name}: expected"
    with pytest.raises(ConfigError, match=text):
        PipelineOptions(**{name: value})
    if name != "virtual_pipeline_degree":  # 0 is the default of a script
        with pytest.raises(ConfigError, match=text):
            Config(**{"pipeline_parallel_degree": 2, name: value})


def test_sequences_are_kept_as_tuples():
    options = PipelineOptions(recompute=["a.*"], kernels=["rms_norm"], leaf_modules=["b"])
    assert (options.recompute, options.kernels, options.leaf_modules) == (("a.*",), ("rms_norm",), ("b",))
    assert dataclasses.replace(options, microbatches=2).kernels == ("rms_norm",)
