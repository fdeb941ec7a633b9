"""A run that goes on is the run that never stopped: data loaders, dropout, schedules, loss scales; and the best checkpoint."""

import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.trainer_cases import classifier, dataset, everything
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader

from smpc.composer import Trainer
from smpc.composer.json_values import decoded, encoded
from smpc.errors import CheckpointError, ConfigError

LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.integers() | st.binary(), inner)
    ),
    max_leaves=8,
)


@given(VALUES)
def test_plain_values_come_back(value):
    found = decoded(encoded(value))
    assert found == value
    assert repr(found) == repr(value), "with their types"


def test_tensors_and_strangers():
    tensor = torch.get_rng_state()
    assert torch.equal(decoded(encoded({"a": [tensor]}))["a"][0], tensor)
    with pytest.raises(CheckpointError, match=r"state\['a'\]\[1\]: expected plain values and tensors, found set"):
        encoded({"a": (1, {2})})
    with pytest.raises(TypeError):
        decoded('{"tensor": [1], "dtype": "load"}')


class Stateful:
    """A loader that shuffles, counts what it reads, and knows its place."""

    def __init__(self, fails_at=None):
        self.data, self.read, self.place = dataset().tensors, 0, 0

    def __len__(self):
        return 4

    def __iter__(self):
        if self.place == 0:
            self.order = torch.randperm(16)
        while self.place < 4:
            rows = self.order[4 * self.place : 4 * self.place + 4]
            self.read += 1
            self.place += 1
            yield tuple(tensor[rows] for tensor in self.data)
        self.place = 0

    def state_dict(self):
        return {"place": self.place, "order": self.order}

    def load_state_dict(self, state):
        self.place, self.order = state["place"], state["order"]


def _trainer(loader, folder, **options):
    model = classifier()
    dropped = nn.Dropout(0.5)
    model.model.blocks[0].register_forward_hook(lambda module, inputs, output: dropped(output))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    options = {"save_interval": "3ba", "max_duration": "6ba"} | options
    return Trainer(
        model=model, optimizers=optimizer, schedulers=CosineAnnealingLR(optimizer, 8), step_schedulers_every_batch=True,
        train_dataloader=loader, save_folder=str(folder), device="cpu", seed=1, **options,
    )  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [{}, {"fsdp_config": {"state_dict_type": "sharded"}}, {"precision": "amp_fp16"}],
    ids=["whole", "sharded", "fp16"],
)
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # a first update that fp16 leaves out
@pytest.mark.parametrize("kind", ["stateful", "plain"])
def test_a_run_that_goes_on(tmp_path, options, kind):
    def loader():
        return Stateful() if kind == "stateful" else DataLoader(dataset(), batch_size=4, shuffle=True)

    straight = _trainer(loader(), tmp_path / "a", **options)
    straight.fit()
    data = loader()
    name = "ep0-ba3" if "fsdp_config" in options else "ep0-ba3-rank0.pt"
    resumed = _trainer(data, tmp_path / "b", load_path=str(tmp_path / "a" / name), **options)
    assert resumed.state.timestamp.batch == 3
    resumed.fit()
    assert torch.equal(everything(resumed), everything(straight))
    assert resumed.state.loss == straight.state.loss
    assert resumed.state.schedulers[0].get_last_lr() == straight.state.schedulers[0].get_last_lr()
    if straight.state.scale is not None:
        assert resumed.state.scale == straight.state.scale
    if kind == "stateful":
        assert data.read <= 4, "of the first epoch, the last batch alone is read"


@pytest.mark.parametrize("sharded", [False, True])
def test_the_best_checkpoint(tmp_path, monkeypatch, sharded):
    loader = [tuple(tensor[:4] for tensor in dataset().tensors)] * 8
    options = {"fsdp_config": {"state_dict_type": "sharded"}} if sharded else {}
    options |= {"save_best_filename": "best", "save_num_checkpoints_to_keep": 1, "eval_dataloader": loader}
    made = _trainer(loader, tmp_path, eval_interval="1ba", **options)
    losses = iter([3.0, 1.0, 2.0, float("nan"), 1.0, 4.0, 0.5])
    seen = []
    monkeypatch.setattr(made, "eval", lambda: seen.append(everything(made)) or next(losses))
    made.fit()
    best = _trainer(loader, tmp_path / "x", load_path=str(tmp_path / "best"), **options)
    assert (best.state.timestamp.batch, best.state.best) == (2, 1.0)
    assert torch.equal(everything(best), seen[1])
    assert sorted(os.listdir(tmp_path))[:1] == [".smpc"]
    assert len([name for name in os.listdir(tmp_path) if name.startswith("ep")]) == 1
    with pytest.raises(ConfigError, match="save_best_filename: expected save_folder and eval_dataloader beside it"):
        Trainer(model=classifier(), save_best_filename="best", device="cpu")


def test_an_evaluation_that_is_nan_is_not_the_best(tmp_path, monkeypatch):
    """After one, no loss was less, and the checkpoint of it stayed; also of a run that older versions have saved."""
    loader = [tuple(tensor[:4] for tensor in dataset().tensors)] * 8
    options = {"save_best_filename": "best", "eval_dataloader": loader, "eval_interval": "1ba"}
    made = _trainer(loader, tmp_path, **options)
    losses = iter([float("nan"), 3.0, 2.0, float("nan"), 1.0, 4.0])
    monkeypatch.setattr(made, "eval", lambda: next(losses))
    made.fit()
    assert made.state.best == 1.0
    assert _trainer(loader, tmp_path / "x", load_path=str(tmp_path / "best"), **options).state.timestamp.batch == 5
    made.state.best = float("nan")
    old = made.save_checkpoint(str(tmp_path / "old.pt"))
    assert _trainer(loader, tmp_path / "x", load_path=old, **options).state.best is None


@pytest.mark.parametrize("sharded", [False, True])
def test_a_run_that_goes_on_counts_the_checkpoints_of_its_earlier_jobs(tmp_path, sharded):
    """Each job counted anew, so that each left as many behind. Those of another folder, and those that a script has named, stay."""
    options = {"fsdp_config": {"state_dict_type": "sharded"}} if sharded else {}
    options |= {"save_num_checkpoints_to_keep": 2, "save_interval": "1ba"}

    def names(folder):
        return sorted(each.split("-rank")[0] for each in os.listdir(folder) if each.startswith("ep"))

    loader = [tuple(tensor[:4] for tensor in dataset().tensors)] * 8
    first = _trainer(loader, tmp_path / "a", max_duration="3ba", **options)
    first.fit()
    first.save_checkpoint(str(tmp_path / "a" / "ep9-mine"))
    assert names(tmp_path / "a") == ["ep0-ba2", "ep0-ba3", "ep9-mine"]
    for end in (4, 6):
        again = _trainer(loader, tmp_path / "a", max_duration=f"{end}ba", autoresume=True, run_name="r", **options)
        again.fit()
        assert again.state.timestamp.batch == end
        assert names(tmp_path / "a") == [f"ep0-ba{end - 1}", f"ep0-ba{end}", "ep9-mine"]
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "ep0-ba5-rank0.pt").touch()
    path = str(tmp_path / "a" / os.readlink(tmp_path / "a" / "latest-rank0.pt"))
    _trainer(loader, tmp_path / "b", max_duration="8ba", load_path=path, **options).fit()
    assert names(tmp_path / "b") == ["ep0-ba5", "ep0-ba7", "ep1-ba8"]
    assert names(tmp_path / "a") == ["ep0-ba5", "ep0-ba6", "ep9-mine"]
