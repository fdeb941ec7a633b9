"""smp.save and smp.load in one process: file names, and files that must not be loaded."""

import pickle
import stat
from pathlib import Path

import pytest
import torch

import smpc.v1 as smp
from smpc.errors import CheckpointError, ConfigError, ConfigTypeError, UsageError


@pytest.fixture(autouse=True)
def session():
    smp.init({"pipeline_parallel_degree": 1})
    yield
    smp.shutdown()


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_file_names(tmp_path):
    path = str(tmp_path / "model.pt")
    value = {"tensor": torch.arange(3), "step": 7, "list": [1.5, None, "text"]}
    smp.save(value, path)
    smp.save(value, path, partial=False)
    smp.save(value, str(tmp_path / "v3.pt"), v3=True)
    smp.save(value, str(tmp_path / "old.pt_0"), partial=False)
    assert names(tmp_path) == ["model.pt", "model.pt_0_0", "old.pt_0", "v3.pt_0_0_0"]
    for found in (
        smp.load(path),
        smp.load(path, partial=False, map_location="cpu", mmap=True),
        smp.load(str(tmp_path / "v3.pt")),
        smp.load(str(tmp_path / "old.pt"), back_compat=True),
        torch.load(path, weights_only=True),
    ):
        assert torch.equal(found.pop("tensor"), value["tensor"])
        assert found == {"step": 7, "list": [1.5, None, "text"]}
    assert stat.S_IMODE((tmp_path / "model.pt").stat().st_mode) == 0o600


def test_a_missing_file_is_named_with_what_is_there(tmp_path):
    smp.save(1, str(tmp_path / "model.pt"), partial=False)
    with pytest.raises(CheckpointError, match=r"no checkpoint file .*model.pt_0_0; in .* there are model.pt$"):
        smp.load(str(tmp_path / "model.pt"))
    with pytest.raises(CheckpointError, match="there is no folder"):
        smp.load(str(tmp_path / "nowhere" / "model.pt"))
    with pytest.raises(CheckpointError, match=r"nothing in .* begins with other"):
        smp.load(str(tmp_path / "other.pt"))


class Canary:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("writer", ["save", "pickle"])
def test_no_code_in_a_file_runs(tmp_path, writer):
    canary = tmp_path / "canary"
    path = str(tmp_path / "model.pt")
    if writer == "save":
        smp.save({"x": torch.ones(1), "evil": Canary(canary)}, path, partial=False)
    else:
        Path(path).write_bytes(pickle.dumps(Canary(canary), protocol=2))
    with pytest.raises(CheckpointError, match="never unpickled"):
        smp.load(path, partial=False)
    with pytest.raises(ConfigError, match="expected True, found False"):
        smp.load(path, partial=False, weights_only=False)
    with pytest.warns(UserWarning, match="ignores pickle_module, encoding"), pytest.raises(CheckpointError):
        smp.load(path, pickle_module=object(), partial=False, encoding="latin1")
    assert not canary.exists()
    pickle.loads(pickle.dumps(Canary(canary)))
    assert canary.exists(), "the canary does sing when it is unpickled"


@pytest.mark.parametrize("damage", ["truncated", "empty", "junk"])
def test_damaged_files(tmp_path, damage):
    path = tmp_path / "model.pt"
    smp.save(torch.ones(1000), str(path), partial=False)
    content = path.read_bytes()
    path.write_bytes({"truncated": content[: len(content) // 2], "empty": b"", "junk": b"\x00\xffjunk"}[damage])
    with pytest.raises(CheckpointError, match=r"model\.pt"):
        smp.load(str(path), partial=False)


def test_a_failed_save_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "model.pt"
    smp.save({"x": 1}, str(path), partial=False)
    with pytest.raises(CheckpointError, match=r"cannot write .*model\.pt"):
        smp.save({"x": lambda: 1}, str(path), partial=False)
    assert names(tmp_path) == ["model.pt"]
    assert smp.load(str(path), partial=False) == {"x": 1}
    with pytest.raises(CheckpointError, match="the folder must exist and be writable"):
        smp.save(1, str(tmp_path / "nowhere" / "model.pt"))


def test_names_of_other_types(tmp_path):
    with (tmp_path / "x").open("wb") as file, pytest.raises(ConfigTypeError, match="open files are not supported"):
        smp.save(1, file)
    smp.save(1, tmp_path / "y")
    assert smp.load(tmp_path / "y") == 1


def test_before_init(tmp_path):
    smp.shutdown()
    with pytest.raises(UsageError, match=r"smp.init has not been called"):
        smp.save(1, str(tmp_path / "x"))
