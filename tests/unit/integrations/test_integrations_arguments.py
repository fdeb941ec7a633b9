"""What Hugging Face's Trainer and accelerate cannot do with a pipeline is refused before anything begins, all of it at once."""

import importlib
import sys

import pytest
from torch import nn

from smpc.errors import ConfigError, ConfigUnsupportedError, UsageError

pytest.importorskip("accelerate")

from transformers import TrainingArguments

from smpc.integrations.accelerate import PipelineAccelerator
from smpc.integrations.huggingface import PipelineTrainer


@pytest.fixture
def model():
    return nn.Linear(2, 2)


def test_what_a_pipeline_cannot_follow_is_one_error(tmp_path, model):
    args = TrainingArguments(str(tmp_path), bf16=True, use_cpu=True, auto_find_batch_size=True)
    with pytest.raises(ConfigUnsupportedError) as caught:
        PipelineTrainer({"pipeline_parallel_degree": 2}, model_init=lambda: model, args=args)
    first, *lines = str(caught.value).splitlines()
    assert first == "PipelineTrainer:"
    assert [line.split(":")[0] for line in lines] == ["model_init", "bf16", "auto_find_batch_size"]


def test_the_pipeline_comes_first(tmp_path, model):
    args = TrainingArguments(str(tmp_path), use_cpu=True)
    with pytest.raises(
        ConfigError, match=r"expected the configuration of smp.init as the first argument, found Linear"
    ):
        PipelineTrainer(model, args)
    with pytest.raises(UsageError, match=r"expected the configuration of a pipeline; .* or call smp.init before"):
        PipelineTrainer(model=model, args=args)


def test_an_accelerator_needs_a_session():
    with pytest.raises(UsageError, match=r"call smp.init\(config\) first, on every rank"):
        PipelineAccelerator()


@pytest.mark.parametrize(
    ("name", "package", "extra"),
    [
        ("accelerate", "accelerate", "accelerate"),
        ("huggingface", "transformers", "hf,accelerate"),
        ("lightning", "lightning.pytorch", "lightning"),
    ],
)
def test_a_package_that_is_not_there_is_named(monkeypatch, name, package, extra):
    monkeypatch.delitem(sys.modules, f"smpc.integrations.{name}", raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ModuleNotFoundError) as caught:
        importlib.import_module(f"smpc.integrations.{name}")
    assert str(caught.value) == f"smpc.integrations.{name} needs {package}: pip install 'smpc[{extra}]'"
