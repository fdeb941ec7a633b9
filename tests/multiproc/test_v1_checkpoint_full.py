"""Full checkpoints of scripts: plain safetensors, Hugging Face's folders there and back, files of torch.save."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import zoo
from checkpoint_jobs import Job, resume, same
from executor_harness import run_workers
from safetensors.torch import load_file
from v1_harness import batches, feed, preload, start, train_step

import smpc.v1 as smp
from smpc.errors import CheckpointError


@pytest.fixture(scope="module", autouse=True)
def server():
    preload()


def train_gpt2(rank, folder, path):
    _, model, optimizer, kwargs = start()
    data = batches(kwargs)
    optimizer.zero_grad()
    train_step(model, feed(data[0]), 1.0)
    optimizer.step()
    smp.save_checkpoint(str(path), "export", partial=False, model=model, optimizer=optimizer, user_content={"step": 1})
    plain = zoo.build("gpt2")[0]
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        return plain.eval()(input_ids=data[1]).logits, data[1]


OPEN = """
import sys, torch
from transformers import AutoModelForCausalLM
ids = torch.load(sys.argv[2])
torch.set_num_threads(1)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
with torch.no_grad():
    torch.save(model(input_ids=ids).logits, sys.argv[3])
assert not any(name.split(".")[0] == "smpc" for name in sys.modules)
"""


def resume_gpt2(rank, folder, path):
    """The export with its optimizer, then the bare state dict of torch.save, as Hugging Face's hub has it."""
    _, model, optimizer, kwargs = start()
    content, _ = resume(path / "run", partial=False)
    assert content == {"step": 1}
    expected = load_file(path / "run" / "export" / "model.safetensors")
    train_step(model, feed(batches(kwargs)[0]), 1.0)
    assert all(torch.equal(model.state_dict()[key], value) for key, value in expected.items())
    assert len(optimizer.state_dict()["state"]) == len(list(model.named_parameters()))
    optimizer.step()
    content, _ = resume(path / "bare", tag="pytorch_model.bin", partial=False, load_optimizer=False)
    assert content is None
    found = model.state_dict()
    assert all(torch.equal(found[key], value) for key, value in expected.items())
    with pytest.raises(CheckpointError, match="load_optimizer=False"):
        smp.resume_from_checkpoint(str(path / "bare"), tag="pytorch_model.bin", partial=False)

    def halve(values):
        return {key: value / 2 for key, value in values.items()}

    resume(path / "run", partial=False, translate_function=halve)
    found = model.state_dict()
    return all(torch.equal(found[key], value / 2) for key, value in expected.items())


def test_hugging_face_there_and_back(tmp_path):
    logits, ids = run_workers(train_gpt2, 2, tmp_path, tmp_path / "run")[0]
    torch.save(ids, tmp_path / "ids.pt")
    (tmp_path / "open.py").write_text(OPEN)
    command = [sys.executable, "open.py", "run/export", "ids.pt", "logits.pt"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert torch.equal(torch.load(tmp_path / "logits.pt"), logits)
    # As the hub has it: without the base model's prefix and the tied head.
    (tmp_path / "bare").mkdir()
    state = load_file(tmp_path / "run" / "export" / "model.safetensors")
    torch.save(
        {key.removeprefix("transformer."): v for key, v in state.items()}, tmp_path / "bare" / "pytorch_model.bin"
    )
    (tmp_path / "bare" / "user_content.pt").touch()
    (tmp_path / "again").mkdir()
    assert run_workers(resume_gpt2, 2, tmp_path / "again", tmp_path) == [True, True]


def save_whole(rank, folder, path):
    job = Job((1, 2, 1))
    job.steps(0)
    job.save(path, "whole", partial=False, user_content=[1, torch.ones(2)])
    with pytest.raises(CheckpointError, match="exists and is not overwritten"):
        job.save(path, "whole", partial=False)
    state = job.state()
    smp.shutdown()
    job = Job((2, 1, 1), seed=2)
    content, _ = resume(path, partial=False)
    assert content[0] == 1
    job.step(1)
    resume(path, partial=False)
    return state, same(job.state(), state)


def test_a_full_checkpoint_is_a_plain_file_that_any_topology_loads(tmp_path):
    results = run_workers(save_whole, 2, tmp_path, tmp_path / "run")
    state = results[0][0]
    assert [wrong for _, wrong in results] == [[], []]
    found = load_file(tmp_path / "run" / "whole")
    assert found.keys() == state["model"].keys()
    assert all(torch.equal(found[key], value) for key, value in state["model"].items())
    assert sorted(p.name for p in Path(tmp_path / "run").iterdir()) == ["newest_full", "user_content_whole", "whole"]


def through_torch(rank, folder, path):
    """Model and optimizer are Stateful: torch.distributed.checkpoint saves and loads them."""
    job = Job((1, 2, 1))
    job.steps(0)
    dcp.save({"model": job.model, "optimizer": job.optimizer}, checkpoint_id=path)
    state = job.state()
    job.steps(1)
    dcp.load({"model": job.model, "optimizer": job.optimizer}, checkpoint_id=path)
    return same(job.state(), state)


def test_torch_distributed_checkpoint_takes_model_and_optimizer(tmp_path):
    assert run_workers(through_torch, 2, tmp_path, tmp_path / "dcp") == [[], []]
