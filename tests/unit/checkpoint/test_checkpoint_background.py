"""Saving in the background: snapshots, one after the other, and failures that cannot be missed."""

import os
import subprocess
import sys
import textwrap

import pytest
import torch

from smpc.checkpoint import Alone, BackgroundSaver, Checkpoint, Content, Root, Shard
from smpc.errors import CheckpointError


def test_what_is_saved_is_what_was_there(tmp_path):
    root, saver = Root(tmp_path / "run"), BackgroundSaver(Alone())
    tensors = [torch.zeros(500_000), torch.zeros(3, 4).t()]
    content = Content([Shard.whole("model", str(i), t) for i, t in enumerate(tensors)])
    for step in range(1, 6):
        for tensor in tensors:
            tensor.fill_(step)
        saver.save(root, f"s{step}", content, keep=3)
        for tensor in tensors:
            tensor.fill_(-1)
        saver.check()
    assert saver.wait() == f"{root.path}/s5"
    saver.close()
    assert root.tags() == ["s3", "s4", "s5"]
    for step in (3, 4, 5):
        with Checkpoint.open(root.find(f"s{step}")) as checkpoint:
            for i, tensor in enumerate(tensors):
                assert torch.equal(checkpoint.read("model", str(i)), torch.full(tensor.shape, float(step)))


def test_a_save_that_cannot_begin_raises_at_once(tmp_path):
    root, saver = Root(tmp_path / "run"), BackgroundSaver(Alone())
    content = Content([Shard.whole("model", "w", torch.ones(3))])
    saver.save(root, "s", content)
    with pytest.raises(CheckpointError, match="exists"):
        saver.save(root, "s", content)
    saver.close()


SCRIPT = """
    import resource, sys
    import torch
    from smpc.checkpoint import Alone, BackgroundSaver, Content, Root, Shard

    saver = BackgroundSaver(Alone())
    if sys.argv[2] == "full":
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    saver.save(Root(sys.argv[1]), "s", Content([Shard.whole("model", "w", torch.ones(4_000_000))]))
    print("exit", flush=True)
"""


@pytest.mark.long
@pytest.mark.parametrize("disk", ["free", "full"])
def test_an_immediate_exit_waits_or_fails_loudly(tmp_path, disk):
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), str(tmp_path / "run"), disk]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path)
    assert done.stdout == "exit\n"
    root = Root(tmp_path / "run")
    if disk == "free":
        assert (done.returncode, done.stderr) == (0, "")
        assert root.newest() == "s"
    else:
        assert done.returncode == 1
        assert "smpc: error: saving in the background failed: cannot write" in done.stderr
        assert os.listdir(root.path) == []
