"""smp.save and smp.load in one process: file names, and files that must not be loaded."""

import os
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


@pytest.mark.parametrize("is_sharded", [False, True])
def test_of_files_of_several_jobs_that_of_jobs_like_this_one_is_loaded(tmp_path, is_sharded):
    """A folder may have the states of a job whose replicas saved each its own, and of one whose first replica saved for all."""
    path = str(tmp_path / "optimizer.pt")
    smp.save({"of": "all"}, path)
    smp.save({"of": "each"}, path, v3=True)
    smp.shutdown()
    smp.init({"shard_optimizer_state": is_sharded, "ddp": True})
    assert smp.load(path) == {"of": "each" if is_sharded else "all"}
    (tmp_path / ("optimizer.pt_0_0_0" if is_sharded else "optimizer.pt_0_0")).unlink()
    assert smp.load(path) == {"of": "all" if is_sharded else "each"}


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


@pytest.mark.parametrize("protocol", [0, 1, 3, 4, 5, -1])
def test_what_is_saved_with_another_protocol_loads_again(tmp_path, protocol):
    """Only protocol 2 can be read without running code, so that is what is written, and said."""
    path = tmp_path / "x.pt"
    value = {"x": torch.arange(3), "text": "a" * 300, "step": 7}
    with pytest.warns(UserWarning, match=f"pickle_protocol={protocol} has no effect"):
        smp.save(value, str(path), partial=False, pickle_protocol=protocol)
    found = smp.load(str(path), partial=False)
    assert torch.equal(found.pop("x"), value.pop("x"))
    assert found == value


def test_protocols_that_cannot_be_read_are_named(tmp_path):
    path = str(tmp_path / "x.pt")
    torch.save({"step": 7}, path, pickle_protocol=4)
    with (
        pytest.warns(UserWarning, match="Detected pickle protocol 4"),
        pytest.raises(CheckpointError, match="Only files of pickle protocol 2"),
    ):
        smp.load(path, partial=False)
    with pytest.raises(ConfigError, match="pickle_protocol: expected a whole number up to"):
        smp.save(1, path, pickle_protocol=99)


def test_the_order_of_arguments_is_that_of_the_documentation(tmp_path):
    """load(f, map_location, pickle_module, pickle_load_args, partial); a `partial` in the wrong place is not taken for anything else."""
    path = str(tmp_path / "x.pt")
    smp.save(1, path, partial=False)
    smp.save(2, path)
    assert smp.load(path, "cpu", pickle, {}, False) == 1
    assert smp.load(path, "cpu", pickle, {"mmap": True}, True) == 2
    assert smp.load(path, None, None, None, False) == 1
    with pytest.warns(UserWarning, match="ignores encoding"):
        assert smp.load(path, None, pickle, {"encoding": "latin1"}) == 2
    with pytest.raises(
        ConfigTypeError, match=r"pickle_load_args: expected a dict or None, found False; .*smp.load\(f, partial=False\)"
    ):
        smp.load(path, "cpu", pickle, False)
    with pytest.raises(ConfigError, match="weights_only"):
        smp.load(path, None, None, {"weights_only": False})


def test_a_pipe_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match="expected a regular file, found a named pipe"):
        smp.load(str(tmp_path / "x.pt"), partial=False)


def test_names_of_other_types(tmp_path):
    with (tmp_path / "x").open("wb") as file, pytest.raises(ConfigTypeError, match="open files are not supported"):
        smp.save(1, file)
    smp.save(1, tmp_path / "y")
    assert smp.load(tmp_path / "y") == 1


def test_before_init(tmp_path):
    smp.shutdown()
    with pytest.raises(UsageError, match=r"smp.init has not been called"):
        smp.save(1, str(tmp_path / "x"))
