"""`smpc compile --verify`: what it says, its exit status, and what it refuses."""

import dataclasses
import json
import sys

import pytest

from smpc.cli import main, verify
from smpc.compile import passes as compiling

FACTORY = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return torch.relu(self.linear(x)) * 2.0

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block() for _ in range(4)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x) + 1.0
        return x

def build():
    return Net(), torch.ones(8, 8)

def meta():
    with torch.device("meta"):
        return Net(), torch.ones(8, 8)
"""
GPT2 = {"model_type": "gpt2", "n_layer": 2, "n_embd": 8, "n_head": 2, "vocab_size": 16, "n_positions": 8}


@pytest.fixture
def smpc(tmp_path, capsys, monkeypatch):
    """Runs a target with options in this process; returns status, stdout and stderr."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "verify_factory.py").write_text(FACTORY)
    (tmp_path / "config.json").write_text(json.dumps(GPT2))

    def run(target, *options):
        path = tmp_path / "config.json" if target == "gpt2" else f"{tmp_path / 'verify_factory.py'}:{target}"
        status = main(["compile", str(path), *options])
        out, err = capsys.readouterr()
        return status, out, err

    yield run
    sys.modules.pop("verify_factory", None)


def errors(text):
    return [line for line in text.splitlines() if line.startswith("smpc: error: ")]


def test_programs_that_are_right(smpc):
    status, out, err = smpc("build", "-p", "2", "-m", "4", "--verify")
    assert status == 0
    assert not errors(err)
    assert out.splitlines()[-1] == "verified: 12 results of one microbatch are those of plain PyTorch, bit by bit"


def test_the_plan_alone_stays_alone_and_is_the_same(smpc):
    _, plain, _ = smpc("build", "-p", "2", "-m", "4", "--json")
    status, out, err = smpc("build", "-p", "2", "-m", "4", "--json", "--verify")
    assert (status, out) == (0, plain)
    assert "verified: 12 results" in err


def test_a_hugging_face_configuration_gets_weights_and_tokens(smpc):
    options = ("-p", "2", "-m", "2", "--input", "input_ids=int64[4,8]", "--input", "labels=int64[4,8]", "--json")
    _, plain, _ = smpc("gpt2", *options)
    status, out, err = smpc("gpt2", *options, "--verify")
    assert status == 0, err
    assert out == plain
    assert "results of one microbatch are those of plain PyTorch, bit by bit" in err


def test_a_mask_of_ones_is_compared_within_rounding(smpc):
    options = ("--input", "input_ids=int64[4,8]", "--input", "attention_mask=int64[4,8]", "--json")
    status, _, err = smpc("gpt2", "-p", "2", "-m", "2", *options, "--verify")
    assert status == 0, err
    assert "because the program is for every attention_mask" in err


def test_programs_that_are_wrong_end_with_status_1_and_write_nothing(smpc, monkeypatch, tmp_path):
    original = compiling.record_guarded

    def record(*args, **kwargs):
        recording = original(*args, **kwargs)
        trace = recording.trace
        broken = next(n for n in trace.nodes if n.target == "torch.Tensor.add" and trace.calls[n.call].fqn == "")
        wrong = dataclasses.replace(broken, target="torch.Tensor.sub")
        nodes = tuple(wrong if node is broken else node for node in trace.nodes)
        return dataclasses.replace(recording, trace=dataclasses.replace(trace, nodes=nodes))

    monkeypatch.setattr(compiling, "record_guarded", record)
    folder = tmp_path / "out"
    status, out, err = smpc("build", "-p", "2", "-m", "4", "--verify", "--out", str(folder))
    assert status == 1
    assert out == ""
    assert not folder.exists()
    lines = errors(err)
    assert (
        "expected the compiled programs to do what the model does, bit by bit, found that 8 of 12 results" in lines[0]
    )
    assert "forward order: the model (verify_factory.Net), in its own code before it calls blocks.1" in lines[1]
    assert "what to do" in lines[-1]
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("target", "options", "says"),
    [
        ("build", ("-p", "2", "-t", "2"), "--verify: not with tensor_parallel_degree above 1"),
        ("build", ("--auto", "--world-size", "2"), "--auto: chooses these itself or does without: --verify"),
        ("meta", ("-p", "2"), "--verify: expected a model and inputs with values, found tensors on the meta device"),
    ],
)
def test_what_cannot_be_verified_is_refused(smpc, target, options, says):
    status, out, err = smpc(target, *options, "--verify")
    assert (status, out) == (2, "")
    (line,) = errors(err)
    assert says in line


def test_a_model_that_does_not_fit_is_refused_before_it_is_made(smpc, monkeypatch):
    monkeypatch.setattr(verify, "_available", lambda: 1000)
    status, _, err = smpc("gpt2", "-p", "2", "--input", "input_ids=int64[4,8]", "--verify")
    assert status == 2
    (line,) = errors(err)
    assert "--verify: config.json takes 0.0 GB" in line
    assert "verify a configuration of fewer layers" in line
