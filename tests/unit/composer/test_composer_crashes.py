"""What a run finds in its folder after deaths, full disks and links that lead nowhere, and what it does not write over."""

import os

import pytest
from support.trainer_cases import trainer

from smpc.composer import checkpoint, storage
from smpc.errors import CheckpointError


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
