"""Other forms: what other libraries read of ours, what we read of theirs, and files that would run code."""

import os
import pickle
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from smpc.checkpoint import (
    Alone,
    Checkpoint,
    Content,
    Root,
    Shard,
    open_source,
    save,
    write_checkpoint,
    write_distributed,
    write_file_of,
    write_folder,
)
from smpc.errors import CheckpointError

STATE = {"a.w": torch.arange(12.0).view(3, 4), "b": torch.arange(5).bfloat16(), "s": torch.tensor(2.0)}


class Hostile:
    """Makes a folder when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (self.path,))


@pytest.fixture
def folder(tmp_path):
    shards = [Shard.whole("model", k, v) for k, v in STATE.items()] + [Shard.whole("optimizer", "m", torch.ones(2))]
    return save(Root(tmp_path / "run"), "s", Content(shards, metadata={"step": 3, "ema": torch.ones(2)}), Alone())


def same(found):
    return found.keys() == STATE.keys() and all(torch.equal(found[k], STATE[k]) for k in STATE)


def quietly(function, *arguments, **named):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch notes that there is one process
        return function(*arguments, **named)


def test_a_full_file_and_a_folder_are_plain_safetensors(folder, tmp_path):
    with open_source(folder) as source:
        write_file_of(source, tmp_path / "full.safetensors")
        write_folder(source, tmp_path / "hf", max_file_bytes=50, files={"config.json": "{}"})
        write_file_of(
            source, tmp_path / "half.safetensors", dtype=torch.float16, rename=lambda n: None if n == "s" else f"x.{n}"
        )
    assert same(load_file(tmp_path / "full.safetensors"))
    files = sorted(os.listdir(tmp_path / "hf"))
    assert files[-1] == "model.safetensors.index.json"
    assert files[1:-1] == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert same({k: v for name in files[1:-1] for k, v in load_file(tmp_path / "hf" / name).items()})
    half = load_file(tmp_path / "half.safetensors")
    assert set(half) == {"x.a.w", "x.b"}
    assert half["x.a.w"].dtype == torch.float16


def test_nothing_is_written_over(folder, tmp_path):
    (tmp_path / "there").write_text("precious")
    (tmp_path / "empty").mkdir()
    with open_source(folder) as source:
        for write in (write_file_of, write_folder, write_distributed, write_checkpoint):
            for name in ("there", "empty"):
                with pytest.raises(CheckpointError, match="exists and is not overwritten"):
                    write(source, tmp_path / name)
            with pytest.raises(CheckpointError, match="there is no folder"):
                write(source, tmp_path / "nowhere" / "x")
    assert (tmp_path / "there").read_text() == "precious"
    assert sorted(os.listdir(tmp_path)) == ["empty", "run", "there"]


def test_torch_reads_what_is_written_for_it_and_it_comes_back(folder, tmp_path):
    with open_source(folder) as source:
        write_distributed(source, tmp_path / "dcp")
    state = {"model": {k: torch.zeros_like(v) for k, v in STATE.items()}, "optimizer": {"m": torch.zeros(2)}}
    quietly(dcp.load, state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert same(state["model"])
    assert torch.equal(state["optimizer"]["m"], torch.ones(2))
    with open_source(tmp_path / "dcp") as source, Checkpoint.open(write_checkpoint(source, tmp_path / "back")) as back:
        assert same({name: back.read(kind, name) for kind, name in back.entries if kind == "model"})
        assert back.metadata["step"] == 3
        assert torch.equal(back.metadata["ema"], torch.ones(2))


def test_what_torch_writes_is_read(tmp_path):
    state = {"model": STATE, "opt": {"state": {0: {"m": torch.ones(2)}}, "lr": 0.1}, "step": 5}
    quietly(dcp.save, state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    with open_source(tmp_path / "dcp") as source:
        found = {(item.kind, item.name): source.read(item) for item in source.items}
        assert same({name: tensor for (kind, name), tensor in found.items() if kind == "model"})
        assert torch.equal(found["opt", "state.0.m"], torch.ones(2))
        assert source.metadata == {"torch.distributed.checkpoint": {"opt.lr": 0.1, "step": 5}}


def test_a_pickle_in_torchs_metadata_runs_nothing(tmp_path):
    quietly(dcp.save, {"model": STATE}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    canary = tmp_path / "canary"
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(Hostile(str(canary))))
    with pytest.raises(CheckpointError, match=r"\.metadata: refused: .*mkdir, which does not belong there"):
        open_source(tmp_path / "dcp")
    assert not canary.exists()


def test_a_pickle_among_torchs_values_runs_nothing(tmp_path):
    canary = tmp_path / "canary"
    quietly(dcp.save, {"model": STATE, "x": Hostile(str(canary))}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    with pytest.raises(CheckpointError, match="never unpickled"):
        open_source(tmp_path / "dcp")
    assert not canary.exists()


def test_torchs_metadata_may_not_point_elsewhere(tmp_path):
    quietly(dcp.save, {"model": STATE}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    (tmp_path / "dcp" / "__0_0.distcp").rename(tmp_path / "outside.dis")
    path = tmp_path / "dcp" / ".metadata"
    path.write_bytes(path.read_bytes().replace(b"__0_0.distcp", b"../outside.dis"[:12].ljust(12)))
    with pytest.raises(CheckpointError, match="plain name"), open_source(tmp_path / "dcp") as source:
        source.read(source.items[0])


def test_legacy_files_are_read_without_running_them(tmp_path):
    canary = tmp_path / "canary"
    torch.save({"model": STATE, "epoch": 3}, tmp_path / "good.pt")
    torch.save({"a": torch.ones(1), "x": Hostile(str(canary))}, tmp_path / "bad.pt")
    with open_source(tmp_path / "good.pt") as source:
        assert same({item.name: source.read(item) for item in source.items})
    with pytest.raises(CheckpointError, match="never unpickled"):
        open_source(tmp_path / "bad.pt")
    assert not canary.exists()


def test_files_without_an_ending_are_told_apart(tmp_path):
    save_file({"a": torch.ones(1)}, tmp_path / "tensors")
    torch.save({"a": torch.ones(1)}, tmp_path / "pickle")
    torch.save({"a": torch.ones(1)}, tmp_path / "old", _use_new_zipfile_serialization=False)
    for name in ("tensors", "pickle", "old"):
        with open_source(tmp_path / name) as source:
            assert [source.read(item).item() for item in source.items] == [1.0]


def test_what_is_none_of_these(tmp_path):
    (tmp_path / "x").mkdir()
    save_file({"a": torch.ones(1)}, tmp_path / "one.safetensors")
    torch.save([1], tmp_path / "list.pt")
    (tmp_path / "text").write_text(
        "root is an opcode of pickle's, but there is nothing on its stack: once an IndexError"
    )
    cases = {
        "x": "expected a checkpoint",
        "nothing": "no such file",
        "list.pt": "expected a mapping",
        "text": "none of torch.save's",
    }
    for name, told in cases.items():
        with pytest.raises(CheckpointError, match=told):
            open_source(tmp_path / name)


def test_hugging_face_opens_a_folder(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=50, n_positions=16)
    model = GPT2LMHeadModel(config).eval()
    shards = [Shard.whole("model", name, parameter) for name, parameter in model.named_parameters()]
    folder = save(Root(tmp_path / "run"), "s", Content(shards), Alone())
    with open_source(folder) as source:
        write_folder(source, tmp_path / "hf", max_file_bytes=10_000, files={"config.json": config.to_json_string()})
    found = GPT2LMHeadModel.from_pretrained(tmp_path / "hf").eval()
    tokens = torch.arange(8).view(1, 8)
    assert torch.equal(found(tokens).logits, model(tokens).logits)
