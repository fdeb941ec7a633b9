"""Full checkpoints of scripts: plain safetensors, Hugging Face's folders there and back, files of torch.save."""

import copy
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import zoo
from checkpoint_jobs import Job, resume, same
from executor_harness import run_workers
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from v1_harness import MB, batches, feed, make_model, start, train_step

import smpc.v1 as smp
from smpc.errors import CheckpointError
from smpc.nn.huggingface.gpt2 import translate_state_dict_to_hf_gpt2


def start_gpt2(tensor_parallel_degree):
    """GPT-2 with distributed layers, cut in two; each tensor-parallel rank has samples of its own."""
    smp.init(
        {
            "pipeline_parallel_degree": 2,
            "tensor_parallel_degree": tensor_parallel_degree,
            "microbatches": MB,
            "ddp": tensor_parallel_degree > 1,
        }
    )
    with smp.tensor_parallelism():
        module, _, kwargs = make_model()
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    return model, optimizer, batches(kwargs, smp.tp_rank())


def train_gpt2(rank, folder, path):
    model, optimizer, data = start_gpt2(2)
    optimizer.zero_grad()
    train_step(model, feed(data[0]), 1.0)
    optimizer.step()
    options = {"partial": False, "model": model, "optimizer": optimizer, "user_content": {"step": 1}}
    smp.save_checkpoint(str(path), "ours", translate_if_full=False, **options)
    smp.save_checkpoint(str(path), "archive", **options)
    smp.save_checkpoint(str(path), "export", full_format="safetensors", **options)
    plain = zoo.build("gpt2")[0]
    plain.load_state_dict(translate_state_dict_to_hf_gpt2(model.state_dict()))
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
    model, optimizer, data = start_gpt2(1)
    content, _ = resume(path / "run", partial=False)
    assert content == {"step": 1}
    expected = load_file(path / "run" / "export" / "model.safetensors")
    train_step(model, feed(data[0]), 1.0)
    assert same_tensors(model, expected)
    assert len(optimizer.state_dict()["state"]) == len(list(model.named_parameters()))
    optimizer.step()
    content, _ = resume(path / "bare", tag="pytorch_model.bin", partial=False, load_optimizer=False)
    assert content is None
    assert same_tensors(model, expected)
    before = optimizer.state_dict()
    _, texts = resume(path / "bare", tag="pytorch_model.bin", partial=False)
    assert rank != 0 or any("has no optimizer state: the optimizer begins anew" in text for text in texts)
    for name, items in optimizer.state_dict()["state"].items():
        assert torch.equal(items["exp_avg"], before["state"][name]["exp_avg"]), "it stays as it was"
    optimizer.step()
    for tag in ("ours", "archive"):
        train_step(model, feed(data[0]), 1.0)
        optimizer.step()
        resume(path / "run", tag=tag, partial=False)
        assert same_tensors(model, expected)

    def halve(values):
        return {key: value / 2 for key, value in values.items()}

    resume(path / "run", partial=False, translate_function=halve)
    return same_tensors(model, halve(expected))


def same_tensors(model, expected):
    found = translate_state_dict_to_hf_gpt2(model.state_dict())
    return all(torch.equal(found[key], value) for key, value in expected.items())


@pytest.mark.long
def test_hugging_face_there_and_back(tmp_path):
    logits, ids = run_workers(train_gpt2, 4, tmp_path, tmp_path / "run")[0]
    torch.save(ids, tmp_path / "ids.pt")
    (tmp_path / "open.py").write_text(OPEN)
    command = [sys.executable, "open.py", "run/export", "ids.pt", "logits.pt"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert torch.equal(torch.load(tmp_path / "logits.pt"), logits)
    plain = zoo.build("gpt2")[0]
    plain.load_state_dict(torch.load(tmp_path / "run" / "archive", weights_only=True))  # strict
    with torch.no_grad():
        assert torch.equal(plain.eval()(input_ids=ids).logits, logits)
    # As the hub has it: without the base model's prefix and the tied head.
    (tmp_path / "bare").mkdir()
    state = load_file(tmp_path / "run" / "export" / "model.safetensors")
    torch.save(
        {key.removeprefix("transformer."): v for key, v in state.items()}, tmp_path / "bare" / "pytorch_model.bin"
    )
    (tmp_path / "bare" / "user_content.pt").touch()
    (tmp_path / "again").mkdir()
    assert run_workers(resume_gpt2, 2, tmp_path / "again", tmp_path) == [True, True]


def damage(path):
    """Flip a bit in the last tensor of a file."""
    with open(path, "r+b") as file:
        file.seek(-1, 2)
        byte = file.read(1)[0]
        file.seek(-1, 2)
        file.write(bytes([byte ^ 4]))


def save_whole(rank, folder, path):
    job = Job((1, 2, 1))
    job.steps(0)
    job.save(path, "whole", partial=False, user_content=[1, torch.ones(2)])
    with pytest.raises(CheckpointError, match="exists and is not overwritten"):
        job.save(path, "whole", partial=False, force=False)
    job.steps(1)
    state = job.state()
    job.save(path, "whole", partial=False, user_content=[2], asynchronous=True)
    with torch.no_grad():  # what is saved is what was there
        for parameter in job.model.local_parameters():
            parameter.zero_()
    job.save(path, "other", partial=False, asynchronous=True)  # waits for the first
    smp.shutdown()
    job = Job((2, 1, 1), seed=2)
    content, _ = resume(path, tag="whole", partial=False)
    assert content == [2]
    job.step(1)
    resume(path, tag="whole", partial=False)
    wrong = same(job.state(), state)
    found = smp.load(str(path / "whole"), partial=False)
    wrong += [name for name, value in state["model"].items() if not torch.equal(found[name], value)]
    assert smp.load(str(path / "user_content_whole"), partial=False) == [2]
    assert smp.load(str(path / "newest_full"), partial=False) == "other"
    job.save(path, "part", user_content=[3])
    wrong += load_parts(path, job.state())
    if rank == 0:  # the content beside the model is damaged: the model does not change either
        damage(next(path.glob("user_content_other/*/optimizer_00000.safetensors")))
    smp.barrier()
    job.step(1)
    before = job.state()
    with pytest.raises(CheckpointError, match=r"optimizer_00000.safetensors: damaged"):
        resume(path, tag="other", partial=False)
    wrong += same(job.state(), before)
    for tag in ("newest_full", "user_content_whole"):
        with pytest.raises(CheckpointError, match="is the name of something else"):
            job.save(path, tag, partial=False, force=True)
    smp.barrier()
    if rank == 0:
        os.rename(path / "user_content_other", path / "aside")
    smp.barrier()
    with pytest.raises(CheckpointError, match="load_optimizer=False"):
        resume(path, tag="other", partial=False)
    resume(path, tag="other", partial=False, load_optimizer=False)
    (path / "mine").mkdir(exist_ok=True)
    with pytest.raises(CheckpointError, match="mine exists and is not overwritten; save_checkpoint has not written it"):
        job.save(path, "mine", partial=False, force=True)
    with pytest.raises(CheckpointError, match=r"no full checkpoint gone in .*; there are whole"):
        resume(path, tag="gone", partial=False)
    return state, wrong


def load_parts(path, state):
    """What smp.load finds wrong in a partial checkpoint, by the names that the specification gives to its parts."""
    assert smp.load(str(path / "newest")) == "part_partial"
    assert smp.load(str(path / "part_partial" / "user_content.pt"), partial=False) == [3]
    found = smp.load(str(path / "part_partial"), partial=False)
    assert found["user_content"] == [3]
    assert found["optimizer"].keys()
    return [name for name, value in state["model"].items() if not torch.equal(found["model"][name], value)]


@pytest.mark.long
def test_a_full_checkpoint_is_a_plain_file_that_any_topology_loads(tmp_path):
    results = run_workers(save_whole, 2, tmp_path, tmp_path / "run")
    state = results[0][0]
    assert [wrong for _, wrong in results] == [[], []]
    found = torch.load(tmp_path / "run" / "whole", weights_only=True)
    assert found.keys() == state["model"].keys()
    assert all(torch.equal(found[key], value) for key, value in state["model"].items())
    there = ["aside", "mine", "newest", "newest_full", "other", "part_partial", "user_content_whole", "whole"]
    assert sorted(p.name for p in Path(tmp_path / "run").iterdir()) == there


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


def plain_gpt2():
    """A model and its optimizer in plain PyTorch, after a step."""
    model, _, kwargs = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(input_ids=batches(kwargs)[0], labels=batches(kwargs)[0]).loss.backward()
    optimizer.step()
    return model, optimizer


def plain_state(model, optimizer):
    return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}


def exchange_with_torch(rank, folder, path):
    """Take up what plain PyTorch has saved, twice; train, and leave it a checkpoint."""
    _, model, optimizer, kwargs = start()
    states = []
    for _ in range(2):
        train_step(model, feed(batches(kwargs)[1]), 1.0)
        optimizer.step()
        dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=path / "plain")
        states.append(copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()}))
    optimizer.step()
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=path / "ours")
    return [*states, {"model": model.state_dict(), "optimizer": optimizer.state_dict()}]


def flat(state):
    """Every number and tensor of a state dict of model and optimizer, by its path."""
    leaves, _ = torch.utils._pytree.tree_flatten_with_path(state)
    return {torch.utils._pytree.keystr(path): leaf for path, leaf in leaves}


def equal(found, expected):
    found, expected = flat(found), flat(expected)
    return found.keys() == expected.keys() and all(
        torch.equal(found[key], value) if isinstance(value, torch.Tensor) else found[key] == value
        for key, value in expected.items()
    )


@pytest.mark.long
def test_torch_distributed_checkpoint_and_plain_pytorch_exchange_what_they_save(tmp_path):
    model, optimizer = plain_gpt2()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save(plain_state(model, optimizer), checkpoint_id=tmp_path / "plain", no_dist=True)
        results = run_workers(exchange_with_torch, 2, tmp_path, tmp_path)
        for before, after, _ in results:
            assert equal(before, plain_state(model, optimizer))
            assert equal(after, plain_state(model, optimizer))
        last = results[0][2]
        state = plain_state(model, optimizer)
        dcp.load(state, checkpoint_id=tmp_path / "ours", no_dist=True)
    assert equal(state, last)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    assert equal(plain_state(model, optimizer), last)
