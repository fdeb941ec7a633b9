"""Hugging Face's models in training scripts: tensor-parallel layers are found by themselves, and train as the model does alone."""

import warnings

import hugging_face
import pytest
import torch
from executor_harness import run_workers

import smpc.v1 as smp
from smpc.nn.init.delayed import is_delayed

STEPS, SAMPLES, MB = 3, 8, 2


@smp.step
def train_step(model, batch):
    loss = model(**batch).loss
    model.backward(loss)
    return loss


def batches(name):
    return [hugging_face.batch(name, SAMPLES, seed=step) for step in range(STEPS)]


def build(name):
    model = hugging_face.build(name)
    model.config.use_cache = False
    if name.startswith("t5"):
        model.decoder.config.use_cache = False
    return model


def losses_alone(name):
    """In plain PyTorch. Padding is not counted, so the mean of the microbatches' losses is not the batch's."""
    model = build(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for batch in batches(name):
        optimizer.zero_grad()
        parts = [{key: value.chunk(MB)[i] for key, value in batch.items()} for i in range(MB)]
        loss = sum(model(**part).loss for part in parts) / MB
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train(rank, folder, name, tp, pp, delayed=False):
    config = {"tensor_parallel_degree": tp, "pipeline_parallel_degree": pp, "microbatches": MB, "ddp": True}
    smp.init({**config, "prescaled_batch": True, "delayed_parameter_initialization": delayed})
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*it shares .* with another module")
        warnings.filterwarnings("ignore", message=".*divisible by tensor_parallel_degree")
        with smp.model_creation(tensor_parallelism=True):
            model = build(name)
        assert is_delayed(model) == delayed
        model = smp.DistributedModel(model)
    assert any(isinstance(module, smp.nn.DistributedTransformerLayer) for module in model.distributed_modules())
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    losses = []
    for batch in batches(name):
        optimizer.zero_grad()
        losses.append(train_step(model, batch).reduce_mean().item())
        optimizer.step()
    assert not is_delayed(model)
    torch.save(losses, folder / f"losses{rank}.pt")
    smp.shutdown()


def losses_together(tmp_path, world, *args):
    folder = tmp_path / "_".join(map(str, args))
    folder.mkdir()
    run_workers(train, world, folder, *args)
    return torch.load(folder / "losses0.pt")


OTHERS = ["t5", "gptj", "gptneo", "gptneox", "bert", "roberta", "t5-gated", "vit"]


@pytest.mark.long
@pytest.mark.parametrize("name", ["gpt2", *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_pipelines_of_distributed_layers_train_as_the_model_alone(tmp_path, name):
    assert losses_together(tmp_path, 4, name, 2, 2) == pytest.approx(losses_alone(name), rel=1e-4)


@pytest.mark.long
def test_delayed_initialization_draws_the_same_for_every_arrangement(tmp_path):
    alone = losses_together(tmp_path, 1, "gpt2", 1, 1, True)
    together = losses_together(tmp_path, 4, "gpt2", 2, 2, True)
    assert together == pytest.approx(alone, rel=1e-4)
    assert together[-1] < together[0]
