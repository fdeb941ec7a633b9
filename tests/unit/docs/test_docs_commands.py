"""Every block of README and docs that is not Python: commands run, configurations and device files are read."""

import json
import re
import shlex
import subprocess
import sys
import tomllib

import pytest
from documented import PAGES, all_blocks, commands
from locations import REPOSITORY

from smpc.cli import main
from smpc.config import Config
from smpc.partitioner import Instance
from smpc.partitioner.costs.device_file import find_devices

BLOCKS = [block for page in PAGES for block in all_blocks(page)]
COMMANDS = sorted({command for block in BLOCKS if block.language == "sh" for command in commands(block)})
PLANS = [c for c in COMMANDS if re.match(r"smpc (compile|diff|simulate|env)", c)]
# `smpc run` on this host. The slow test runs them, each with two ranks.
OTHERS = r"host[01]|srun|mpirun|NCCL|gpt2|^pip"  # need other machines, a GPU, or another environment
JOBS = [c for c in COMMANDS if re.search("smpc |torchrun ", c) and c not in PLANS and not re.search(OTHERS, c)]

SCRIPT = """
import os
import sys

sys.path.insert(0, os.path.dirname(__file__))
try:
    import smdistributed.modelparallel.torch as smp
except ImportError:
    import smpc.v1 as smp
import torch
from torch import nn


def build():
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(8)]
    return nn.Sequential(*layers), torch.zeros(64, 8)


factory = build


def main():
    config = {} if "SM_HP_MP_PARAMETERS" in os.environ else {"pipeline_parallel_degree": 2, "microbatches": 2}
    smp.init(config)
    model = smp.DistributedModel(build()[0])
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def train_step(model, x):
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    for _ in range(9):
        train_step(model, torch.ones(4, 8))
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
"""
EXPERTS = """
import torch
from transformers import MixtralConfig, MixtralForCausalLM

sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 4}
model = lambda: MixtralForCausalLM(MixtralConfig(**sizes, num_hidden_layers=8, vocab_size=32))
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where the commands of the pages find what they name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PATH", f"{sys.prefix}/bin", prepend=":")
    for name in ("train.py", "model.py"):
        (tmp_path / name).write_text(SCRIPT)
    (tmp_path / "module.py").write_text(EXPERTS)
    for name in ("package", "path/to", "before", "after", "logs", "examples"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "train.py").write_text(SCRIPT)
    for path in (REPOSITORY / "examples").glob("*.py"):
        (tmp_path / "examples" / path.name).write_text(path.read_text())
    (tmp_path / "program").write_text('#!/bin/sh\ntest -n "$RANK"\n')
    (tmp_path / "program").chmod(0o700)
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 64}
    config |= {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64}
    (tmp_path / "path" / "to" / "config.json").write_text(json.dumps(config))
    device = next(b.text for b in BLOCKS if b.page == "docs/planner.md" and b.language == "toml")
    (tmp_path / "my-device.toml").write_text(device)
    instance = next(b.text for b in BLOCKS if b.page == "docs/planner.md" and b.language == "json")
    (tmp_path / "bert_l-3_inference.json").write_text(instance)
    yield tmp_path
    for name in ("train", "model", "module"):
        sys.modules.pop(name, None)


def test_every_block_has_a_language():
    known = {"python", "sh", "json", "toml", "text"}
    assert [(b.page, b.line, b.language) for b in BLOCKS if b.language not in known] == []


@pytest.mark.matrix(5)
@pytest.mark.parametrize("command", PLANS)
def test_plans_are_made_as_the_pages_say(command, folder, capsys):
    words = shlex.split(command)
    target = words[words.index(">") + 1] if ">" in words else None
    words = words[: words.index(">")] if target else words
    if words[1] in ("diff", "simulate"):
        for name in ("before", "after", "."):
            assert main(["compile", "train.py:build", "-p", "2", "-m", "4", "--out", name]) == 0
        capsys.readouterr()
    assert main(words[1:]) == (1 if words[1] == "diff" and "differ" in capsys.readouterr().out else 0), command
    if target:
        assert json.loads(capsys.readouterr().out)


@pytest.mark.slow
@pytest.mark.parametrize("command", JOBS)
def test_jobs_run_as_the_pages_say(command, folder):
    command = re.sub(r"(-n|--nproc-per-node) [48]\b", r"\1 2", command).replace('"ddp": true', '"ddp": false')
    found = subprocess.run(
        ["bash", "-c", command], cwd=folder, capture_output=True, text=True, timeout=280, check=False
    )
    assert found.returncode == 0, f"{command}\n{found.stdout}\n{found.stderr}"


def test_other_commands_name_what_is_there():
    """What needs other machines, a GPU, or many minutes."""
    targets = re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    others = [command for command in COMMANDS if command not in PLANS and command not in JOBS]
    for command in others:
        for path in re.findall(r"\b(?:benchmarks|examples|tests)\S*", command):
            assert (REPOSITORY / path).exists(), command
        for target in re.findall(r"^make ([a-z-]+)", command):
            assert target in targets, command
        assert subprocess.run(["bash", "-n", "-c", command], check=False).returncode == 0, command
    assert 10 <= len(others) <= 30


def test_configurations_and_devices_are_read(folder):
    read = []
    for block in BLOCKS:
        if block.language == "json":
            found = json.loads(block.text)
            Instance.from_json(block.text) if "nodes" in found else Config.parse(found)
            read.append(block.page)
        elif block.language == "toml":
            (folder / "mine.toml").write_text(next(b.text for b in BLOCKS if b.language == "toml"))
            (folder / "found.toml").write_text(block.text)
            ranks = tomllib.loads(block.text).get("ranks", [])
            assert len(find_devices("found.toml", 4 if ranks else 1)) == (4 if ranks else 1)
            read.append(block.page)
    assert len(read) == len([b for b in BLOCKS if b.language in ("json", "toml")])
