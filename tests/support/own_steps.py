"""Steps of scripts in which the mean over microbatches is not the batch's number, or that keep something: for Lightning and the Trainer."""

import lightning
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

WEIGHTS = torch.tensor([1.0, 3.0, 0.2])


def rows(number=24):
    generator = torch.Generator().manual_seed(5)
    x, labels = torch.randn(30, 6, generator=generator), torch.randint(0, 3, (30,), generator=generator)
    return DataLoader(TensorDataset(x[:number], labels[:number]), batch_size=4)


class Classifier(lightning.LightningModule):
    """Its parameters are in groups, by children of the network."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))
        self.kept = []

    def training_step(self, batch, batch_idx):
        x, labels = batch
        loss = cross_entropy(self.net(x), labels)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(
            [{"params": self.net[0].parameters(), "lr": 0.1}, {"params": self.net[1:].parameters()}], lr=0.05
        )


class Counts(Classifier):
    """Logs sums, extremes, and what is no mean at all; and returns a number of rows."""

    def training_step(self, batch, batch_idx):
        x, labels = batch
        scores = self.net(x)
        self.log("right", (scores.argmax(-1) == labels).sum().float(), reduce_fx="sum", on_step=True, on_epoch=True)
        self.log("most", scores.max(), reduce_fx=torch.max, on_step=True, on_epoch=True)
        self.log("least", scores.min(), reduce_fx="min", on_step=True, on_epoch=True)
        self.log("rows", float(len(labels)))
        self.log("spread", scores.std())
        return {"loss": cross_entropy(scores, labels), "scores": scores, "rows": len(labels)}

    def validation_step(self, batch, batch_idx):
        scores = self.net(batch[0])
        self.log("val_right", (scores.argmax(-1) == batch[1]).sum().float(), reduce_fx="sum")
        return scores.std()

    def on_validation_batch_end(self, outputs, batch, batch_idx):
        self.log("val_spread", outputs)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.log("seen", outputs["scores"].abs().sum() * outputs["rows"])


class Weighted(Classifier):
    def training_step(self, batch, batch_idx):
        loss = cross_entropy(self.net(batch[0]), batch[1], weight=WEIGHTS)
        self.log("loss", loss)
        return loss


class Summed(Classifier):
    def training_step(self, batch, batch_idx):
        return cross_entropy(self.net(batch[0]), batch[1], reduction="sum")


class Keeps(Classifier):
    """As pages of Lightning's have it."""

    def validation_step(self, batch, batch_idx):
        loss = cross_entropy(self.net(batch[0]), batch[1])
        self.kept.append(loss)

    def on_validation_epoch_end(self):
        self.log("val_loss", torch.stack(self.kept).mean())
        self.kept.clear()


class Metered(Classifier):
    """A metric that is updated in steps, and read after them."""

    def __init__(self):
        super().__init__()
        torchmetrics = __import__("torchmetrics")
        self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=3)

    def validation_step(self, batch, batch_idx):
        self.accuracy.update(self.net(batch[0]), batch[1])

    def on_validation_epoch_end(self):
        self.log("accuracy", self.accuracy.compute())
        self.accuracy.reset()


class Lines(lightning.Callback):
    def __init__(self):
        self.lines = []

    def note(self, trainer):
        self.lines.append({name: float(value) for name, value in sorted(trainer.callback_metrics.items())})

    def on_train_batch_end(self, trainer, *_):
        self.note(trainer)

    def on_validation_end(self, trainer, _):
        self.note(trainer)


def fit(kind, folder, pipeline=None, **options):
    """What callbacks saw of two epochs, and the weights."""
    torch.manual_seed(0)
    strategy, lines = "auto", Lines()
    if pipeline is not None:
        from smpc.integrations.lightning import PipelineStrategy

        strategy = PipelineStrategy(pipeline, **options)
    trainer = lightning.Trainer(
        strategy=strategy, accelerator="cpu", devices=1, max_epochs=2, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, default_root_dir=str(folder), num_sanity_val_steps=0,
        callbacks=[lines],
    )  # fmt: skip
    trainer.fit(kind(), rows(), rows(30))
    weights = {key: value.clone() for key, value in trainer.strategy.lightning_module_state_dict().items()}
    return {"lines": lines.lines, "weights": weights}
