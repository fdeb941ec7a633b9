"""Settings that a run takes up again, or that would have no effect: schedulers, names with fields, the newest checkpoint, samplers."""

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from support.trainer_cases import classifier, dataset
from torch.optim import lr_scheduler as schedules
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from smpc.composer import Trainer
from smpc.composer.checkpoint import _load_schedulers
from smpc.composer.json_values import decoded, encoded
from smpc.errors import CheckpointError, ConfigError


def _trainer(make=None, lr=1.0, **options):
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    made = () if make is None else make(optimizer)
    options = {
        "train_dataloader": DataLoader(dataset(), batch_size=8),
        "max_duration": "2ep",
        "device": "cpu",
        **options,
    }
    return Trainer(model=model, optimizers=optimizer, schedulers=made, **options)


class Slower:
    """A function with a state, which torch saves."""

    def __init__(self):
        self.by = 2

    def __call__(self, epoch):
        return 1 / (1 + epoch * self.by)


class Own(schedules.LambdaLR):
    """A schedule that has an object of the script's."""

    def __init__(self, optimizer):
        self.bias = {"by": object(), "list": [object()]}
        super().__init__(optimizer, lambda epoch: 0.5**epoch)


SCHEDULES = {
    "MultiStepLR": lambda o: schedules.MultiStepLR(o, [3, 5]),
    "StepLR": lambda o: schedules.StepLR(o, 2),
    "OneCycleLR": lambda o: schedules.OneCycleLR(o, 1.0, 10),
    "CyclicLR": lambda o: schedules.CyclicLR(o, 0.1, 1.0, 2),
    "LambdaLR": lambda o: schedules.LambdaLR(o, Slower()),
    "SequentialLR": lambda o: schedules.SequentialLR(
        o, [schedules.LinearLR(o, 0.1, total_iters=3), schedules.MultiStepLR(o, [1, 2])], [3]
    ),
    "warm restarts": lambda o: schedules.CosineAnnealingWarmRestarts(o, 3),
    "ChainedScheduler": lambda o: schedules.ChainedScheduler([schedules.ExponentialLR(o, 0.5), schedules.StepLR(o, 3)]),
    "of the script": Own,
}


@pytest.mark.matrix(9)
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("kind", [{}, {"fsdp_config": {"state_dict_type": "sharded"}}], ids=["full", "sharded"])
def test_schedules_go_on(tmp_path, name, kind):
    """The learning rates after resuming are those of a run that never stopped."""
    rates = []
    options = {"max_duration": "6ep", "step_schedulers_every_batch": False, **kind}
    note = {"callbacks": lambda state: rates.append(state.optimizer.param_groups[0]["lr"])}
    _trainer(SCHEDULES[name], save_folder=str(tmp_path), save_interval="2ep", **options, **note).fit()
    expected, rates[:] = rates[4:], []
    path = tmp_path / ("ep2-ba4" if kind else "ep2-ba4-rank0.pt")
    _trainer(SCHEDULES[name], load_path=str(path), **options, **note).fit()
    assert rates == expected
    assert len(set(rates)) > 1, "the schedule does something"


def test_schedules_that_do_not_fit_are_told(tmp_path):
    _trainer(SCHEDULES["StepLR"], save_folder=str(tmp_path)).fit()
    with pytest.warns(UserWarning, match=r"has 1 schedulers, and the Trainer 0"):
        _trainer(load_path=str(tmp_path / "latest-rank0.pt"))


def test_schedules_of_older_checkpoints(tmp_path):
    """Schedules' states were JSON as they are; loading one ended with a TypeError."""
    trainer = _trainer(SCHEDULES["StepLR"])
    _load_schedulers(trainer.state, [{**trainer.state.schedulers[0].state_dict(), "last_epoch": 3}])()
    assert trainer.state.schedulers[0].last_epoch == 3


def test_learning_rates_of_other_kinds(tmp_path):
    """NumPy's numbers and tensors are saved as numbers, and a tensor stays the one that it is."""
    made = _trainer(lr=np.float32(0.25), save_folder=str(tmp_path))
    made.fit()
    other = _trainer(lr=torch.tensor(0.5), load_path=str(tmp_path / "latest-rank0.pt"), max_duration="4ep")
    rate = other.state.optimizer.param_groups[0]["lr"]
    assert isinstance(rate, torch.Tensor)
    assert rate == 0.25
    other.fit()


def test_numpy_in_the_state_of_a_loader():
    found = decoded(encoded({"place": np.int64(3), "order": np.arange(3, dtype=np.uint8), "at": np.float32(0.5)}))
    assert (found["place"], found["at"]) == (3, 0.5)
    assert found["order"].tolist() == [0, 1, 2]
    assert found["order"].dtype == np.uint8


def test_fields_in_the_name_of_the_folder(tmp_path):
    options = {"save_folder": str(tmp_path / "{run_name}" / "checkpoints"), "run_name": "first"}
    made = _trainer(**options)
    made.fit()
    assert Path(made.save_checkpoint(str(tmp_path / "own-{batch}.pt"))).name == "own-4.pt"
    assert (tmp_path / "first" / "checkpoints" / "latest-rank0.pt").exists()
    assert _trainer(autoresume=True, **options).state.timestamp.batch == 4
    with pytest.raises(ConfigError, match=r"save_folder: .*expected the fields"):
        _trainer(save_folder="{name}/checkpoints")


def test_the_newest_checkpoint_needs_its_link(tmp_path):
    with pytest.raises(ConfigError, match=r"autoresume: .* missing run_name, save_latest_filename"):
        _trainer(autoresume=True, save_folder=str(tmp_path), save_latest_filename=None)


def test_a_run_that_is_over_is_told(tmp_path):
    made = _trainer()
    made.fit()
    with pytest.warns(UserWarning, match=r"fit: nothing to train: .*batch=4.* ends after 2ep"):
        made.fit()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made.fit("1ba")
    assert made.state.timestamp.batch == 5


def test_samplers_of_other_places(monkeypatch):
    """Ranks would read the same samples."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    sampler = DistributedSampler(dataset(), num_replicas=2, rank=0)
    with pytest.raises(ConfigError, match=r"expected a sampler of replica 1 of 2, found 0 of 2"):
        _trainer(train_dataloader=DataLoader(dataset(), batch_size=8, sampler=sampler))


def test_the_end_of_a_run_is_saved(tmp_path):
    """Also where no interval ends there; once, where one does. The script may save the same once more."""
    made = _trainer(save_folder=str(tmp_path), save_interval="3ba", save_filename="{batch}.pt")
    made.fit()
    assert made.save_checkpoint() == str(tmp_path / "4.pt")
    made.fit("2ba")
    assert sorted(path.name for path in tmp_path.glob("*.pt")) == ["3.pt", "4.pt", "6.pt", "latest-rank0.pt"]
    with pytest.raises(CheckpointError, match=r"6\.pt is there already"):
        _trainer(save_folder=str(tmp_path), save_interval="10ba", max_duration="3ep", save_filename="{batch}.pt").fit()


def test_what_the_script_saves_itself_stays(tmp_path):
    made = _trainer(save_folder=str(tmp_path), save_interval="1ba", save_num_checkpoints_to_keep=1)
    made.save_checkpoint(str(tmp_path / "first.pt"))
    made.fit()
    assert sorted(path.name for path in tmp_path.glob("*.pt")) == ["ep2-ba4-rank0.pt", "first.pt", "latest-rank0.pt"]


@pytest.mark.parametrize(
    "names",
    [
        {"save_filename": "x.pt", "save_latest_filename": "x.pt"},
        {"save_best_filename": "latest-rank0.pt", "eval_dataloader": [dataset()[:4]]},
        {"save_latest_filename": "ep{epoch}-ba{batch}", "fsdp_config": {"state_dict_type": "sharded"}},
    ],
)
def test_one_name_for_two_things(tmp_path, names):
    """The link would take the place of what it leads to."""
    with pytest.raises(ConfigError, match=r"expected names that differ"):
        _trainer(save_folder=str(tmp_path), **names)


def test_a_link_with_the_name_of_one_checkpoint(tmp_path):
    made = _trainer(save_folder=str(tmp_path), save_filename="{batch}.pt", save_latest_filename="4.pt")
    with pytest.raises(ConfigError, match=r"save_latest_filename: expected another name than a checkpoint's"):
        made.fit()


def test_weights_without_an_optimizer_are_told(tmp_path):
    _trainer(save_folder=str(tmp_path), save_weights_only=True).fit()
    with pytest.warns(UserWarning, match=r"has weights, and no optimizer"):
        _trainer(load_path=str(tmp_path / "latest-rank0.pt"))


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_a_file_of_a_sharded_checkpoint_is_not_its_folder(tmp_path, name):
    _trainer(save_folder=str(tmp_path), fsdp_config={"state_dict_type": "sharded"}).fit()
    with pytest.raises(CheckpointError, match=r"expected the folder of a sharded checkpoint, .*; give '.*ep2-ba4'"):
        _trainer(load_path=str(tmp_path / "ep2-ba4" / name))
