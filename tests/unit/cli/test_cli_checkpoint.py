"""`smpc checkpoint` as a user meets it."""

import json
import os
import shutil
from pathlib import Path

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
    assert "full" not in out
    assert [line.split()[0] for line in out.splitlines()[3:5]] == ["s1", "s2"]
    status, out, _ = smpc("inspect", "run/s1", "--tensors")
    assert status == 0
    assert "[red]w" in out
    assert "3x4" in out
    found = json.loads(smpc("inspect", "run/s1", "--json")[1])
    assert found["tag"] == "s1"
    shutil.copyfile("run/s1/model_00000.safetensors", "run/whole")
    os.mkdir("run/user_content_whole")
    os.mkdir("run/user_content_gone")
    assert "full models, of smp.save_checkpoint(partial=False): whole\n" in smpc("inspect", "run")[1]
    assert json.loads(smpc("inspect", "run", "--json")[1])["full"] == ["whole"]
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
    assert smpc("convert", "run/s2", "model.bin", "--to", "torch", "--dtype", "bfloat16")[0] == 0
    assert torch.load("model.bin", weights_only=True)["[red]w"].dtype == torch.bfloat16
    assert smpc("verify", "model.bin")[0] == 0
    assert smpc("convert", "run/s2", "hf", "--to", "hf", "--copy", "config.json")[0] == 0
    assert sorted(os.listdir("hf")) == ["config.json", "model.safetensors"]
    assert smpc("convert", "run/s2", "dcp", "--to", "dcp")[0] == 0
    assert smpc("convert", "dcp", "run/s3", "--to", "partial")[0] == 0
    assert Root("run").tags() == ["s1", "s2", "s3"]


def test_a_folder_in_disorder_is_told(smpc):
    Path("run/newest").write_text("junk")
    os.mkdir("run/.s9.0123abcd.draft")
    os.truncate("run/s1/model_00000.safetensors", 9)
    out = smpc("inspect", "run")[1]
    assert "newest: s2" in out
    assert "ignored: " in out
    assert "names 'junk', not s2" in out
    assert "found 9" in out


def test_a_folder_that_everybody_can_write_is_a_line(smpc):
    os.mkdir("open")
    os.chmod("open", 0o777)
    status, _, err = smpc("convert", "run/s2", "open/s2", "--to", "partial")
    assert status == 0
    assert (
        err
        == f"smpc: warning: {os.path.abspath('open')} can be written by everybody, who can so replace checkpoints; chmod o-w it\n"
    )


def test_what_is_tied_has_all_its_names_where_a_state_dict_has_them(smpc):
    shards = [Shard.whole("model", "w", torch.ones(2))]
    user = {"big": torch.zeros(3, 2)}
    save(Root("run"), "tied", Content(shards, metadata={"tied": {"head.w": "w"}}, user=user), Alone())
    for form in ("full", "dcp"):
        assert smpc("convert", "run/tied", form, "--to", form)[0] == 0
        names = [tensor["name"] for tensor in json.loads(smpc("inspect", form, "--json")[1])["tensors"]]
        assert sorted(names) == ["head.w", "w"]
    assert smpc("convert", "dcp", "run/again", "--to", "partial")[0] == 0
    assert [tensor["name"] for tensor in json.loads(smpc("inspect", "run/again", "--json")[1])["tensors"]] == ["w"]
    assert "user content: {'big': <float32 3x2>}" in smpc("inspect", "run/tied")[1]


def test_distributed_layers_go_by_hugging_faces_names(smpc):
    tensors = {f"h.0.attention.{name}.weight": torch.randn(4, 4) for name in ("query", "key", "value", "dense")}
    shards = [
        Shard.whole("model", name, tensor) for name, tensor in (*tensors.items(), ("wte.weight", torch.ones(3, 4)))
    ]
    save(Root("run"), "layers", Content(shards), Alone())
    assert smpc("convert", "run/layers", "hf", "--to", "hf", "--model-type", "gpt2")[0] == 0
    found = load_file("hf/model.safetensors")
    assert sorted(found) == ["h.0.attn.c_attn.weight", "h.0.attn.c_proj.weight", "wte.weight"]
    query, key, value, dense = tensors.values()
    assert torch.equal(found["h.0.attn.c_attn.weight"], torch.cat([query.t(), key.t(), value.t()], 1))
    assert torch.equal(found["h.0.attn.c_proj.weight"], dense.t())


def test_prune(smpc):
    assert "would remove" in smpc("prune", "run", "--keep", "1", "--dry-run")[1]
    assert Root("run").tags() == ["s1", "s2"]
    status, out, err = smpc("prune", "run", "--keep", "1")
    assert (status, out, err) == (0, f"removed {os.path.abspath('run/s1')}\n", "")
    assert Root("run").tags() == ["s2"]


BAD = {
    "missing": (["inspect", "nowhere"], "nowhere: no such file or folder"),
    "nothing to verify": (["verify", "."], "other forms have no checksums"),
    "no form to verify": (["verify", "script.py"], "other forms have no checksums"),
    "prune nothing": (["prune", "empty", "--keep", "1"], "expected a folder of checkpoints, found none in it"),
    "size": (["convert", "run/s1", "x", "--to", "hf", "--max-file-size", "nan"], "--max-file-size: expected a number"),
    "a script": (["inspect", "script.py"], "script.py holds objects that are not tensors or plain values"),
    "an empty file": (["inspect", "empty.pt"], "cannot read"),
    "no folder": (["convert", "run/s1", "none/x", "--to", "hf"], "there is no folder"),
    "a tag": (["convert", "run/s1", "run/bad tag", "--to", "partial"], "tag: expected letters"),
    "keep 0": (["prune", "run", "--keep", "0"], "expected at least 1, found 0"),
    "prune one": (["prune", "run/s1", "--keep", "1"], "found a checkpoint"),
    "exists": (["convert", "run/s1", "run/s2", "--to", "partial"], "exists and is not overwritten"),
    "dtype": (
        ["convert", "run/s1", "x", "--to", "full", "--dtype", "int8"],
        "--dtype: expected a floating-point dtype",
    ),
    "copy": (["convert", "run/s1", "x", "--to", "full", "--copy", "c"], "--copy: has no effect"),
    "type": (
        ["convert", "run/s1", "x", "--to", "hf", "--model-type", "gpt3"],
        "--model-type: expected one of gpt2, gptj,",
    ),
    "no layers": (["convert", "run/s1", "x", "--to", "hf", "--model-type", "gpt2"], "no distributed layers of gpt2"),
    "copy missing": (["convert", "run/s1", "x", "--to", "hf", "--copy", "c"], "--copy: cannot read c"),
    "form": (["convert", "run/s1", "x", "--to", "zip"], "zip"),
    "root": (["convert", "run", "x", "--to", "full"], "it holds the checkpoints s1, s2"),
}


@pytest.mark.parametrize(("arguments", "told"), BAD.values(), ids=BAD.keys())
def test_bad_input_is_one_line_and_2(smpc, arguments, told):
    os.mkdir("empty")
    Path("script.py").write_text("print(1)\n")
    Path("empty.pt").touch()
    status, _, err = smpc(*arguments)
    assert status == 2
    assert told in err
    assert err.startswith("smpc: error: ")
    assert "Traceback" not in err
    assert "weights_only" not in err  # torch's advice to unpickle without care
    assert len(err.splitlines()) == 1
    assert not os.path.exists("x")
