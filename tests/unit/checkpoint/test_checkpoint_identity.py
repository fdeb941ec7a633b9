"""What a checkpoint's folder may hold besides what was saved there: renamed folders, pipes, other savers, names that steer terminals."""

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from smpc.checkpoint import Alone, Checkpoint, Content, Root, Shard, load, open_source, save, write_folder
from smpc.checkpoint.folder.locks import publishing
from smpc.checkpoint.save import Saving
from smpc.cli import main
from smpc.errors import CheckpointError


def content(step):
    return Content([Shard.whole("model", "w", torch.full((3,), float(step)))], metadata={"step": step})


def put(root, step, **settings):
    return save(root, f"s{step}", content(step), Alone(), **settings)


@pytest.fixture
def root(tmp_path):
    found = Root(tmp_path / "run")
    put(found, 1)
    put(found, 2)
    return found


def command(capsys, *arguments):
    status = main(["checkpoint", *map(str, arguments)])
    out, err = capsys.readouterr()
    return status, out, err


def wanted():
    return [Shard.whole("model", "w", torch.zeros(3))]


# Folders that were renamed -------------------------------------------------------------------------------------------


def exchange(one, other):
    os.rename(one, f"{one}.aside")
    os.rename(other, one)
    os.rename(f"{one}.aside", other)


def test_folders_that_were_exchanged_are_refused(root, tmp_path, capsys):
    put(root, 3)
    exchange(f"{root.path}/s1", f"{root.path}/s2")
    for tag, other in (("s1", "s2"), ("s2", "s1")):
        shards = wanted()
        with pytest.raises(
            CheckpointError, match=rf"{tag}: this folder holds the checkpoint {other}, .*rename it to {other}"
        ):
            load(root.find(tag), shards, Alone())
        assert not shards[0].tensor.any()
    with pytest.warns(UserWarning, match=r"ignored: .*: this folder holds the checkpoint s[12]"):
        assert root.newest() == "s3"
    status, _, err = command(capsys, "convert", f"{root.path}/s1", tmp_path / "full", "--to", "full")
    assert (status, "holds the checkpoint s2" in err) == (2, True)
    assert not (tmp_path / "full").exists()
    status, out, _ = command(capsys, "verify", root.path)
    assert (status, out.count("this folder holds")) == (1, 2)
    status, out, _ = command(capsys, "inspect", f"{root.path}/s1")
    assert (status, "this folder holds the checkpoint s2" in out) == (0, True)
    exchange(f"{root.path}/s1", f"{root.path}/s2")  # the way out
    assert root.tags() == ["s1", "s2", "s3"]


def test_a_copy_under_another_name_loads_through_a_link_of_its_own(root, tmp_path):
    shutil.copytree(f"{root.path}/s2", tmp_path / "best")
    with pytest.raises(CheckpointError, match="or make a link of that name to it"):
        Checkpoint.open(tmp_path / "best")
    (tmp_path / "s2").symlink_to("best")
    (tmp_path / "latest").symlink_to(f"{root.path}/s2")  # a link may have any name, if what it points to has its own
    for path in (tmp_path / "s2", tmp_path / "latest"):
        shards = wanted()
        load(path, shards, Alone())
        assert shards[0].tensor[0] == 2


def test_where_nothing_is_whole_training_does_not_start_anew(root, capsys):
    for step in (1, 2):
        os.truncate(f"{root.path}/s{step}/model_00000.safetensors", 10)
    with pytest.raises(
        CheckpointError, match=r"(?s)none of the checkpoints there is whole.*s1/model_00000.*s2/model_00000"
    ):
        root.newest()
    status, out, _ = command(capsys, "inspect", root.path)
    assert (status, "newest: none" in out, "none of the checkpoints there is whole" in out) == (0, True, True)


def test_files_of_two_exports_are_not_mixed(root, tmp_path, capsys):
    for step in (1, 2):
        shards = [Shard.whole("model", name, torch.full((4,), float(step))) for name in ("a", "b")]
        save(root, f"x{step}", Content(shards), Alone())
        with open_source(root.find(f"x{step}")) as source:
            write_folder(source, tmp_path / f"hf{step}", max_file_bytes=16)
    name = "model-00002-of-00002.safetensors"
    shutil.copyfile(tmp_path / "hf1" / name, tmp_path / "hf2" / name)
    with pytest.raises(CheckpointError, match=rf"{name}: it is not of the same save as .*; take all files from one"):
        open_source(tmp_path / "hf2")
    status, out, _ = command(capsys, "verify", tmp_path / "hf2")
    assert (status, "not of the same save" in out) == (1, True)
    os.unlink(tmp_path / "hf1" / name)
    os.unlink(tmp_path / "hf1" / "model.safetensors.index.json")
    with pytest.raises(CheckpointError, match="expected 2 files of tensors, found 1"):
        open_source(tmp_path / "hf1")


def test_a_share_is_not_taken_for_a_model(root, tmp_path, capsys):
    """A rank's share holds parts, and other kinds of tensors; its checksums are in the manifest."""
    share = f"{root.path}/s2/model_00000.safetensors"
    status, _, err = command(capsys, "convert", share, tmp_path / "out", "--to", "full")
    assert (status, "the share of one rank of the checkpoint" in err) == (2, True)
    assert command(capsys, "inspect", share)[0] == 0
    os.unlink(f"{root.path}/s2/manifest.json")
    for arguments in (["convert", f"{root.path}/s2", tmp_path / "out", "--to", "full"], ["inspect", f"{root.path}/s2"]):
        status, _, err = command(capsys, *arguments)
        assert (status, "manifest.json: No such file" in err) == (2, True)
    assert not (tmp_path / "out").exists()
    with (
        pytest.warns(UserWarning, match=r"ignored: cannot read .*s2/manifest\.json: No such file"),
        pytest.warns(UserWarning, match="names 's2', not s1"),
    ):
        assert root.newest() == "s1"


# What is no file ----------------------------------------------------------------------------------------------------


def put_fifo(path):
    os.mkfifo(path)


def put_socket(path):
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


def put_device(path):
    os.symlink("/dev/zero", path)


def put_folder(path):
    os.mkdir(path)


STRANGE = [put_fifo, put_socket, put_device, put_folder]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("put_strange", STRANGE)
@pytest.mark.parametrize(
    "name", ["newest", "s2/manifest.json", "s2/model_00000.safetensors", "s2/values_00000.safetensors"]
)
def test_what_is_no_file_is_refused_at_once(tmp_path, put_strange, name, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)  # sockets have short names
    root = Root("run")
    put(root, 1)
    save(root, "s2", Content(content(2).shards, metadata={"x": torch.ones(1)}), Alone())
    os.unlink(f"run/{name}")
    put_strange(f"run/{name}")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert root.newest() == ("s2" if name == "newest" else "s1")
    assert any(name in str(warning.message) for warning in caught)
    if name != "newest":
        with pytest.raises(
            CheckpointError, match=rf"{name}: (not a regular|cannot read|expected)|cannot read .*{name}"
        ):
            load(root.find("s2"), wanted(), Alone())
        assert command(capsys, "verify", "run/s2")[0] in (1, 2)
    assert command(capsys, "inspect", "run")[0] == 0


@pytest.mark.timeout(60)
@pytest.mark.parametrize("put_strange", STRANGE)
def test_files_without_a_manifest_that_are_no_files(tmp_path, put_strange, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    put_strange("x.safetensors")
    put_strange("x.pt")
    os.mkdir("hf")
    put_strange("hf/model.safetensors")
    os.mkdir("dcp")
    put_strange("dcp/.metadata")
    for path in ("x.safetensors", "x.pt", "hf", "dcp"):
        for arguments in (["inspect", path], ["convert", path, "out", "--to", "full"]):
            status, _, err = command(capsys, *arguments)
            assert status == 2, (path, arguments)
            assert err.startswith("smpc: error: ")
    save(Root("run"), "s", content(1), Alone())
    put_strange("config.json")
    status, _, err = command(capsys, "convert", "run/s", "out", "--to", "hf", "--copy", "config.json")
    assert (status, len(err.splitlines())) == (2, 1)
    assert not os.path.exists("out")


# Several savers -----------------------------------------------------------------------------------------------------


def save_many(path, who, barrier, failures):
    barrier.wait()
    try:
        for step in range(8):
            save(Root(path), f"{who}_{step}", content(step), Alone(), force=step % 2 == 1)
    except BaseException as error:
        failures.append(error)


SAVER = """
import sys, warnings
warnings.simplefilter("ignore")
sys.path.insert(0, sys.argv[1])
from test_checkpoint_identity import Alone, Root, content, save
sys.stdin.readline()
for step in range(8):
    save(Root(sys.argv[2]), f"{sys.argv[3]}_{step}", content(step), Alone())
"""


@pytest.mark.long
def test_jobs_that_save_into_one_folder_do_not_disturb_each_other(tmp_path):
    """Each save drafts, numbers, renames and marks; each begins with cleaning up what dead jobs left."""
    path, failures = str(tmp_path / "run"), []
    command_ = [sys.executable, "-c", SAVER, str(Path(__file__).parent), path]
    other = subprocess.Popen([*command_, "p"], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    barrier = threading.Barrier(3)
    threads = [threading.Thread(target=save_many, args=(path, f"t{i}", barrier, failures)) for i in range(3)]
    other.stdin.write("\n")
    other.stdin.flush()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert other.communicate(timeout=100)[1] == ""
    assert [str(failure) for failure in failures] == []
    tags = Root(path).tags()
    assert len(tags) == 32
    numbers = [Checkpoint.open(f"{path}/{tag}").manifest.sequence for tag in tags]
    assert numbers == list(range(1, 33)), "every number once, in the order of saving"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Root(path).newest() == tags[-1]  # the marker names the last
    assert not [name for name in os.listdir(path) if name.startswith(".")]


def test_a_forced_save_is_not_put_back_by_another_job(root):
    """Between the two renames of a forced save the old checkpoint is hidden; who cleans up then leaves it alone."""
    seen = []

    def clean():
        seen.append(("cleaning", Root(root.path).clean()))

    with publishing(root.path):
        os.rename(f"{root.path}/s2", f"{root.path}/.s2.0123abcd.replaced")
        other = threading.Thread(target=clean)
        other.start()
        other.join(0.5)
        seen.append("renamed")
        shutil.copytree(f"{root.path}/.s2.0123abcd.replaced", f"{root.path}/s2")
    other.join(60)
    assert seen[0] == "renamed"
    assert seen[1] == ("cleaning", [f"removed {root.path}/.s2.0123abcd.replaced"])


def test_a_publication_that_fails_closes_its_lock_once(root, monkeypatch):
    """Closed again, the number would belong to a file that another thread has opened meanwhile."""
    saving = Saving(root, "s3", content(3), Alone())
    saving.agree()
    opened = []

    def fail(*arguments):
        raise OSError(28, "No space left on device", root.path)

    monkeypatch.setattr("smpc.checkpoint.folder.folders.sync_folder", fail)
    close = os.close

    def closing(descriptor):
        close(descriptor)
        opened.append(os.open("/dev/null", os.O_RDONLY))  # takes the lowest free number

    monkeypatch.setattr(os, "close", closing)
    with pytest.raises(CheckpointError, match="cannot publish"):
        saving.write()
    monkeypatch.undo()
    for descriptor in opened:
        os.fstat(descriptor)  # still open
        os.close(descriptor)
    assert root.tags() == ["s1", "s2"]


def test_what_is_saved_is_not_called_unpublished(root, monkeypatch):
    """The marker alone cannot be moved: the number in the manifest counts, so it is a warning."""
    replace = os.replace

    def fail(source, target):
        if target.endswith("newest"):
            raise OSError(28, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(os, "replace", fail)
    with pytest.warns(UserWarning, match=r"s3 is saved, but .*newest cannot be written"):
        put(root, 3)
    monkeypatch.undo()
    with pytest.warns(UserWarning, match="names 's2', not s3"):
        assert root.newest() == "s3"


def test_a_publication_that_cannot_reach_the_disk_is_taken_back(root, monkeypatch):
    from smpc.checkpoint.folder import folders

    sync = folders.sync_folder

    def fail(path):
        if path == root.path:
            raise OSError(5, "Input/output error", path)
        sync(path)

    monkeypatch.setattr(folders, "sync_folder", fail)
    for tag in ("s2", "s3"):
        with pytest.raises(CheckpointError, match=r"cannot publish .*Input/output error"):
            save(root, tag, content(9), Alone(), force=True)
    monkeypatch.undo()
    assert root.tags() == ["s1", "s2"]
    assert Checkpoint.open(root.find("s2")).metadata["step"] == 2
    assert sorted(os.listdir(root.path)) == ["newest", "s1", "s2"]


# Names ---------------------------------------------------------------------------------------------------------------

EVIL = "w\x1b[31m\x1b]0;title\x07\nsmpc: error: forged\u202e"


def test_names_out_of_files_cannot_steer_a_terminal(tmp_path, capsys):
    run = Root(tmp_path / "run")
    shards = [Shard.whole("model", EVIL, torch.ones(3)), Shard.whole("optimizer", EVIL, torch.ones(3))]
    save(run, "s", Content(shards, metadata={EVIL: EVIL}, user={EVIL: 1}), Alone())
    texts = []
    folder = tmp_path / "run" / "s"
    for target, form in ((tmp_path / "full", "full"), (tmp_path / "hf", "hf"), (tmp_path / "dcp", "dcp")):
        texts += command(capsys, "convert", folder, target, "--to", form)[1:]
        texts += command(capsys, "inspect", target, "--tensors")[1:]
    torch.save({EVIL: torch.ones(2)}, tmp_path / "x.pt")
    for path in (folder, tmp_path / "x.pt", tmp_path / "run"):
        texts += command(capsys, "inspect", path, "--tensors")[1:]
    save_file({EVIL: torch.ones(2), "b": torch.ones(2)}, tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError) as caught:
        load(folder, [Shard.whole("model", EVIL, torch.ones(4))], Alone())
    texts.append(str(caught.value).replace("\n", ""))
    for path in (tmp_path / "full", folder / "model_00000.safetensors"):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    for path in (tmp_path / "full", folder):
        status, out, err = command(capsys, "verify", path)
        assert status == 1
        texts += [out, err]
    for text in texts:
        assert all(character.isprintable() or character == "\n" for character in text), repr(text)
        assert not any(line.startswith("smpc: error: forged") for line in text.splitlines())
    assert any("\\x1b[31m" in text for text in texts)
    assert json.loads((folder / "manifest.json").read_text())["body"]["tensors"][0][1] == EVIL  # saved as it is
