"""`smpc compile --verify`: what it says, its exit status, and what it refuses."""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from smpc.cli import main, verify
from smpc.cli.verify import rank as verified_rank
from smpc.cli.verify import ranks as verify_ranks
from smpc.compile import passes as compiling
from smpc.errors import ConfigError

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

def drawing():
    model = Net()
    model.blocks.append(nn.Dropout(0.5))
    return model, torch.ones(8, 8)

class Cancelling(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 64), nn.Linear(64, 8)

    def forward(self, x):
        return ((self.second(torch.relu(self.first(x))) + 1e6) - 1e6).square().mean()

def cancelling():
    return Cancelling(), torch.linspace(-1, 1, 64).view(8, 8)

class Faint(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.second(torch.relu(self.first(x))) * 1e-12

def faint():
    return Faint(), torch.linspace(-1, 1, 64).view(8, 8)

class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 16), nn.utils.weight_norm(nn.Linear(16, 8), dim=1)

    def forward(self, x):
        return self.second(self.first(x).tanh())

def normed():
    return Normed(), torch.linspace(-1, 1, 64).view(8, 8)

def meta():
    with torch.device("meta"):
        return Net(), torch.ones(8, 8)
"""
SMALL = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2,
    "intermediate_size": 24, "vocab_size": 32, "max_position_embeddings": 16,
}  # fmt: skip
CONFIGS = {
    "small": SMALL,
    "mixture": SMALL | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt2": {"model_type": "gpt2", "n_layer": 2, "n_embd": 8, "n_head": 2, "vocab_size": 16, "n_positions": 8},
}


@pytest.fixture
def smpc(tmp_path, capsys, monkeypatch):
    """Runs a target with options in this process; returns status, stdout and stderr."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "verify_factory.py").write_text(FACTORY)
    for name, config in CONFIGS.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(config))

    def run(target, *options):
        path = tmp_path / f"{target}.json" if target in CONFIGS else f"{tmp_path / 'verify_factory.py'}:{target}"
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
        ("drawing", ("-p", "1", "-t", "2"), "--verify: expected a model that draws no random numbers"),
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
    monkeypatch.setattr(verify, "available_memory", lambda: 1000)
    status, _, err = smpc("gpt2", "-p", "2", "--input", "input_ids=int64[4,8]", "--verify")
    assert status == 2
    (line,) = errors(err)
    assert "--verify: gpt2.json takes 0.0 GB" in line
    assert "verify a configuration of fewer layers" in line


@pytest.mark.long
def test_ranks_that_share_operations_train_one_step_as_a_script_does(smpc):
    """Gradients far smaller than the rounding of the parameters, too, are exact."""
    status, out, err = smpc("faint", "-t", "2", "-m", "2", "--verify")
    assert status == 0, err
    assert out.splitlines()[-1].startswith(
        "verified: the loss and 4 gradients and buffers of one step on 2 ranks are those of plain PyTorch, within 1e-05 of the largest"
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
def test_weights_that_a_hook_computes_are_verified_on_ranks(smpc):
    """The model could not be copied, and ranks that had slices met the graph of the whole weight."""
    status, out, err = smpc("normed", "-t", "2", "-m", "2", "--verify")
    assert status == 0, err
    assert "verified: the loss and 5 gradients and buffers of one step on 2 ranks" in out


def test_a_rank_whose_factory_makes_another_model():
    module = nn.Linear(4, 4)
    values = {name: tensor.clone() for name, tensor in verified_rank.verified_state_of(module).items()}
    verified_rank._take_verified_values(module, {name: tensor + 1 for name, tensor in values.items()})
    torch.testing.assert_close(module.weight.detach(), values["weight"] + 1)
    with pytest.raises(ConfigError, match=r"found that weight is \(4, 4\) on a rank and \(8, 4\) in the command"):
        verified_rank._take_verified_values(module, {**values, "weight": torch.zeros(8, 4)})
    with pytest.raises(ConfigError, match=r"found that bias is \(4,\) on a rank and missing in the command"):
        verified_rank._take_verified_values(module, {"weight": values["weight"]})


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ("-t", "2", "-d", "2", "--fully-shard"),
        ("-p", "2", "-t", "2", "-d", "2", "--shard-optimizer-state"),
        ("-p", "2", "-t", "2", "--schedule", "zb-h1"),
        ("-c", "2", "-p", "2"),
        ("-c", "2", "-d", "2", "--sharded-data-parallel-degree", "2"),
    ],
)
def test_every_kind_of_degree_is_verified(smpc, options):
    inputs = ("--input", "input_ids=int64[4,8]", "--input", "labels=int64[4,8]")
    status, _, err = smpc("small", *inputs, *options, "-m", "2", "--verify", "--json")
    assert status == 0, err
    assert "verified: the loss and " in err


@pytest.mark.slow
@pytest.mark.parametrize("options", [("-d", "2", "-e", "2"), ("-p", "2", "-c", "2", "-e", "2")])
def test_experts_on_ranks_are_verified(smpc, options):
    inputs = ("--input", "input_ids=int64[4,8]", "--input", "labels=int64[4,8]")
    status, _, err = smpc("mixture", *inputs, *options, "-m", "2", "--verify", "--json")
    assert status == 0, err
    assert "verified: the loss and " in err


def test_gradients_of_ranks_that_are_wrong_end_with_status_1(smpc, monkeypatch):
    def ranks(job, model, inputs):
        found = verify_ranks._of_one_process(model, inputs, 2)
        found["blocks.1.linear.bias"] = found["blocks.1.linear.bias"] * 1.001
        return found

    monkeypatch.setattr(verify_ranks, "_results_of_verified_ranks", ranks)
    status, out, err = smpc("build", "-t", "2", "-m", "2", "--verify")
    assert (status, out) == (1, "")
    lines = errors(err)
    assert "expected 2 ranks to do what plain PyTorch does, found that 1 of 9 tensors differ" in lines[0]
    assert "blocks.1.linear.bias: in 3 of 8 elements, by at most 0.00539 where the largest value is 5.39" in lines[1]


def test_a_parameter_that_ranks_do_not_return_is_an_error(smpc, monkeypatch):
    def ranks(job, model, inputs):
        found = verify_ranks._of_one_process(model, inputs, 2)
        del found["blocks.1.linear.bias"]
        return found

    monkeypatch.setattr(verify_ranks, "_results_of_verified_ranks", ranks)
    status, out, err = smpc("build", "-t", "2", "-m", "2", "--verify")
    assert (status, out) == (1, "")
    assert "found no blocks.1.linear.bias" in errors(err)[0]


def test_differences_that_plain_pytorch_has_as_well_are_rounding(smpc, monkeypatch):
    """A sum of large numbers that cancel: float32 itself is far from float64, and so are ranks that add in another order."""

    def ranks(job, model, inputs):
        found = verify_ranks._of_one_process(model.double(), verify_ranks._doubled_inputs_to_verify(inputs), 2)
        model.float()
        return {name: value.float() for name, value in found.items()}

    monkeypatch.setattr(verify_ranks, "_results_of_verified_ranks", ranks)
    status, out, err = smpc("cancelling", "-t", "2", "-m", "2", "--verify")
    assert status == 0, err
    assert out.splitlines()[-1].endswith("within rounding, as float64 shows")


def test_ranks_that_fail_say_why(smpc, monkeypatch):
    monkeypatch.setattr(verify_ranks, "_RUN", "import sys; print('no such rank', file=sys.stderr); sys.exit(3)")
    status, out, err = smpc("build", "-t", "2", "-m", "2", "--verify")
    assert (status, out) == (1, "")
    assert "its 2 ranks fail in a first step" in errors(err)[0]
    assert "no such rank" in err


def test_ranks_that_this_machine_cannot_hold_are_refused(smpc, monkeypatch):
    monkeypatch.setattr(verify_ranks, "available_memory", lambda: 1_000_000_000)
    status, out, err = smpc("build", "-t", "2", "-m", "2", "--verify")
    assert (status, out) == (2, "")
    assert "--verify: 2 ranks take about 1.4 GB, and this machine has 1.0 GB left" in errors(err)[0]


@pytest.mark.slow
def test_a_signal_ends_the_ranks_and_leaves_no_values_behind(tmp_path):
    wait = 'import os, time\ntime.sleep(60 if "RANK" in os.environ else 0)\n'  # a rank takes a minute to make the model
    (tmp_path / "verify_factory.py").write_text(wait + FACTORY)
    run = "import sys; from smpc.cli import main; sys.exit(main())"
    options = ["compile", f"{tmp_path / 'verify_factory.py'}:build", "-t", "2", "-m", "2", "--verify"]
    command = subprocess.Popen(
        [sys.executable, "-c", run, *options], env={**os.environ, "TMPDIR": str(tmp_path)}, stderr=subprocess.PIPE
    )
    deadline = time.monotonic() + 100
    while not ranks_of(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert ranks_of(tmp_path)
    command.send_signal(signal.SIGTERM)
    command.communicate(timeout=30)
    assert command.returncode == 128 + signal.SIGTERM
    assert not list(tmp_path.glob("smpc_verify_*"))
    while ranks_of(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not ranks_of(tmp_path)


def ranks_of(folder):
    """Processes that run a rank of a job with files in the folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().split(b"\0")
            if b"smpc.cli.verify.rank" in words and any(str(folder).encode() in word for word in words):
                found.append(path.parent.name)
    return found
