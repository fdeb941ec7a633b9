"""Loaders of all kinds: without a length, once alone, of texts, and such that know their place and draw random numbers."""

import pytest
import torch
from support.trainer_cases import Classifier, classifier, dataset, everything
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from smpc.composer import Trainer
from smpc.errors import ConfigError

X, Y = dataset().tensors


def _trainer(loader, model=None, **options):
    model = model or classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    options = {"max_duration": "2ep", "device": "cpu", **options}
    return Trainer(model=model, optimizers=optimizer, train_dataloader=loader, **options)


class Streamed(IterableDataset):
    """Without a length; its noise is drawn as it is read."""

    def __iter__(self):
        for x, y in zip(X, Y, strict=True):
            yield x + torch.rand(1), y


@pytest.mark.parametrize("workers", [0, 1])
def test_an_iterable_data_set(tmp_path, workers):
    """The seven batches of two epochs, also where the run goes on in the middle of one."""
    options = {"seed": 3, "save_interval": "3ba"}
    made = _trainer(DataLoader(Streamed(), batch_size=5, num_workers=workers), save_folder=str(tmp_path), **options)
    made.fit()
    assert made.state.timestamp.fields() == {"epoch": 2, "batch": 8, "sample": 32, "token": 0, "batch_in_epoch": 0}
    loader = DataLoader(Streamed(), batch_size=5, num_workers=workers)
    again = _trainer(loader, load_path=str(tmp_path / "ep0-ba3-rank0.pt"), **options)
    again.fit()
    assert torch.equal(everything(again), everything(made))


class Noisy:
    """Knows its place, has no length, draws noise for every batch, and a number before the first, as torch's loaders do."""

    def __init__(self):
        self.place = 0

    def __iter__(self):
        torch.rand(1)
        return self._read()

    def _read(self):
        while self.place < 4:
            rows = slice(4 * self.place, 4 * self.place + 4)
            self.place += 1
            yield X[rows] + torch.rand(4, 8), Y[rows]
        self.place = 0

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


@pytest.mark.parametrize("interval", ["1ba", "3ba"])
def test_a_loader_that_knows_its_place_draws_the_same_numbers(tmp_path, interval):
    """Batches are read ahead of the training, from a random state of before: dropout draws between them."""
    runs = []
    for options in (
        {"save_folder": str(tmp_path), "save_interval": interval},
        {"load_path": str(tmp_path / "ep0-ba3-rank0.pt")},
    ):
        model = classifier()
        dropped = nn.Dropout(0.5)
        model.model.blocks[0].register_forward_hook(lambda module, inputs, output, drop=dropped: drop(output))
        made = _trainer(Noisy(), model, seed=3, **options)
        made.fit()
        runs.append(everything(made))
    assert torch.equal(*runs)


def test_a_loader_that_can_be_read_once():
    batches = (batch for batch in DataLoader(dataset(), batch_size=8))
    with pytest.raises(ConfigError, match="expected at least one batch, found none"):
        _trainer(batches).fit()


class Named(Classifier):
    """Gets a text for every sample, and options that are no samples."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def loss(self, outputs, batch):
        self.seen.append((batch["names"], batch["more"]))
        return nn.functional.cross_entropy(outputs, batch["y"])

    def forward(self, batch):
        return self.model(batch["x"])


def test_texts_are_cut_with_the_samples():
    model = Named()
    more = {"sizes": (1, 2, 3, 4), "flags": [True], "scale": 2.0, "none": None}
    batch = {"x": X[:4], "y": Y[:4], "names": ["a", "b", "c", "d"], "more": more}
    _trainer([batch], model, device_train_microbatch_size=3, max_duration="1ba").fit()
    assert model.seen == [(["a", "b", "c"], more), (["d"], more)]
