"""A folder of checkpoints: the marker, what crashes leave, and what is left alone."""

import os
import shutil
import subprocess
import sys
import textwrap
import warnings

import pytest
import torch

from smpc.checkpoint import Alone, Checkpoint, Content, Root, Shard, save
from smpc.errors import CheckpointError


def put(root, step, **settings):
    return save(
        root, f"s{step}", Content([Shard.whole("model", "w", torch.full((3,), float(step)))]), Alone(), **settings
    )


@pytest.fixture
def root(tmp_path):
    found = Root(tmp_path / "run")
    put(found, 1)
    put(found, 2)
    return found


def value(folder):
    with Checkpoint.open(folder) as checkpoint:
        return checkpoint.read("model", "w")[0].item()


def test_an_empty_place_has_no_newest(tmp_path):
    assert Root(tmp_path / "nothing").newest() is None
    with pytest.raises(CheckpointError, match=r"no checkpoint s1 in .*; there is none"):
        Root(tmp_path / "nothing").find("s1")


def test_the_marker_names_the_newest(root):
    assert root.newest() == "s2"
    with open(f"{root.path}/newest") as file:
        assert file.read() == "s2\n"


@pytest.mark.parametrize("text", [None, b"", b"\xff\xfe\x00", b"s9\n", b"../../etc\n", b"s1\n", b"x" * 10_000])
def test_a_marker_that_is_missing_or_wrong_is_a_warning(root, text):
    os.unlink(f"{root.path}/newest")
    if text is not None:
        with open(f"{root.path}/newest", "wb") as file:
            file.write(text)
    with pytest.warns(UserWarning, match="not s2, the last whole checkpoint"):
        assert root.newest() == "s2"


def test_a_damaged_newest_gives_way_to_the_one_before(root):
    os.truncate(f"{root.path}/s2/model_00000.safetensors", 10)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert root.newest() == "s1"
    told = "\n".join(str(w.message) for w in caught)
    assert "s2/model_00000.safetensors: expected" in told
    assert "names 's2', not s1" in told
    assert os.path.isdir(f"{root.path}/s2")  # reported, never removed


def test_a_draft_of_a_dead_job_is_ignored_reported_and_cleaned(root):
    draft = f"{root.path}/.s3.0123abcd.draft"
    shutil.copytree(f"{root.path}/s2", draft)
    with pytest.warns(
        UserWarning, match=r"ignored: .*\.s3\.0123abcd\.draft: a save under way, or one that did not end"
    ):
        assert root.newest() == "s2"
    assert root.tags() == ["s1", "s2"]
    with pytest.warns(UserWarning, match=r"removed .*\.s3\.0123abcd\.draft"):
        put(root, 3)
    assert sorted(os.listdir(root.path)) == ["newest", "s1", "s2", "s3"]


@pytest.mark.long
def test_the_draft_of_a_job_at_work_is_left_alone(root):
    script = """
        import sys, os
        from smpc.checkpoint import Root
        draft = Root(sys.argv[1]).begin("s9", force=False)
        print(draft.path, flush=True)
        sys.stdin.read()
        os._exit(0)
    """
    job = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), root.path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with job:
        draft = job.stdout.readline().strip()
        assert root.clean() == []
        assert os.path.isdir(draft)
        job.stdin.close()
        job.wait(30)
    assert root.clean() == [f"removed {draft}"]


def test_a_forced_save_that_died_between_its_renames_has_lost_nothing(root):
    os.rename(f"{root.path}/s2", f"{root.path}/.s2.0123abcd.replaced")
    assert root.tags() == ["s1", "s2"]
    assert value(root.find("s2")) == 2
    assert root.clean()[0].startswith(f"put back {root.path}/s2")
    assert value(f"{root.path}/s2") == 2
    os.mkdir(f"{root.path}/.s2.0123abcd.replaced")
    os.mkdir(f"{root.path}/.s1.0123abcd.removed")
    assert len(root.clean()) == 2
    assert sorted(os.listdir(root.path)) == ["newest", "s1", "s2"]


def test_other_things_in_the_folder_are_left_alone(root):
    os.mkdir(f"{root.path}/.git")
    os.mkdir(f"{root.path}/.s1.draft")
    open(f"{root.path}/notes.txt", "w").close()
    put(root, 3, keep=1)
    assert sorted(os.listdir(root.path)) == [".git", ".s1.draft", "newest", "notes.txt", "s3"]


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot read .*file/run: Not a directory"):
        put(Root(tmp_path / "file" / "run"), 1)
    (tmp_path / "run" / "newest").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"expected a file, found a folder: .*newest"):
        put(Root(tmp_path / "run"), 1)
