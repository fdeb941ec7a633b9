"""The Trainer in one process: the loop, intervals, files of a run, and damage to them."""

import json
import os
import pickle
import shutil
import warnings

import pytest
import torch
from support.trainer_cases import classifier, dataset, eager, everything, trainer
from torch import nn
from torch.utils.data import DataLoader

from smpc.composer import ComposerModel, Trainer
from smpc.composer.microbatches import cut
from smpc.errors import CheckpointError, ConfigError, UsageError
from smpc.sharding.dtensors import whole

SHARDED = {"state_dict_type": "sharded", "sharded_ckpt_prefix_dir": "ba{batch}-shards"}


def test_the_bits_of_plain_pytorch():
    made = trainer(4)
    made.fit()
    assert torch.equal(everything(made), eager(1, 4))
    assert made.state.timestamp.fields() == {"epoch": 1, "batch": 4, "sample": 16, "token": 0, "batch_in_epoch": 0}


def test_microbatches_of_any_size():
    for size, options in ((1, {}), (3, {}), (3, {"fsdp_config": {}}), (8, {})):
        made = trainer(4, device_train_microbatch_size=size, **options)
        made.fit()
        torch.testing.assert_close(everything(made), eager(1, 4), rtol=1e-5, atol=2e-6)


class Tagger(ComposerModel):
    """A class for each token; -100 is none."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Embedding(10, 6), nn.Linear(6, 3))

    def forward(self, batch):
        found = self.model(batch["input_ids"])
        return found if batch["labels"].dim() == 2 else found.mean(1)

    def loss(self, outputs, batch):
        return nn.functional.cross_entropy(outputs.flatten(0, -2), batch["labels"].flatten())


@pytest.mark.parametrize(
    "labels",
    [
        [[0, 1, 2, 0, 1], [-100] * 5, [2, -100, -100, -100, -100], [1, 2, -100, -100, 0]],
        [1, -100, 2, 0],
    ],
    ids=["tokens", "rows"],
)
def test_microbatches_weigh_by_the_labels_that_count_in_the_loss(labels):
    """Also one without any, whose mean is NaN; the number of tokens that are trained on does not depend on it."""
    ids, labels = torch.arange(20).view(4, 5) % 10, torch.tensor(labels)
    data = [{"input_ids": one, "labels": each} for one, each in zip(ids, labels, strict=True)]
    model, plain, losses = Tagger(), Tagger(), []
    made = Trainer(
        model=model,
        optimizers=torch.optim.SGD(model.parameters(), lr=1.0),
        train_dataloader=DataLoader(data, batch_size=4),
        device_train_microbatch_size=1,
        accumulate_train_batch_on_tokens=True,
        max_duration="2ba",
        device="cpu",
        callbacks=lambda state: losses.append(state.loss),
    )
    made.fit()
    optimizer, expected = torch.optim.SGD(plain.parameters(), lr=1.0), []
    for _ in range(2):
        batch = {"input_ids": ids, "labels": labels}
        optimizer.zero_grad()
        loss = plain.loss(plain(batch), batch)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    assert losses == pytest.approx(expected, rel=1e-6)
    for own, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-6)
    assert made.state.timestamp.token == 40


@pytest.mark.parametrize(
    "options", [{}, {"fsdp_config": {}}, {"precision": "amp_fp16"}], ids=["replicas", "sharded", "fp16"]
)
def test_clipping_counts_what_the_optimizer_updates(options):
    """Gradients of other parameters, which nothing sets to zero, counted and grew with each batch."""
    model, plain, data = classifier(), classifier(), dataset()
    given = {"fp16": {"enabled": True, "loss_scale": 8}} if options.get("precision") else {}
    if "fsdp_config" not in options:
        given = {"deepspeed_config": {"gradient_clipping": 0.1, **given}}
    made = Trainer(
        model=model, optimizers=torch.optim.SGD(model.model.head.parameters(), lr=0.5), device="cpu", max_duration="4ba",
        train_dataloader=DataLoader(data, batch_size=4), **(given if "fsdp_config" not in options else {}), **options,
    )  # fmt: skip
    made._stepper.clipping = 0.1
    made.fit()
    optimizer = torch.optim.SGD(plain.model.head.parameters(), lr=0.5)
    for batch in DataLoader(data, batch_size=4):
        with torch.autocast("cpu", torch.float16, enabled="precision" in options):
            plain.loss(plain(batch), batch).backward()
        torch.nn.utils.clip_grad_norm_(plain.model.head.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    tolerance = 1e-3 if "precision" in options else 1e-6
    torch.testing.assert_close(whole(model.model.head.weight), plain.model.head.weight, rtol=tolerance, atol=tolerance)


class Pages:
    """A batch that cuts itself."""

    def __init__(self, rows):
        self.rows = rows

    def smp_slice(self, num_pieces, index, axis):
        return Pages(self.rows.chunk(num_pieces, axis)[index])


def test_batches_that_cut_themselves():
    rows = torch.arange(8)
    pieces = cut({"x": rows, "pages": Pages(rows)}, 2)
    assert [piece["pages"].rows.tolist() for piece in pieces] == [piece["x"].tolist() for piece in pieces]
    with pytest.raises(ConfigError, match="a size that divides the 8 samples, as Pages cuts itself into equal pieces"):
        cut({"x": rows, "pages": Pages(rows)}, 3)


def test_activation_checkpointing_without_a_module_is_told():
    model = classifier()
    model.model.activation_checkpointing_fn = lambda module: False
    with pytest.warns(UserWarning, match="have no effect: no module is chosen"):
        trainer(4, model=model, fsdp_config={"activation_checkpointing": True})


def test_the_loop():
    """Schedulers, callbacks, evaluation, and a fit that goes on."""
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    seen = []
    data = dataset(8)
    made = Trainer(
        model=model,
        optimizers=optimizer,
        schedulers=schedule,
        train_dataloader=DataLoader(data, batch_size=4),
        eval_dataloader=DataLoader(data, batch_size=3),
        max_duration="3ep",
        device="cpu",
        callbacks=lambda state: seen.append((state.timestamp.epoch, state.timestamp.batch, state.loss)),
    )
    made.fit()
    assert [(epoch, batch) for epoch, batch, _ in seen] == [(0, 1), (1, 2), (1, 3), (2, 4), (2, 5), (3, 6)]
    assert optimizer.param_groups[0]["lr"] == 0.125
    whole = data.tensors
    assert made.eval() == pytest.approx(model.loss(model(whole), whole).item(), rel=1e-6)
    assert model.training
    made.fit("1ba")
    assert made.state.timestamp.batch == 7
    model.requires_grad_(False)
    with pytest.raises(UsageError, match="fit: expected a model with parameters that require grad"):
        made.fit("1ba")
    with pytest.raises(UsageError, match="fit: expected a train_dataloader"):
        Trainer(model=model, optimizers=optimizer, device="cpu").fit()


def test_no_optimizer_is_told():
    from smpc.composer import Trainer

    with pytest.warns(UserWarning, match="SGD with a learning rate of 0.1"):
        made = Trainer(model=classifier(), device="cpu")
    assert made.state.optimizer.param_groups[0]["lr"] == 0.1


def test_names_links_and_how_many_are_kept(tmp_path):
    made = trainer(4, save_folder=str(tmp_path), save_interval="1ba", save_num_checkpoints_to_keep=2, run_name="r")
    made.fit()
    assert sorted(os.listdir(tmp_path)) == [".smpc", "ep0-ba3-rank0.pt", "ep1-ba4-rank0.pt", "latest-rank0.pt"]
    assert os.readlink(tmp_path / "latest-rank0.pt") == "ep1-ba4-rank0.pt"
    with pytest.raises(CheckpointError, match="is there already; give save_overwrite=True"):
        made.save_checkpoint(str(tmp_path / "ep1-ba4-rank0.pt"))
    other = trainer(4, save_folder=str(tmp_path), save_interval="3ba")
    with pytest.raises(CheckpointError, match=r"ep0-ba3-rank0\.pt is there already"):
        other.fit()
    assert other.state.timestamp.batch == 0, "told before the training"
    again = trainer(4, save_folder=str(tmp_path), run_name="r", autoresume=True)
    assert torch.equal(everything(again), everything(made))
    assert again.state.timestamp == made.state.timestamp


@pytest.mark.parametrize("sharded", [False, True])
def test_a_checkpoint_that_is_written_over_counts_once(sharded, tmp_path):
    """The newest one was removed, as the name was an older one's, too."""
    options = {"save_filename": "only.pt"}
    if sharded:
        options = {"fsdp_config": SHARDED | {"sharded_ckpt_prefix_dir": "only.pt"}}
    options |= {"save_folder": str(tmp_path), "save_overwrite": True, "run_name": "r"}
    made = trainer(4, save_interval="1ba", save_num_checkpoints_to_keep=1, **options)
    made.fit()
    assert sorted(os.listdir(tmp_path)) == [".smpc", "latest-rank0.pt", "only.pt"]
    again = trainer(4, autoresume=True, **options)
    assert again.state.timestamp == made.state.timestamp
    assert torch.equal(everything(again), everything(made))


@pytest.mark.parametrize(
    "wrong",
    [
        {"timestamp": {"batch": "x"}}, {"timestamp": {"batch": -5}}, {"timestamp": {"epoch": True}}, {"timestamp": [1]},
        {"microbatch": "many"}, {"microbatch": 0}, {"microbatch": -3}, {"best": "low"}, {"scale": [1.0]}, {"scale": "big"},
        {"groups": [1]}, {"groups": [{"lr": "hot"}]},
    ],
)  # fmt: skip
def test_values_that_no_run_has(wrong, tmp_path):
    """A run went on from batch "x" and -5, and in microbatches of "many" and -3 samples."""
    trainer(4, max_duration="1ba").save_checkpoint(str(tmp_path / "a.pt"))
    saved = torch.load(tmp_path / "a.pt", weights_only=True)
    saved["state"]["plain"] = json.dumps(json.loads(saved["state"]["plain"]) | wrong)
    torch.save(saved, tmp_path / "b.pt")
    with pytest.warns(UserWarning, match="no checksums"), pytest.raises(CheckpointError, match=r"expected|not as"):
        trainer(4, load_path=str(tmp_path / "b.pt"))


@pytest.mark.parametrize("what", ["groups", "optimizer", "timestamp", "best", "lr", "rng"])
def test_a_checkpoint_that_does_not_fit_changes_nothing(what, tmp_path):
    """The model's values were taken before the rest was looked at."""
    made = trainer(4, max_duration="1ba")
    made.fit()
    path = made.save_checkpoint(str(tmp_path / "a.pt"))
    wrong = {"timestamp": {"timestamp": {"batch": "x"}}, "best": {"best": "low"}, "lr": {"groups": [{"lr": "hot"}]}}
    content = torch.load(path, weights_only=True)
    content["state"]["plain"] = json.dumps(json.loads(content["state"]["plain"]) | wrong.get(what, {}))
    if what == "rng":
        content["rng"]["0"]["plain"] = "[]"
    torch.save(content, path)
    shutil.rmtree(tmp_path / ".smpc")
    model = classifier()
    optimizer = torch.optim.AdamW(
        [{"params": model.model.blocks.parameters()}, {"params": model.model.head.parameters()}]
    )
    if what == "optimizer":
        optimizer = torch.optim.SGD(model.parameters())
    elif what != "groups":
        optimizer = torch.optim.AdamW(model.parameters())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    with pytest.warns(UserWarning, match="no checksums"), pytest.raises(CheckpointError):
        Trainer(model=model, optimizers=optimizer, load_path=path, device="cpu")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not optimizer.state
    assert torch.equal(torch.get_rng_state(), random)


def test_the_size_of_microbatches_is_the_scripts(tmp_path):
    """Without one a resumed run's batches are whole; it took the size of the run before."""
    path = trainer(4, device_train_microbatch_size=2).save_checkpoint(str(tmp_path / "a.pt"))
    sizes = {None: None, 4: 4, "auto": 2}
    for given, expected in sizes.items():
        found = trainer(4, load_path=path, device_train_microbatch_size=given)
        assert found.state.device_train_microbatch_size == expected


@pytest.fixture
def saved(tmp_path):
    made = trainer(4, fsdp_config=SHARDED, save_folder=str(tmp_path), save_interval="2ba", max_duration="2ba")
    made.fit()
    return made, tmp_path / "ba2-shards"


def _load(path, **options):
    return trainer(4, **{"fsdp_config": SHARDED, "load_path": str(path), **options})


def test_a_folder_that_cannot_be_written_to_is_told_before_training(tmp_path):
    (tmp_path / "file").touch()
    made = trainer(4, save_folder=str(tmp_path / "file" / "run"), save_overwrite=True)
    with pytest.raises(CheckpointError, match=r"save_folder '.*run': cannot be written to: Not a directory"):
        made.fit()
    assert made.state.timestamp.batch == 0
    padded = trainer(4, save_folder=str(tmp_path / "new" / "run"), save_filename="ba{batch:04d}.pt", max_duration="1ep")
    padded.fit()
    assert (tmp_path / "new" / "run" / "ba0004.pt").exists()


@pytest.mark.parametrize("name", ["max_duration", "save_interval", "eval_interval"])
def test_batches_without_tokens_are_no_clock(tmp_path, name):
    """A run that ends after so many tokens would never end."""
    options = {"save_folder": str(tmp_path), "eval_dataloader": [], name: "10tok"}
    with pytest.raises(
        ConfigError, match=f"{name}: expected batches with tokens, in input_ids or a tensor of integers"
    ):
        trainer(4, **options).fit()


def test_weights_alone_and_names_to_leave_out(saved):
    made, path = saved
    fresh = classifier()
    loaded = _load(path, load_weights_only=True, load_ignore_keys=["state/model/model.head.*"])
    assert loaded.state.timestamp.batch == 0
    assert not loaded.state.optimizer.state
    own = {name: value.full_tensor() for name, value in loaded.state.model.state_dict().items()}
    for name, value in made.state.model.state_dict().items():
        expected = fresh.state_dict()[name] if "head" in name else value.full_tensor()
        assert torch.equal(own[name], expected), name


def test_parts_to_leave_out(saved):
    path = saved[1]
    every = {"optimizers": "state/optimizers/*", "timestamp": "state/timestamp", "schedulers": "state/schedulers/*"}
    for left_out in every:
        found = _load(path, load_ignore_keys=[every[left_out], "rng"])
        assert bool(found.state.optimizer.state) == (left_out != "optimizers")
        assert found.state.timestamp.batch == (0 if left_out == "timestamp" else 2)
    torch.manual_seed(4)
    before = torch.get_rng_state()
    _load(path, seed=4, load_ignore_keys=["rng/*"])
    assert torch.equal(torch.get_rng_state(), before)
    _load(path, seed=4)
    assert not torch.equal(torch.get_rng_state(), before)
    with pytest.warns(UserWarning, match="load_ignore_keys: nothing is called state/modle/x, model.head.weight"):
        _load(path, load_ignore_keys=["state/modle/x", "state/model/model.head.*", "model.head.weight"])


def test_models_that_do_not_fit(saved):
    _, path = saved
    model = classifier()
    model.model.extra = torch.nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match=r"missing model\.extra\.bias, model\.extra\.weight, unexpected nothing"):
        _load(path, model=model)
    model = classifier()
    model.model.extra = torch.nn.Linear(2, 2)
    assert _load(path, model=model, load_strict_model_weights=False, load_weights_only=True)


def test_files_and_folders_are_told_apart(saved, tmp_path):
    _, path = saved
    with pytest.raises(CheckpointError, match="expected a file, as state_dict_type full has it, found a folder"):
        _load(path, fsdp_config={})
    for rank in range(2):
        (tmp_path / f"ba2_rank{rank}.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"checkpoints with a file for each rank, as torch 1.13 has them"):
        _load(tmp_path / "ba2_rank{rank}.pt")
    assert _load(tmp_path / "latest-rank{rank}.pt").state.timestamp.batch == 2
    with pytest.raises(CheckpointError, match="no checkpoint at"):
        _load(tmp_path / "absent")


class Planted:
    def __reduce__(self):
        return (os.mkdir, ("planted",))


@pytest.mark.parametrize("has_checks", [True, False])
def test_a_hostile_pickle_runs_nothing(saved, tmp_path, monkeypatch, has_checks):
    """torch's own reader unpickles `.metadata` with whatever it calls."""
    _, path = saved
    monkeypatch.chdir(tmp_path)
    (path / ".metadata").write_bytes(pickle.dumps(Planted()))
    if not has_checks:
        shutil.rmtree(tmp_path / ".smpc")
    monkeypatch.setattr("warnings.warn", lambda *args, **options: None)
    with pytest.raises(CheckpointError):
        _load(path)
    assert not (tmp_path / "planted").exists()


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_a_flipped_bit_is_noticed(saved, name):
    _, path = saved
    data = bytearray((path / name).read_bytes())
    data[len(data) // 2] ^= 4
    (path / name).write_bytes(data)
    with pytest.raises(CheckpointError, match=f"damaged, missing or replaced: {name}"):
        _load(path)


def test_missing_checksums_are_told(saved, tmp_path):
    made, path = saved
    shutil.rmtree(tmp_path / ".smpc")
    with pytest.warns(UserWarning, match="has no checksums"):
        loaded = _load(path)
    assert torch.equal(everything(loaded), everything(made))


def test_a_hostile_file(tmp_path, monkeypatch):
    torch.save({"state": {"model": {}, "x": Planted()}}, tmp_path / "a.pt")
    monkeypatch.setattr("warnings.warn", lambda *args, **options: None)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError):
        trainer(4, load_path=str(tmp_path / "a.pt"))
    assert not (tmp_path / "planted").exists()


@pytest.mark.parametrize("sharded", [False, True])
def test_casts_while_loading_are_told(sharded, tmp_path):
    """The values of a model in another dtype were rounded, without a word; those of an optimizer keep the saved dtype."""
    options = {"fsdp_config": SHARDED} if sharded else {}
    path = trainer(4, max_duration="1ba", **options).save_checkpoint(str(tmp_path / "a.pt"))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        trainer(4, load_path=path, **options)
    model = classifier().bfloat16()
    found = r"10 of others, which are cast: \S*model\.\S+ from torch\.float32 to torch\.bfloat16, \.\.\."
    with pytest.warns(UserWarning, match=found):
        trainer(4, model=model, load_path=path, load_weights_only=True, **options)
