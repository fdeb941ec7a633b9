"""`smpc checkpoint` as a user meets it."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file

from smpc.checkpoint import Alone, Content, Root, Shard, save
from smpc.cli import main


@pytest.fixture
def smpc(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for step in (1, 2):
        shards = [Shard.whole("model", "[red]w", torch.ones(3, 4)), Shard.whole("optimizer", "m", torch.ones(2))]
        save(Root("run"), f"s{step}", Content(shards, metadata={"step": step}, plan="{}"), Alone())

    def smpc(*arguments):
        status = main(["checkpoint", *arguments])
        out, err = capsys.readouterr()
        return status, out, err

    return smpc


def test_inspect(smpc):
    status, out, err = smpc("inspect", "run")
    assert (status, err) == (0, "")
    assert "newest: s2" in out
    assert [line.split()[0] for line in out.splitlines()[3:5]] == ["s1", "s2"]
    status, out, _ = smpc("inspect", "run/s1", "--tensors")
    assert status == 0
    assert "[red]w" in out
    assert "3x4" in out
    found = json.loads(smpc("inspect", "run/s1", "--json")[1])
    assert found["tag"] == "s1"
    assert found["tensors"][1] == {"kind": "optimizer", "name": "m", "dtype": "float32", "shape": [2], "bytes": 8}


def test_verify(smpc):
    assert smpc("verify", "run")[0] == 0
    path = "run/s1/model_00000.safetensors"
    with open(path, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xff")
    status, out, err = smpc("verify", "run")
    assert (status, err) == (1, "")
    assert f"{os.path.abspath(path)}: damaged" in out
    os.unlink(path)
    assert smpc("verify", "run")[0] == 1
    assert smpc("verify", "run/s2")[0] == 0


def test_convert(smpc, tmp_path):
    with open("config.json", "w") as file:
        file.write("{}")
    assert smpc("convert", "run/s2", "full.safetensors", "--to", "full", "--dtype", "bfloat16")[0] == 0
    assert load_file("full.safetensors")["[red]w"].dtype == torch.bfloat16
    assert smpc("convert", "run/s2", "hf", "--to", "hf", "--copy", "config.json")[0] == 0
    assert sorted(os.listdir("hf")) == ["config.json", "model.safetensors"]
    assert smpc("convert", "run/s2", "dcp", "--to", "dcp")[0] == 0
    assert smpc("convert", "dcp", "run/s3", "--to", "partial")[0] == 0
    assert Root("run").tags() == ["s1", "s2", "s3"]


def test_prune(smpc):
    assert "would remove" in smpc("prune", "run", "--keep", "1", "--dry-run")[1]
    assert Root("run").tags() == ["s1", "s2"]
    status, out, err = smpc("prune", "run", "--keep", "1")
    assert (status, out, err) == (0, f"removed {os.path.abspath('run/s1')}\n", "")
    assert Root("run").tags() == ["s2"]


BAD = {
    "missing": (["inspect", "nowhere"], "nowhere: no such file or folder"),
    "nothing to verify": (["verify", "."], "cannot read"),
    "keep 0": (["prune", "run", "--keep", "0"], "expected at least 1, found 0"),
    "prune one": (["prune", "run/s1", "--keep", "1"], "found a checkpoint"),
    "exists": (["convert", "run/s1", "run/s2", "--to", "partial"], "exists and is not overwritten"),
    "dtype": (
        ["convert", "run/s1", "x", "--to", "full", "--dtype", "int8"],
        "--dtype: expected a floating-point dtype",
    ),
    "copy": (["convert", "run/s1", "x", "--to", "full", "--copy", "c"], "--copy: has no effect"),
    "copy missing": (["convert", "run/s1", "x", "--to", "hf", "--copy", "c"], "--copy: cannot read c"),
    "form": (["convert", "run/s1", "x", "--to", "zip"], "zip"),
    "root": (["convert", "run", "x", "--to", "full"], "it holds the checkpoints s1, s2"),
}


@pytest.mark.parametrize(("arguments", "told"), BAD.values(), ids=BAD.keys())
def test_bad_input_is_one_line_and_2(smpc, arguments, told):
    status, _, err = smpc(*arguments)
    assert status == 2
    assert told in err
    assert err.startswith("smpc: error: ")
    assert "Traceback" not in err
    assert not os.path.exists("x")
