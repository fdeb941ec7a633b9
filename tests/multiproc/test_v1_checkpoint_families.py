"""Full checkpoints of every family with distributed layers: Hugging Face's folders, which from_pretrained opens, and the way back."""

import subprocess
import sys
import warnings

import hugging_face
import pytest
import torch
from executor_harness import run_workers

import smpc.v1 as smp
from smpc.v1.nn import huggingface as translators

MB, SAMPLES = 2, 4
FAMILIES = ["vit", "gptneox", "gpt2", "gptj", "gptneo", "bert", "roberta", "t5"]


@smp.step
def train_step(model, batch):
    loss = model(**batch).loss
    model.backward(loss)
    return loss


def start(name, tp, plan):
    """A model with distributed layers, or one that the compiler splits, cut in two."""
    config = {"pipeline_parallel_degree": 2, "tensor_parallel_degree": tp, "microbatches": MB, "ddp": tp > 1}
    smp.init({**config, "prescaled_batch": tp > 1, "tensor_parallel_plan": plan})
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*it shares .* with another module")
        warnings.filterwarnings("ignore", message=".*divisible by tensor_parallel_degree")
        with smp.tensor_parallelism(plan == "modules"):
            plain = hugging_face.build(name)
        model = smp.DistributedModel(plain)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    return model, optimizer


def batch(name):
    found = hugging_face.batch(name, SAMPLES, masked=False)
    return found if name == "vit" else found | {"use_cache": False}


def theirs(name, state):
    family = hugging_face.MODELS[name][0]
    return vars(vars(translators)[family])["translate_state_dict_to_hf"](state)


def train(rank, folder, path, name, plan):
    """Trains and saves; the state dict under Hugging Face's names."""
    model, optimizer = start(name, 2, plan)
    train_step(model, batch(name))
    optimizer.step()
    smp.save_checkpoint(
        str(path / "run"), "export", partial=False, model=model, optimizer=optimizer, full_format="safetensors"
    )
    state = model.state_dict()
    return theirs(name, state) if plan == "modules" else state


OPEN = """
import sys, torch, transformers
batch = torch.load("batch.pt")
torch.set_num_threads(1)
model, report = getattr(transformers, sys.argv[1]).from_pretrained(sys.argv[2], output_loading_info=True)
assert not any(report.values()), report
with torch.no_grad():
    torch.save(model.eval()(**batch).logits, "logits.pt")
assert not any(name.split(".")[0] == "smpc" for name in sys.modules)
"""


def resume(rank, folder, path, name, tp, plan):
    """What was exported, with its optimizer; what transformers has written itself; each is what was trained."""
    expected = torch.load(path / "state.pt")
    model, _ = start(name, tp, plan)
    for where, tag, options in ((path / "run", "export", {}), (path, "again", {"load_optimizer": False})):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        smp.resume_from_checkpoint(str(where), tag, partial=False, **options)
        train_step(model, batch(name))  # loads, where there was no partition yet
        found = model.state_dict()
        found = theirs(name, found) if plan == "modules" else found
        for key, value in expected.items():
            assert torch.equal(found[key], value), (tag, key)
    smp.shutdown()


def check(tmp_path, name, plan):
    (tmp_path / "trained").mkdir()
    state = run_workers(train, 4, tmp_path / "trained", tmp_path, name, plan)[0]
    plain = hugging_face.build(name, seed=9)
    plain.load_state_dict(state)
    plain.save_pretrained(tmp_path / "again")  # under other names, for some families
    arguments = batch(name)
    with torch.no_grad():
        expected = plain.eval()(**arguments).logits
    torch.save(arguments, tmp_path / "batch.pt")
    torch.save(state, tmp_path / "state.pt")
    (tmp_path / "open.py").write_text(OPEN)
    command = [sys.executable, "open.py", hugging_face.MODELS[name][1], "run/export"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert torch.equal(torch.load(tmp_path / "logits.pt"), expected)


def come_back(tmp_path, world, name, *args):
    folder = tmp_path / f"resumed{world}"
    folder.mkdir()
    run_workers(resume, world, folder, tmp_path, name, *args)


@pytest.mark.slow
@pytest.mark.parametrize("name", [FAMILIES[0], *(pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES[1:])])
def test_every_family_opens_in_hugging_face_and_comes_back(tmp_path, name):
    check(tmp_path, name, "modules")
    come_back(tmp_path, 2, name, 1, "modules")


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_models_that_the_compiler_splits_open_and_come_back_too(tmp_path, name):
    check(tmp_path, name, "auto")
    come_back(tmp_path, 4, name, 2, "auto")
