"""Numbers of a batch that are no means over its microbatches: those of one process, or an error before an update, never others."""

import functools

import pytest
import torch

pytest.importorskip("lightning")
pytest.importorskip("accelerate")

from executor_harness import run_workers
from hugging_face_jobs import Data, arguments, as_rank, build
from own_steps import WEIGHTS, Classifier, Counts, Keeps, Metered, Summed, Weighted, fit
from transformers import Trainer

import smpc.v1 as smp
from smpc.errors import StepError

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning warns of few workers, in the plain run, too
PIPELINE = {"pipeline_parallel_degree": 2, "microbatches": 2}


def weights_of(batch):
    return WEIGHTS[batch[1]].sum()


CASES = {"groups": (Classifier, {}), "counts": (Counts, {}), "weighted": (Weighted, {"count": weights_of})}


def fit_all(rank, folder):
    as_rank(rank, 2)
    found = {}
    for name, (kind, options) in CASES.items():
        found[name] = fit(kind, folder / name, PIPELINE, **options)
        smp.shutdown()
    return found


@pytest.mark.long
def test_numbers_of_a_batch_are_those_of_one_process(tmp_path):
    """Sums, extremes, deviations and numbers of rows had been the mean over the microbatches; `self.net[0]` had been a TypeError."""
    expected = {name: fit(kind, tmp_path / f"plain_{name}") for name, (kind, _) in CASES.items()}
    ranks = run_workers(fit_all, 2, tmp_path)
    for name in CASES:
        for found in ranks:
            for own, other in zip(found[name]["lines"], expected[name]["lines"], strict=True):
                assert own == pytest.approx(other, rel=1e-4), name
        for key, value in expected[name]["weights"].items():
            torch.testing.assert_close(ranks[0][name]["weights"][key], value, rtol=1e-4, atol=1e-5)


class WeightedTrainer(Trainer):
    """Weights of classes, as in the Trainer's pages."""

    loss_is_scaled_for_ga = False

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = torch.nn.functional.cross_entropy(
            outputs["logits"], labels, weight=torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
        )
        return (loss, outputs) if return_outputs else loss


def train_weighted(folder):
    from smpc.integrations.huggingface import PipelineTrainer

    own = type(
        "Own", (PipelineTrainer,), {"compute_loss": WeightedTrainer.compute_loss, "loss_is_scaled_for_ga": False}
    )
    own(PIPELINE, model=build("plain"), args=arguments(folder, eval_strategy="no"), train_dataset=Data("plain")).train()


def refuse_all(rank, folder):
    as_rank(rank, 2)
    runs = {
        kind.__name__: functools.partial(fit, kind, folder, PIPELINE) for kind in (Weighted, Summed, Keeps, Metered)
    }
    found = {}
    for name, run in {**runs, "WeightedTrainer": functools.partial(train_weighted, folder)}.items():
        with pytest.raises(StepError) as caught:
            run()
        found[name] = str(caught.value)
        smp.shutdown()
    return found


@pytest.mark.long
def test_other_losses_and_what_steps_keep_are_errors_on_every_rank(tmp_path):
    """Losses had been means of means; rank 0 had found nothing in lists and metrics that steps had filled on the last rank."""
    pytest.importorskip("torchmetrics")
    for found in run_workers(refuse_all, 2, tmp_path):
        assert "the mean of its microbatches' losses" in found["Weighted"]
        assert "count=" in found["Weighted"]
        assert "the mean of its microbatches' losses" in found["Summed"]
        assert "changed kept of the module" in found["Keeps"]
        assert "changed accuracy of the module" in found["Metered"]
        assert "num_items_in_batch" in found["WeightedTrainer"]


def fit_alone(rank, folder):
    as_rank(rank, 1)
    found = fit(Keeps, folder / "alone", {"microbatches": 1})
    smp.shutdown()
    return found["lines"]


def test_steps_that_run_as_in_one_process_may_keep_what_they_like(tmp_path):
    expected = fit(Keeps, tmp_path / "plain")["lines"]
    for lines in run_workers(fit_alone, 1, tmp_path):
        for own, other in zip(lines, expected, strict=True):
            assert own == pytest.approx(other, rel=1e-5)


class GroupsTrainer(Trainer):
    """Makes its own optimizer, as the Trainer's pages have it."""

    def create_optimizer(self, model=None):
        if self.optimizer is None:
            named = dict(self.model.named_parameters())
            head = named.pop("head.weight")
            groups = [{"params": [head], "lr": 0.5}, {"params": list(named.values())}]
            self.optimizer = torch.optim.SGD(groups, lr=0.1)
        return self.optimizer


def train_groups(folder, base, *args):
    own = type("Own", (base,), {"create_optimizer": GroupsTrainer.create_optimizer})
    trainer = own(*args, model=build("plain"), args=arguments(folder, eval_strategy="no"), train_dataset=Data("plain"))
    trainer.train()
    return {key: value.clone() for key, value in trainer.model.state_dict().items()}


def as_pipeline(rank, folder):
    from smpc.integrations.huggingface import PipelineTrainer

    as_rank(rank, 2)
    return train_groups(folder, PipelineTrainer, PIPELINE)


@pytest.mark.long
def test_a_trainer_that_makes_its_own_optimizer(tmp_path):
    """The optimizer had no `forget`, which is the integration's own: an AttributeError."""
    expected = train_groups(tmp_path / "plain", Trainer)
    for found in run_workers(as_pipeline, 2, tmp_path):
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-5)
