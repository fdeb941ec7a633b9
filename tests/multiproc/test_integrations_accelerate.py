"""PipelineAccelerator beside accelerate in one process: accumulation, clipping, schedules, and saved states, bit by bit."""

import pytest
import torch

pytest.importorskip("accelerate")

from accelerate.utils import ProjectConfiguration
from accelerate_jobs import SPLIT, start, train
from executor_harness import run_workers
from hugging_face_jobs import as_rank, build

import smpc.v1 as smp
from smpc.errors import ConfigUnsupportedError
from smpc.integrations.accelerate import PipelineAccelerator

PIPELINE = {"pipeline_parallel_degree": 2, "microbatches": 4}


def train_all(rank, folder, names, world_size, config, options):
    as_rank(rank, world_size)
    found = {}
    for name in names:
        found[name] = train(name, folder / name, config, **options)
        smp.shutdown()
    return found


def check(found, expected):
    for own, other in zip(found["seen"], expected["seen"], strict=True):
        assert own == pytest.approx(other, rel=1e-5)
    assert found["weights"].keys() == expected["weights"].keys()
    for key, value in expected["weights"].items():  # Adam divides by what may be 0 but for rounding
        torch.testing.assert_close(found["weights"][key], value, rtol=1e-3, atol=1e-3)


@pytest.mark.long
@pytest.mark.parametrize("names", [["gpt2"], pytest.param(["vit", "llama", "bert"], marks=pytest.mark.slow)])
def test_a_loop_of_accelerate_trains_as_in_one_process(tmp_path, names):
    expected = {name: train(name, tmp_path / "plain" / name) for name in names}
    for found in run_workers(train_all, 2, tmp_path, names, 2, PIPELINE, {}):
        for name in names:
            assert [line[3] for line in found[name]["seen"]] == [False, True, True, False, True, True]
            check(found[name], expected[name])


@pytest.mark.slow
def test_replicas_divide_the_batches(tmp_path):
    expected = train("gpt2", tmp_path / "plain", **SPLIT)
    for found in run_workers(train_all, 4, tmp_path, ["gpt2"], 4, {**PIPELINE, "ddp": True}, SPLIT):
        check(found["gpt2"], expected)


def resume(rank, folder):
    as_rank(rank, 2)
    whole = train("vit", folder / "states", PIPELINE, dropout=0.1)
    smp.shutdown()
    parts = train("vit", folder / "states", PIPELINE, dropout=0.1, resume=True)
    smp.shutdown()
    return whole, parts


@pytest.mark.long
def test_a_saved_state_goes_on_bit_by_bit_with_dropout(tmp_path):
    for whole, parts in run_workers(resume, 2, tmp_path):
        assert len(parts["seen"]) == 3
        assert parts["seen"] == whole["seen"][3:]
        assert all(torch.equal(value, parts["weights"][name]) for name, value in whole["weights"].items())


def refused(rank, folder):
    as_rank(rank, 2)
    accelerator, _ = start(PIPELINE, gradient_accumulation_steps=2)
    with accelerator.split_between_processes(["first", "second"]) as own:
        assert own == ["first", "second"]  # ranks of one pipeline need the same
    model = accelerator.prepare(build("vit"))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    errors = []
    for call in (lambda: accelerator.prepare(optimizer), lambda: accelerator.save_state(str(folder))):
        with pytest.raises(ConfigUnsupportedError) as caught:
            call()
        errors.append(str(caught.value))
    smp.shutdown()
    return errors


@pytest.mark.slow
def test_what_would_count_wrongly_is_refused(tmp_path):
    for steps, states in run_workers(refused, 2, tmp_path):
        assert "gradient_accumulation_steps: expected 1 with an smp.DistributedOptimizer of the script's own" in steps
        assert (
            "expected one prepared model and optimizer, no hooks of states and no stateful data loader, found 1 and 0"
            in states
        )


def save_again(rank, folder):
    as_rank(rank, 2)
    project = ProjectConfiguration(project_dir=str(folder / "project"), automatic_checkpoint_naming=True)
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
    accelerator = PipelineAccelerator(cpu=True, project_config=project)
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    model, _ = accelerator.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))

    @smp.step
    def step(model, x):
        loss = model(x).sum()
        accelerator.backward(loss)
        return loss

    step(model, torch.ones(4, 4))
    accelerator.save_state()
    smp.barrier()
    project.iteration = 0  # as in a new process
    with pytest.raises(ValueError, match="checkpoint_0 already exists"):
        accelerator.save_state()
    project.iteration = 1
    return accelerator.save_state()


def test_a_checkpoint_of_an_earlier_process_is_not_overwritten(tmp_path):
    for saved in run_workers(save_again, 2, tmp_path):
        assert saved.endswith("checkpoint_1")


def count(rank, folder):
    as_rank(rank, 2)
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
    accelerator = PipelineAccelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)))
    names = [accelerator.gather_for_metrics(["a", "b"]), accelerator.gather_for_metrics({"name": "c"})]
    if rank == 1:
        accelerator.set_trigger()
    triggers = [accelerator.check_trigger(), accelerator.check_trigger()]
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    scheduler = accelerator.prepare(torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=3))
    rates = []
    for _ in range(5):
        scheduler.step()
        rates.append(scheduler.get_last_lr()[0])
    return names, triggers, rates


def test_a_pipeline_counts_as_one_process(tmp_path):
    """Objects had come once from each rank; a trigger had been seen by its own rank alone; the end of OneCycleLR had been an error."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    alone = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=3)
    expected = []
    for _ in range(3):
        optimizer.step()
        alone.step()
        expected.append(alone.get_last_lr()[0])
    for names, triggers, rates in run_workers(count, 2, tmp_path):
        assert names == [["a", "b"], {"name": "c"}]
        assert triggers == [True, False]
        assert rates == expected + expected[-1:] * 2  # accelerate stops there
