"""PipelineStrategy beside Lightning in one process: losses, clipping, rates, evaluation, files, resumption bit by bit."""

import os

import pytest
import torch

pytest.importorskip("lightning")

import lightning
from documented import all_blocks
from executor_harness import run_workers
from hugging_face_jobs import Data, as_rank
from lightning.pytorch.utilities import grad_norm
from lightning_jobs import COUNTS, Module, train
from torch.utils.data import DataLoader, DistributedSampler

import smpc.v1 as smp
from smpc.errors import ConfigUnsupportedError, UsageError
from smpc.integrations.lightning import PipelineStrategy

# Lightning warns of few workers, and torch of what Lightning uses: both in the plain run, too.
pytestmark = pytest.mark.filterwarnings("ignore")
PIPELINE = {"pipeline_parallel_degree": 2, "microbatches": 4}


def train_all(rank, folder, names, world_size, config):
    as_rank(rank, world_size)
    found = {}
    for name in names:
        found[name] = train(name, folder / name, config)
        smp.shutdown()
    return found


def check(found, expected):
    assert [line.keys() for line in found["lines"]] == [line.keys() for line in expected["lines"]]
    for own, other in zip(found["lines"], expected["lines"], strict=True):
        assert own == pytest.approx(other, rel=1e-5)
    torch.testing.assert_close(found["predicted"], expected["predicted"], rtol=1e-3, atol=1e-3)


@pytest.mark.long
@pytest.mark.parametrize("names", [["vit"], pytest.param(["gpt2", "llama", "bert"], marks=pytest.mark.slow)])
def test_it_trains_evaluates_and_predicts_as_lightning_does(tmp_path, names):
    """The last batch of an epoch has 2 samples, which four microbatches do not divide; two batches are one update.

    Microbatches of text have different numbers of labels that count.
    """
    expected = {name: train(name, tmp_path / f"plain_{name}") for name in names}
    for found in run_workers(train_all, 2, tmp_path, names, 2, PIPELINE):
        for name in names:
            assert len(found[name]["lines"]) == len(expected[name]["lines"]) == 12
            check(found[name], expected[name])
    saved = Module.load_from_checkpoint(tmp_path / names[0] / "epoch=2.ckpt", name=names[0])  # Lightning's own file
    for key, value in saved.state_dict().items():
        torch.testing.assert_close(value, expected[names[0]]["weights"][key], rtol=1e-3, atol=1e-3)
    again = train(names[0], tmp_path / "again", resume=str(tmp_path / names[0] / "epoch=2.ckpt"), max_epochs=4)
    assert again["epoch"] == 4, "in one process, Lightning goes on where the pipeline was"


def resume(rank, folder):
    as_rank(rank, 2)
    whole = train("vit", folder / "whole", PIPELINE, dropout=0.1)
    smp.shutdown()
    parts = train("vit", folder / "parts", PIPELINE, dropout=0.1, resume=str(folder / "whole" / "epoch=0.ckpt"))
    smp.shutdown()
    return whole, parts


@pytest.mark.slow
def test_it_resumes_bit_by_bit_with_dropout(tmp_path):
    for whole, parts in run_workers(resume, 2, tmp_path):
        assert len(parts["lines"]) == 8
        assert [line["output"] for line in parts["lines"]] == [line["output"] for line in whole["lines"][4:]]
        assert parts["weights"].keys() == whole["weights"].keys()
        assert all(torch.equal(value, parts["weights"][name]) for name, value in whole["weights"].items())


def follow(rank, folder):
    as_rank(rank, 2)
    os.chdir(folder)
    names = {"__name__": "__main__"}
    for block in all_blocks("docs/lightning.md"):
        if block.language == "python":
            block.run(names)
    smp.shutdown()
    return names["loss"]


@pytest.mark.slow
def test_the_page_of_the_docs_runs(tmp_path):
    losses = run_workers(follow, 2, tmp_path)
    assert losses[0] == losses[1] < 1.6


def uneven(rank, folder):
    as_rank(rank, 2)
    module = Module("gpt2")
    strategy = PipelineStrategy(PIPELINE)
    trainer = lightning.Trainer(
        strategy=strategy, accelerator="cpu", devices=1, logger=False, max_steps=2, enable_checkpointing=False
    )
    with pytest.warns(UserWarning, match="the loss is the mean of their means") as told:
        trainer.fit(module, DataLoader(Data("gpt2"), batch_size=8))
    smp.shutdown()
    strategy = PipelineStrategy(PIPELINE, count=lambda batch: (batch["labels"][:2] != -100).sum() * 0)
    trainer = lightning.Trainer(
        strategy=strategy, accelerator="cpu", devices=1, logger=False, max_steps=2, enable_checkpointing=False
    )
    with pytest.raises(UsageError, match=r"count: expected items in every microbatch, found \[0.0, 0.0, 0.0, 0.0\]"):
        trainer.fit(Module("gpt2"), DataLoader(Data("gpt2"), batch_size=8))
    return [str(each.message) for each in told if "mean of their means" in str(each.message)]


@pytest.mark.slow
def test_microbatches_with_different_numbers_of_labels_are_told_once(tmp_path):
    for [text] in run_workers(uneven, 2, tmp_path):
        assert "have [23, 19, 15, 18] labels other than -100" in text
        assert "count=" in text


class Metered(Module):
    """Trains parameters of its own, too, and by hand."""

    def __init__(self):
        super().__init__("vit")
        self.head = torch.nn.Linear(2, 2)
        self.automatic_optimization = False


def refused(rank, folder):
    as_rank(rank, 2)
    strategy = PipelineStrategy(PIPELINE, network="model")
    trainer = lightning.Trainer(strategy=strategy, accelerator="cpu", devices=1, logger=False, precision="bf16-true")
    try:
        trainer.fit(Metered(), DataLoader(Data("vit"), batch_size=8))
    except ConfigUnsupportedError as error:
        return str(error)
    finally:
        smp.shutdown()


def test_what_a_pipeline_cannot_follow_is_one_error(tmp_path):
    for text in run_workers(refused, 2, tmp_path):
        assert [line.split(":")[0] for line in text.splitlines()] == [
            "PipelineStrategy", "head", "automatic_optimization", "precision",
        ]  # fmt: skip


class Normed(Module):
    """Logs the norm of each gradient, as Lightning's pages have it."""

    def __init__(self):
        super().__init__("gpt2")
        self.norms = []

    def on_before_optimizer_step(self, optimizer):
        inner = self.model.get_module() if isinstance(self.model, smp.DistributedModel) else self.model
        norms = grad_norm(self, 2), grad_norm(self.model, "inf", "."), grad_norm(inner.transformer.h[2], 1)
        self.norms.append([{name: float(norm) for name, norm in each.items()} for each in norms])


def train_normed(pipeline=None):
    torch.manual_seed(0)
    strategy = "auto" if pipeline is None else PipelineStrategy(pipeline, count=COUNTS["gpt2"])
    trainer = lightning.Trainer(
        strategy=strategy, accelerator="cpu", devices=1, logger=False, max_steps=2, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    module = Normed()
    trainer.fit(module, DataLoader(Data("gpt2"), batch_size=8))
    return module.norms


def norms_of_ranks(rank, folder):
    as_rank(rank, 2)
    found = train_normed(PIPELINE)
    smp.shutdown()
    layer = torch.nn.Linear(2, 2)
    layer(torch.ones(1, 2)).sum().backward()
    return found, grad_norm(layer, 2)


@pytest.mark.long
def test_lightning_s_norms_of_gradients_are_those_of_all_ranks(tmp_path):
    """A rank had those of its own stage, and a total of these."""
    expected = train_normed()
    for found, after in run_workers(norms_of_ranks, 2, tmp_path):
        for own, wanted in zip(found, expected, strict=True):
            for each, other in zip(own, wanted, strict=True):
                assert list(each) == list(other)
                assert each == pytest.approx(other, rel=1e-4, abs=1e-6)
        assert float(after["grad_2.0_norm_total"]) == pytest.approx(6**0.5)


class Synchronized(Module):
    """Logs numbers of all replicas."""

    def training_step(self, batch, batch_idx):
        loss = self.model(**batch).loss
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("largest", loss, reduce_fx="max", sync_dist=True)
        return loss

    def on_train_epoch_end(self):
        self.log("replica", float(smp.dp_rank()) if smp.is_initialized() else 0.5, sync_dist=True)


def train_replicas(pipeline=None):
    torch.manual_seed(0)
    strategy = "auto" if pipeline is None else PipelineStrategy(pipeline)
    data = torch.utils.data.Subset(Data("vit"), range(16))
    sampler = None if pipeline is None else DistributedSampler(data, smp.dp_size(), smp.dp_rank(), shuffle=False)
    trainer = lightning.Trainer(
        strategy=strategy, accelerator="cpu", devices=1, logger=False, max_epochs=1, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    module, loader = Synchronized("vit"), DataLoader(data, batch_size=8 if pipeline is None else 4, sampler=sampler)
    trainer.fit(module, loader)
    found = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return found, torch.cat(trainer.predict(module, loader))


def train_as_replica(rank, folder):
    as_rank(rank, 2)
    found = train_replicas({"pipeline_parallel_degree": 1, "microbatches": 2, "ddp": True})
    smp.shutdown()
    return found


def test_numbers_and_predictions_of_replicas(tmp_path):
    """`sync_dist` had no effect: ranks logged their own replica's numbers. Predictions asked for a sampler that the loader had."""
    expected, rows = train_replicas()
    for rank, (found, predicted) in enumerate(run_workers(train_as_replica, 2, tmp_path)):
        assert found.pop("largest_step", None) is None
        assert found["largest"] >= expected["largest"] - 1e-5
        assert {**found, "largest": 0} == pytest.approx({**expected, "largest": 0}, rel=1e-5)
        torch.testing.assert_close(predicted, rows[rank::2], rtol=1e-3, atol=1e-3)
