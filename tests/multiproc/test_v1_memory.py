"""Peak memory of training scripts: a step function adds nothing to what the plan predicts, whatever it returns.

The bytes that live on every rank are counted in the second step and in the optimizer's step after it, and compared with the plan.
"""

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from executor_harness import run_workers
from test_planner_memory import build
from torch import nn
from transformers.modeling_outputs import CausalLMOutput

import smpc.v1 as smp
from smpc.executor.measure.spans import LiveBytes

NUM_SAMPLES = 16


@dataclass
class Kept:
    loss: Any
    parts: Any


def loss_of(model, batch):
    if batch.is_floating_point():
        output = model(batch)
        return output.square().mean(), output
    output = model(input_ids=batch, labels=batch)
    return output.loss, output.logits


@smp.step
def train_step(model, batch):
    """README's."""
    loss, _ = loss_of(model, batch)
    model.backward(loss)
    return loss


@smp.step
def returns_much(model, batch):
    loss, logits = loss_of(model, batch)
    model.backward(loss)
    last = logits[:, -1, :2]
    return {
        "output": CausalLMOutput(loss=loss, logits=last),
        "kept": [Kept(loss.view(1), (last.square(), batch[:, 0]))],
    }


def peaks(rank, folder, name, config, step_name):
    """Predicted and measured bytes of both ranks."""
    smp.init({"pipeline_parallel_degree": 2, **config})
    step, (module, (args, kwargs)) = globals()[step_name], build(name)
    batch = args[0] if args else kwargs["input_ids"]
    batch = torch.cat([batch, batch])[:NUM_SAMPLES] if smp.pp_rank() == 0 else torch.empty(0, dtype=batch.dtype)
    model = smp.DistributedModel(module.train())
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters()))
    for number in range(3):
        if number == 1:
            model.observe(1)  # memory in this step, times in the next one
        optimizer.zero_grad()
        step(model, batch)
        optimizer.step()
    lines = {line.what: line for line in model.report().lines}
    return [(lines[f"rank {r}, peak"].predicted, lines[f"rank {r}, peak"].measured) for r in range(2)]


CASES = [
    ("llama", 2, "interleaved", "returns_much"),
    ("gpt2", 16, "interleaved", "train_step"),
    ("unet", 4, "simple", "train_step"),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in itertools.product(
            ("gpt2", "unet", "t5", "llama"), (2, 4, 16), ("interleaved", "simple"), ("train_step", "returns_much")
        )
        # The batch, which a plan does not count on the last rank, is 8% of the peak of one image at a time.
        if case[:3] != ("unet", 16, "interleaved")
    ),
]


@pytest.mark.long
@pytest.mark.matrix(1)
@pytest.mark.parametrize(("name", "microbatches", "pipeline", "step"), CASES)
def test_peaks_of_step_functions_are_those_of_the_plan(tmp_path, name, microbatches, pipeline, step):
    """README's script took 1.4 times what was predicted on the last rank: its losses kept every microbatch's stage input."""
    found = run_workers(peaks, 2, tmp_path, name, {"microbatches": microbatches, "pipeline": pipeline}, step)[0]
    for rank, (predicted, measured) in enumerate(found):
        assert measured == pytest.approx(predicted, rel=0.05), f"rank {rank}"


class Wide(nn.Module):
    """Keeps much for the backward pass, and returns little."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 2048), nn.Linear(2048, 1)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


@smp.step
def evaluate(model, x):
    output = model(x)
    return {"mean": output.mean(), "first": [output[:1]]}


def single(rank, folder, microbatches):
    """Peak bytes of a step that evaluates with autograd on, without a pipeline."""
    smp.init({"pipeline_parallel_degree": 1, "microbatches": microbatches})
    model = smp.DistributedModel(Wide())
    with LiveBytes(model.parameters()) as counter:
        evaluate(model, torch.ones(microbatches * 64, 8))
    return counter.peak


def test_evaluation_without_a_pipeline_keeps_one_graph_at_a_time(tmp_path):
    peaks = []
    for microbatches in (1, 8):
        (folder := tmp_path / str(microbatches)).mkdir()
        peaks += run_workers(single, 1, folder, microbatches)
    assert peaks[1] < 1.1 * peaks[0]
