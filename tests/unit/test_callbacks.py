"""The ready-made callbacks: what the line says, where it is shown, and what TensorBoard's own reader finds."""

import dataclasses
import io
import sys

import pytest
import torch
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import smpc
from smpc.errors import ConfigError
from smpc.executor.transport import loopback_transports

INFO = smpc.StepInfo(12, True, 0.25, 0.5, 16, 2048, 0.125, 3.14159, 3 << 30, 0)


def shown(console, callback, *infos):
    for info in infos:
        callback(info)
    return console.file.getvalue()


def plain():
    return Console(file=io.StringIO(), width=200)


def test_the_line():
    text = smpc.ProgressLine(100).text(INFO)
    assert text == "step 12/100  loss 3.1416  250 ms  32 samples/s  4.1 K tokens/s  idle 12.5%  3.0 GiB"
    assert smpc.ProgressLine().text(smpc.StepInfo(3, True, 0.5, 0.5)) == "step 3  500 ms"


def test_where_it_is_shown():
    console = plain()
    other, evaluation = dataclasses.replace(INFO, rank=1), dataclasses.replace(INFO, training=False)
    assert not shown(console, smpc.ProgressLine(console=console), other, evaluation)
    later = [dataclasses.replace(INFO, step=step) for step in range(5)]
    lines = shown(console, smpc.ProgressLine(5, console=console, seconds=1e9), *later).splitlines()
    assert [line.split("  ")[0] for line in lines] == ["step 0/5", "step 4/5"]  # the first, and the last
    console = plain()
    assert len(shown(console, smpc.ProgressLine(console=console, seconds=0), *later).splitlines()) == 5


def test_on_a_terminal_it_is_one_line():
    console = Console(file=io.StringIO(), width=100, force_terminal=True, legacy_windows=False)
    text = shown(console, smpc.ProgressLine(5, console=console), *(dataclasses.replace(INFO, step=i) for i in range(5)))
    assert all(f"step {i}/5" in text for i in range(5))
    assert text.count("\n") == 1


def test_tensorboard_reads_back_what_was_written(tmp_path):
    callback = smpc.TensorBoard(tmp_path / "runs")
    infos = [dataclasses.replace(INFO, step=step, loss=1 / (step + 1)) for step in range(3)]
    for info in (*infos, smpc.StepInfo(3, False, 0.125, 0.125)):
        callback(info)
    callback.close()
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name == "rank0"
    reader = EventAccumulator(str(folder))
    reader.Reload()
    assert [(e.step, e.value) for e in reader.Scalars("smpc/loss")] == [
        (i, pytest.approx(1 / (i + 1))) for i in range(3)
    ]
    assert [e.value for e in reader.Scalars("smpc/samples_per_second")] == [32.0] * 3
    assert [(e.step, e.value) for e in reader.Scalars("smpc/evaluation/step_seconds")] == [(3, 0.125)]
    assert "smpc/evaluation/loss" not in reader.Tags()["scalars"]


def test_without_tensorboard(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    with pytest.raises(ConfigError, match="pip install tensorboard"):
        smpc.TensorBoard(tmp_path)


def test_mfu_is_the_share_of_the_peak(tmp_path):
    info = dataclasses.replace(INFO, flops=1e12, seconds_between=0.5)
    callback = smpc.TensorBoard(tmp_path / "runs", peak_flops=8e12)
    callback(info)
    callback.close()
    reader = EventAccumulator(str(tmp_path / "runs" / "rank0"))
    reader.Reload()
    assert [e.value for e in reader.Scalars("smpc/mfu")] == [0.25]
    assert [e.value for e in reader.Scalars("smpc/flops_per_second")] == [pytest.approx(2e12)]


@pytest.mark.filterwarnings("ignore")  # of wandb's own
def test_wandb_keeps_the_last_step(tmp_path):
    pytest.importorskip("wandb")
    callback = smpc.WandB(peak_flops=8e12, mode="offline", project="smpc", dir=str(tmp_path))
    callback(dataclasses.replace(INFO, rank=1))
    assert not list(tmp_path.iterdir()), "rank 0 alone has a run"
    callback(dataclasses.replace(INFO, flops=1e12, seconds_between=0.5, loss=1.5))
    run = callback._run
    callback.close()
    assert run.summary["smpc/mfu"] == 0.25
    assert run.summary["smpc/loss"] == 1.5
    assert list(tmp_path.rglob("*.wandb"))


def test_without_wandb(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="pip install wandb"):
        smpc.WandB(project="gpt")


def test_flops_are_those_that_torch_counts():
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 4))
    batch, steps = torch.randn(8, 8), []
    with FlopCounterMode(display=False) as counter:
        model(batch)
        forward = counter.get_total_flops()
        model(batch).sum().backward()
    compilation = smpc.compile_model(model, batch, pipeline_parallel_degree=1, microbatches=2)
    runtime = smpc.Runtime(model, rank=0, transport=loopback_transports(1)[0])
    runtime.register_step_callback(steps.append)
    program = runtime.install(compilation)
    microbatches = [((part,), {}) for part in batch.chunk(2)]
    runtime.run(program, microbatches, lambda m, output: [(output.sum(), None)], training=True)
    with torch.no_grad():
        runtime.run(program, microbatches, lambda m, output: None, training=False)
    assert [step.flops for step in steps] == [counter.get_total_flops() - forward, forward]
