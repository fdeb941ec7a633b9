"""PipelineTrainer beside Hugging Face's Trainer in one process: losses, norms, rates, evaluation, files, resumption bit by bit."""

import os

import pytest
import torch

pytest.importorskip("accelerate")

from documented import blocks
from executor_harness import run_workers
from hugging_face_jobs import as_rank, build, train

import smpc.v1 as smp

PIPELINE = {"pipeline_parallel_degree": 2, "microbatches": 4}
ALL = {"dataloader_drop_last": True}  # batches of one size, and as many for replicas as for one process


def train_all(rank, folder, names, world_size=2):
    as_rank(rank, world_size)
    found = {}
    for name in names:
        found[name] = train(name, folder / name, PIPELINE)
        smp.shutdown()
    return found


def check_equal(found, expected):
    """As logged, but for what a sum in another order changes."""
    assert [line.keys() for line in found] == [line.keys() for line in expected]
    for own, other in zip(found, expected, strict=True):
        assert own == pytest.approx(other, rel=1e-5)


def check_models(names, folder):
    expected = {name: train(name, folder / f"plain_{name}") for name in names}
    ranks = run_workers(train_all, 2, folder, names)
    for name in names:
        assert [found[name]["seen"] for found in ranks] == [expected[name]["seen"], 0], "logged on one rank"
        for found in ranks:
            check_equal(found[name]["logged"], expected[name]["logged"])
            for key, value in expected[name]["weights"].items():  # Adam divides by what may be 0 but for rounding
                torch.testing.assert_close(found[name]["weights"][key], value, rtol=1e-3, atol=1e-3)
    return expected, ranks


@pytest.mark.long
def test_it_trains_evaluates_and_saves_as_the_trainer_does(tmp_path):
    """GPT-2 shares its embedding and has labels that do not count; the last batch of an epoch cannot be cut into microbatches.

    Plain modules have no configuration, of which evaluation had asked what to leave out.
    """
    expected, _ = check_models(["gpt2", "plain"], tmp_path)
    resumed = train("gpt2", tmp_path / "again", resume=str(tmp_path / "gpt2" / "checkpoint-3"))
    check_equal(
        resumed["logged"][:-1], expected["gpt2"]["logged"][:-1]
    )  # the Trainer's own files: it goes on where the pipeline was


@pytest.mark.long
def test_means_over_labels_that_count_are_the_batchs(tmp_path):
    """Of a model that does not divide by the number of items, and of a script that does not tell it."""
    check_models(["masked", "own loss"], tmp_path)


def checkpointed(rank, folder):
    as_rank(rank, 2)
    found = train("gpt2", folder / "pipeline", PIPELINE, activation_checkpointing=True)
    smp.shutdown()
    return found


@pytest.mark.slow
def test_the_trainers_activation_checkpointing(tmp_path):
    expected = train("gpt2", tmp_path / "plain", activation_checkpointing=True)
    for found in run_workers(checkpointed, 2, tmp_path):
        check_equal(found["logged"], expected["logged"])


@pytest.mark.slow
def test_it_trains_other_models_as_the_trainer_does(tmp_path):
    """A Llama, and a BERT whose mean of squares no number of items divides."""
    expected, _ = check_models(["vit", "llama", "bert"], tmp_path)
    assert set(expected) == {"vit", "llama", "bert"}


def follow(rank, folder, code):
    as_rank(rank, 2)
    os.chdir(folder)
    names = {"__name__": "__main__"}
    exec(compile(code, "docs/hugging_face.md", "exec"), names)
    smp.shutdown()
    logged = names["trainer"].state.log_history
    return sorted(path.name for path in folder.glob("out/checkpoint-*")), [x["loss"] for x in logged if "loss" in x]


@pytest.mark.slow
def test_the_page_of_the_docs_runs(tmp_path):
    code = "\n".join(blocks("hugging_face.md"))
    for folders, losses in run_workers(follow, 2, tmp_path, code):
        assert folders
        assert losses[-1] < losses[0]


def resume(rank, folder):
    as_rank(rank, 2)
    whole = train("vit", folder / "whole", PIPELINE, dropout=0.1, **ALL)
    smp.shutdown()
    parts = train("vit", folder / "parts", PIPELINE, dropout=0.1, resume=str(folder / "whole" / "checkpoint-3"), **ALL)
    smp.shutdown()
    return whole, parts


@pytest.mark.long
def test_it_resumes_bit_by_bit_with_dropout(tmp_path):
    ranks = run_workers(resume, 2, tmp_path)
    saved = build("vit").from_pretrained(tmp_path / "whole" / "checkpoint-6").state_dict()
    assert all(torch.equal(value, ranks[0][0]["weights"][name]) for name, value in saved.items())
    for whole, parts in ranks:
        assert [line["step"] for line in parts["logged"][:4]] == [1, 2, 3, 3]
        assert parts["logged"][:-1] == whole["logged"][:-1]  # the last line is the mean over the steps of one call
        assert parts["weights"].keys() == whole["weights"].keys()
        assert all(torch.equal(value, parts["weights"][name]) for name, value in whole["weights"].items())


def adapt(rank, folder):
    as_rank(rank, 2)
    whole = train("lora", folder / "whole", PIPELINE, dropout=0.1)
    smp.shutdown()
    parts = train("lora", folder / "parts", PIPELINE, dropout=0.1, resume=str(folder / "whole" / "checkpoint-3"))
    smp.shutdown()
    return whole, parts, train("lora", folder / "plain", PIPELINE)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft asks for it
def test_adapters_of_peft_train_and_resume(tmp_path):
    pytest.importorskip("peft")
    expected = train("lora", tmp_path / "expected")
    for whole, parts, plain in run_workers(adapt, 2, tmp_path):
        check_equal(plain["logged"], expected["logged"])
        assert parts["logged"][:-1] == whole["logged"][:-1]
        assert all(torch.equal(value, parts["weights"][name]) for name, value in whole["weights"].items())
    saved = tmp_path / "whole" / "checkpoint-6" / "adapter_model.safetensors"
    assert saved.stat().st_size < (tmp_path / "whole" / "checkpoint-6" / "model.safetensors").stat().st_size


def replicate(rank, folder):
    as_rank(rank, 4)
    return train("gpt2", folder / "four", PIPELINE, per_device_train_batch_size=4, per_device_eval_batch_size=4, **ALL)


@pytest.mark.slow
def test_replicas_of_a_pipeline_share_the_batches(tmp_path):
    expected = train("gpt2", tmp_path / "plain", **ALL)
    for found in run_workers(replicate, 4, tmp_path):
        check_equal(found["logged"], expected["logged"])
