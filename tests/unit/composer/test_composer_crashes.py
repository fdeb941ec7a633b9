"""What a run finds in its folder after deaths, full disks and links that lead nowhere, and what it does not write over."""

import os
import shutil
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.trainer_cases import everything, trainer

from smpc.composer import checkpoint, checkpoint_folder, storage
from smpc.composer.duration import Duration, Timestamp
from smpc.errors import CheckpointError, ConfigError


class Killed(BaseException):
    """In place of SIGKILL: nothing that follows runs."""


def _killed(*args, **options):
    raise Killed


def test_a_full_disk_leaves_the_old_checkpoint_and_its_checks(tmp_path, monkeypatch):
    """The checks of the old one were gone, and damage to it was not noticed."""
    options = {"save_folder": str(tmp_path), "save_filename": "x.pt", "save_overwrite": True}
    trainer(4, max_duration="1ba", **options).fit()
    path = tmp_path / "x.pt"
    before = path.read_bytes()

    def full(tree, file):
        raise CheckpointError("no space left")

    again = trainer(4, max_duration="2ba", load_path=str(path), **options)
    monkeypatch.setattr(checkpoint, "write_file", full)
    with pytest.raises(CheckpointError, match="no space left"):
        again.fit()
    assert path.read_bytes() == before
    trainer(4, load_path=str(path))
    path.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=r"damaged, missing or replaced: x\.pt"):
        trainer(4, load_path=str(path))


@pytest.mark.parametrize("options", [{"save_filename": "ck"}], ids=["whole"])
@pytest.mark.parametrize("dies_in", ["replace", "adopt_checks"])
def test_checks_fit_the_old_and_the_new_one_whenever_a_job_dies(tmp_path, monkeypatch, options, dies_in):
    options = {"save_folder": str(tmp_path), "save_overwrite": True, **options}
    trainer(4, max_duration="1ba", **options).fit()
    second = trainer(4, max_duration="2ba", load_path=str(tmp_path / "ck"), **options)
    if dies_in == "adopt_checks":
        monkeypatch.setattr(storage, "adopt_checks", _killed)
    else:
        name = "rename" if "fsdp_config" in options else "replace"
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda a, b: _killed() if str(a).endswith(".ck.draft") else real(a, b))
    with pytest.raises(Killed):
        second.fit()
    monkeypatch.undo()
    found = trainer(4, load_path=str(tmp_path / "ck"), **{**options, "save_folder": None})
    assert found.state.timestamp.batch == (2 if dies_in == "adopt_checks" else 1)
    flipped = next(p for p in sorted(tmp_path.glob("ck/*.distcp")) or [tmp_path / "ck"])
    data = bytearray(flipped.read_bytes())
    data[len(data) // 2] ^= 4
    flipped.write_bytes(data)
    with pytest.raises(CheckpointError):
        trainer(4, load_path=str(tmp_path / "ck"), **{**options, "save_folder": None})


SHARDED = {"fsdp_config": {"state_dict_type": "sharded"}}
KINDS = pytest.mark.parametrize("options", [{}, SHARDED], ids=["whole", "sharded"])


def _run(folder, **options):
    return trainer(4, save_folder=str(folder), run_name="r", save_interval="1ba", **options)


def _path(folder, batch, options):
    return folder / f"ep{batch // 4}-ba{batch}{'' if options else '-rank0.pt'}"


@pytest.mark.long
@KINDS
def test_a_link_that_leads_nowhere(tmp_path, options):
    """The run began anew, and then wrote over the checkpoints that were there."""
    made = _run(tmp_path, max_duration="4ba", **options)
    made.fit()
    newest = _path(tmp_path, 4, options)
    (shutil.rmtree if options else os.remove)(newest)
    before = trainer(4, load_path=str(_path(tmp_path, 3, options)), **options)
    with pytest.warns(UserWarning, match=r"autoresume: .*latest-rank0.pt leads to no checkpoint: .* from .*ep0-ba3"):
        found = _run(tmp_path, max_duration="4ba", autoresume=True, **options)
    assert found.state.timestamp == before.state.timestamp
    assert torch.equal(everything(found), everything(before))
    os.remove(tmp_path / "latest-rank0.pt")
    third = next(_path(tmp_path, 3, options).glob("*.distcp")) if options else _path(tmp_path, 3, options)
    third.write_bytes(third.read_bytes()[:50])
    with warnings.catch_warnings(record=True, action="always") as told:
        found = _run(tmp_path, max_duration="4ba", autoresume=True, **options)
    assert found.state.timestamp.batch == 2
    assert ["ep0-ba3" in str(each.message) for each in told] == [True, False], "what is not whole, and what is taken"
    for batch in (1, 2):
        path = _path(tmp_path, batch, options)
        (path / ".metadata" if options else path).write_bytes(b"x")
    with pytest.raises(CheckpointError, match="none of the checkpoints there is whole; mend one, or move them away"):
        _run(tmp_path, autoresume=True, **options)


@KINDS
def test_death_between_a_checkpoint_and_its_link(tmp_path, monkeypatch, options):
    """The run went on from the older one, and failed after an epoch at every start, as the newer one was there."""
    straight = _run(tmp_path / "straight", **options)
    straight.fit()
    real, calls = storage.link, []
    monkeypatch.setattr(storage, "link", lambda *given: _killed() if calls else (calls.append(1), real(*given)))
    with pytest.raises(Killed):
        _run(tmp_path, **options).fit()
    monkeypatch.undo()
    assert os.readlink(tmp_path / "latest-rank0.pt") == _path(tmp_path, 1, options).name
    with pytest.warns(UserWarning, match=r"leads to .*ep0-ba1.*: the run goes on from .*ep0-ba2"):
        again = _run(tmp_path, autoresume=True, **options)
    assert again.state.timestamp.batch == 2
    again.fit()
    assert torch.equal(everything(again), everything(straight))
    assert os.readlink(tmp_path / "latest-rank0.pt") == _path(tmp_path, 4, options).name


def test_checkpoints_of_an_earlier_attempt_are_not_newer(tmp_path):
    """A run that was begun again from an older one: the link leads to it, though another has come further."""
    _run(tmp_path).fit()
    _run(tmp_path, load_path=str(_path(tmp_path, 1, {})), max_duration="2ba", save_overwrite=True).fit()
    assert _run(tmp_path, autoresume=True).state.timestamp.batch == 2


def test_death_between_the_two_renames_of_a_sharded_save(tmp_path, monkeypatch):
    """The next run began at batch 0: the old checkpoint was there under its hidden name alone."""
    options = {"fsdp_config": {"state_dict_type": "sharded", "sharded_ckpt_prefix_dir": "ck"}, "save_overwrite": True}
    first = _run(tmp_path, max_duration="1ba", **options)
    first.fit()
    real = os.rename
    second = _run(tmp_path, autoresume=True, max_duration="2ba", **options)
    monkeypatch.setattr(os, "rename", lambda a, b: _killed() if str(a).endswith(".ck.draft") else real(a, b))
    with pytest.raises(Killed):
        second.fit()
    monkeypatch.undo()
    assert not (tmp_path / "ck").exists()
    shutil.copytree(tmp_path, tmp_path / "copy", symlinks=True)
    again = _run(tmp_path, autoresume=True, **options)
    by_path = trainer(4, load_path=str(tmp_path / "copy" / "ck"), fsdp_config=options["fsdp_config"])
    for found in (again, by_path):
        assert found.state.timestamp == first.state.timestamp
        assert torch.equal(everything(found), everything(first))


@KINDS
def test_a_name_that_is_there_is_told_before_a_resumed_run_trains(tmp_path, options):
    """It was told after an epoch of training, which was lost."""
    _run(tmp_path, max_duration="4ba", **options).fit()
    again = _run(tmp_path, load_path=str(_path(tmp_path, 2, options)), **options)
    with pytest.raises(CheckpointError, match=r"ep0-ba3.* is there already; give save_overwrite=True"):
        again.fit()
    assert again.state.timestamp.batch == 2


@pytest.mark.parametrize(
    ("name", "options", "is_refused"),
    [
        ("ck.pt", {"save_interval": "1ba"}, True),
        ("ck.pt", {"save_interval": "3ba"}, True),
        ("ck.pt", {"save_interval": "1ep"}, False),
        ("ep{epoch}.pt", {"save_interval": "1ba"}, True),
        ("ep{epoch}.pt", {"save_interval": "1ep", "max_duration": "2ep"}, False),
        ("{batch_in_epoch}.pt", {"save_interval": "1ep", "max_duration": "2ep"}, True),
        ("{sample}.pt", {"save_interval": "1ba"}, False),
        ("ck.pt", {"save_interval": "1ba", "save_overwrite": True}, False),
    ],
)
def test_names_that_two_checkpoints_share_are_told_before_training(tmp_path, name, options, is_refused):
    """The second of them failed, after the training in between."""
    made = trainer(4, save_folder=str(tmp_path), save_filename=name, **options)
    if not is_refused:
        made.fit()
        return
    with pytest.raises(ConfigError, match="save_filename: expected a name for each checkpoint, found"):
        made.fit()
    assert made.state.timestamp.batch == 0


@given(st.integers(1, 5), st.integers(1, 9), st.integers(1, 12), st.integers(0, 11), st.sampled_from(["ba", "ep"]))
def test_when_a_run_saves_next(batches, count, last, reached, unit):
    """As the loop of a run counts it, batch by batch."""
    interval, end = Duration(count, unit), Duration(last, "ba")
    now = Timestamp(reached // batches, reached, batch_in_epoch=reached % batches)
    expected, before = [], now
    for batch in range(reached + 1, last + 1):
        after = Timestamp(batch // batches, batch, batch_in_epoch=batch % batches)
        expected += [after] if interval.passed(before, after) or batch == last else []
        before = after
    assert checkpoint_folder._next_saves(now, interval, end, batches) == expected[:2]
