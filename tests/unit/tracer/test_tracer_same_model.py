"""Traces of one model whose Python goes through a set: the same in another order, and nothing else is."""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from smpc.tracer import Trace, record
from smpc.tracer.same_model import same_model


class Kinds(nn.Module):
    """As Hugging Face's models with layers of several kinds: masks and positions for each of them, in the order of a set."""

    def __init__(self, kinds, scale=2.0, change=None):
        super().__init__()
        self.kinds, self.scale, self.change = kinds, scale, change
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        for kind in kinds:
            self.register_buffer(f"{kind}_frequency", torch.ones(4) * len(kind))
        self.register_buffer("counter", torch.zeros(()))

    def forward(self, x):
        tables = {}
        for kind in self.kinds:
            tables[kind] = torch.cos(getattr(self, f"{kind}_frequency") * len(kind))
            if self.change is not None:
                x = x + self.change(self, kind, x)
        for i, layer in enumerate(self.layers):
            x = layer(x) * tables[("full", "sliding")[i % 2]] * self.scale
        return x


def trace(kinds, *args):
    torch.manual_seed(0)
    return record(Kinds(kinds, *args), (torch.ones(2, 4),))


ORDER, OTHER = ("full", "sliding"), ("sliding", "full")


def test_the_order_of_independent_operations_does_not_count():
    first, second = trace(ORDER), trace(OTHER)
    assert first.fingerprint != second.fingerprint
    assert same_model(first, second)
    assert same_model(Trace.from_json(first.to_json()), second)


def draws(self, kind, x):
    return torch.rand(4) * len(kind)


def writes(self, kind, x):
    self.counter.mul_(2).add_(len(kind))
    return self.counter


def rebinds(self, kind, x):
    self.counter = self.counter * 2 + len(kind)
    return x


@pytest.mark.parametrize("change", [draws, writes, rebinds])
def test_the_order_of_effects_counts(change):
    assert same_model(trace(ORDER, 2.0, change), trace(ORDER, 2.0, change))
    assert not same_model(trace(ORDER, 2.0, change), trace(OTHER, 2.0, change))


class Other(Kinds):
    pass


def test_another_model_is_another():
    first = trace(ORDER)
    assert not same_model(first, trace(OTHER, 3.0))
    assert not same_model(first, trace(ORDER, 2.0, lambda self, kind, x: x))
    assert not same_model(first, record(Kinds(OTHER), (torch.ones(3, 4),)))
    assert not same_model(first, record(Other(OTHER), (torch.ones(2, 4),)))
    frozen = Kinds(OTHER)
    frozen.layers[1].weight.requires_grad_(False)
    assert not same_model(first, record(frozen, (torch.ones(2, 4),)))
    swapped = Kinds(OTHER)
    swapped.layers = nn.ModuleList(list(swapped.layers)[:2] + [nn.Linear(4, 4, bias=False)] * 2)
    assert not same_model(first, record(swapped, (torch.ones(2, 4),)))


SCRIPT = """
import sys, torch, transformers
from smpc.tracer import record
config = transformers.Gemma3TextConfig(
    num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"], hidden_size=16, intermediate_size=16, vocab_size=9,
    num_attention_heads=2, num_key_value_heads=1, head_dim=8, max_position_embeddings=16, sliding_window=4, use_cache=False,
)
torch.manual_seed(0)
sys.stdout.write(record(transformers.Gemma3TextModel(config), (torch.arange(6)[None] + 1,)).to_json())
"""


@pytest.mark.slow
def test_gemma_is_one_model_under_every_hash_seed():
    """Its ranks were told that they recorded different models."""

    def recorded(seed):
        environment = {**os.environ, "PYTHONHASHSEED": str(seed), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, cwd="/", timeout=200
        )
        assert done.returncode == 0, done.stderr.decode()
        return Trace.from_json(done.stdout.decode())

    first, second = recorded(1), recorded(2)
    assert first.fingerprint != second.fingerprint
    assert same_model(first, second)
