"""Reading: any box, every kind of damage, and files that lie."""

import json
import os
import shutil
import struct

import pytest
import torch
from drawn import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from locations import GOLDEN
from safetensors.torch import save_file

from smpc.checkpoint import Alone, Box, Checkpoint, Content, Root, Shard, load, open_source, save, verify
from smpc.checkpoint import save as save_checkpoint
from smpc.checkpoint.format.manifest import Manifest
from smpc.checkpoint.sources.conversion_sources import SafetensorsSource
from smpc.errors import CheckpointError


@pytest.fixture
def folder(tmp_path):
    shards = [
        Shard.of("model", "w", torch.arange(20.0).view(4, 5), (8, 5), (0, 0)),
        Shard.whole("model", "bias", torch.arange(7.0)),
        Shard.whole("optimizer", "m", torch.arange(9.0)),
    ]
    rest = Shard.of("model", "w", torch.arange(20.0, 40.0).view(4, 5), (8, 5), (4, 0))
    return save(Root(tmp_path / "run"), "s", Content([*shards, rest], user={"t": torch.ones(3)}), Alone())


@pytest.fixture(scope="module")
def big(tmp_path_factory):
    """A tensor of several blocks, in four pieces."""
    tensor = torch.randn(3, 1100, 1000)
    parts = [
        Shard.of("m", "t", tensor[:, a : a + 550, b : b + 500].contiguous(), tensor.shape, (0, a, b))
        for a in (0, 550)
        for b in (0, 500)
    ]
    return tensor, save(Root(tmp_path_factory.mktemp("big")), "s", Content(parts), Alone())


@given(data=st.data(), cast=st.booleans())
@settings(max_examples=25, deadline=None)
def test_any_box_is_the_slice(big, data, cast):
    tensor, folder = big
    low = [data.draw(st.integers(0, n - 1)) for n in tensor.shape]
    size = [data.draw(st.integers(1, n - a)) for n, a in zip(tensor.shape, low, strict=True)]
    expected = tensor[tuple(slice(a, a + n) for a, n in zip(low, size, strict=True))]
    with Checkpoint.open(folder) as checkpoint:
        assert torch.equal(checkpoint.read("m", "t", Box(tuple(low), tuple(size))), expected)
    target = torch.zeros(size, dtype=torch.float64 if cast else torch.float32)
    load(folder, [Shard.of("m", "t", target, tensor.shape, low)], Alone(), cast=cast)
    assert torch.equal(target.float(), expected)


def test_only_the_blocks_of_a_box_are_read(big):
    tensor, folder = big
    with Checkpoint.open(folder) as checkpoint:
        piece = checkpoint.entries["m", "t"].pieces[0]
        assert len(piece.checksums) == 1
    whole = os.path.join(os.path.dirname(folder), "rows")
    if not os.path.exists(whole):
        save_checkpoint(Root(os.path.dirname(folder)), "rows", Content([Shard.whole("m", "t", tensor)]), Alone())
    with open(f"{whole}/m_00000.safetensors", "r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    with Checkpoint.open(whole) as checkpoint:
        first = checkpoint.read("m", "t", Box((0, 0, 0), (1, 1100, 1000)))
        assert torch.equal(first, tensor[:1])
        with pytest.raises(CheckpointError, match=r"m_00000\.safetensors: damaged, in m t"):
            checkpoint.read("m", "t", Box((2, 1099, 0), (1, 1, 1)))


def flip(path, position, bit):
    with open(path, "r+b") as file:
        file.seek(position)
        byte = file.read(1)
        file.seek(position)
        file.write(bytes([byte[0] ^ 1 << bit]))


@given(data=st.data())
@settings(max_examples=examples(60), deadline=None)
def test_any_flipped_bit_is_found_and_its_file_named(data, tmp_path_factory):
    path = tmp_path_factory.mktemp("flip")
    found = save(Root(path), "s", Content([Shard.whole("model", "w", torch.arange(50.0))], pickled={"p": [1]}), Alone())
    name = data.draw(st.sampled_from(sorted(os.listdir(found))))
    file = os.path.join(found, name)
    flip(file, data.draw(st.integers(0, os.path.getsize(file) - 1)), data.draw(st.integers(0, 7)))
    try:
        with Checkpoint.open(found) as checkpoint:
            told = "\n".join(verify(checkpoint))
    except CheckpointError as error:
        told = str(error)
    assert file in told


def truncate(path):
    os.truncate(path, os.path.getsize(path) - 1)


def empty(path):
    os.truncate(path, 0)


def swap(path):
    other = path.replace("model", "optimizer")
    shutil.move(path, f"{path}.x")
    shutil.move(other, path)
    shutil.move(f"{path}.x", other)


def link(path):
    shutil.move(path, f"{path}.elsewhere")
    os.symlink(f"{path}.elsewhere", path)


def pipe(path):
    os.unlink(path)
    os.mkfifo(path)


@pytest.mark.parametrize("harm", [truncate, empty, os.unlink, swap, link, pipe], ids=lambda f: f.__name__)
def test_damage_of_a_file_is_named_and_touches_nothing(folder, harm):
    path = f"{folder}/model_00000.safetensors"
    target = torch.full((8, 5), -1.0)
    harm(path)
    with pytest.raises(CheckpointError, match=r"model_00000\.safetensors"):
        load(folder, [Shard.whole("model", "w", target)], Alone(), strict=False)
    assert torch.equal(target, torch.full((8, 5), -1.0))
    assert Root(os.path.dirname(folder)).tags() == []


def test_all_that_does_not_fit_is_listed_together(folder):
    wanted = [
        Shard.whole("model", "w", torch.zeros(8, 6)),
        Shard.whole("optimizer", "m", torch.zeros(9, dtype=torch.bfloat16)),
        Shard.whole("model", "other", torch.zeros(1)),
    ]
    with pytest.raises(CheckpointError) as caught:
        load(folder, wanted, Alone())
    assert str(caught.value).splitlines()[1:] == [
        "missing: model other",
        "unexpected: model bias",
        "shape of model w: expected [8, 6], found [8, 5]",
        "dtype of optimizer m: expected torch.bfloat16, found torch.float32; ask for a cast to load it",
    ]
    target = torch.zeros(9, dtype=torch.bfloat16)
    loaded = load(folder, [Shard.whole("optimizer", "m", target)], Alone(), cast=True)
    assert (loaded.missing, loaded.unexpected) == ((), ())
    assert torch.equal(target, torch.arange(9.0).bfloat16())


def rewrite(folder, change):
    """A manifest with another body, and the right sha256."""
    import hashlib

    path = f"{folder}/manifest.json"
    with open(path) as file:
        body = json.load(file)["body"]
    change(body)
    text = json.dumps(body, separators=(",", ":"))
    with open(path, "w") as file:
        file.write(f'{{"body":{text},"sha256":"{hashlib.sha256(text.encode()).hexdigest()}"}}')


NAMES = ["../secret.safetensors", "/etc/passwd", "a/b", "..", ".", "", "manifest.json", "x\x00y", "~/x", ".hidden"]


@pytest.mark.parametrize("name", NAMES)
def test_a_manifest_that_names_files_elsewhere_is_refused(folder, name):
    def change(body):
        body["files"][name] = body["files"].pop("model_00000.safetensors")
        for entry in body["tensors"]:
            for piece in entry[4]:
                piece[0] = name if piece[0] == "model_00000.safetensors" else piece[0]

    rewrite(folder, change)
    with pytest.raises(CheckpointError, match="expected the plain name of a file in the same folder"):
        Checkpoint.open(folder)


CHANGES = {
    "overlap": lambda b: b["tensors"][1][4][0].__setitem__(1, b["tensors"][0][4][0][1]),
    "beyond": lambda b: b["tensors"][0][4][0].__setitem__(1, 10**9),
    "in the header": lambda b: b["tensors"][0][4][0].__setitem__(1, 0),
    "negative": lambda b: b["tensors"][0][4][0].__setitem__(1, -8),
    "huge shape": lambda b: b["tensors"][0].__setitem__(3, [2**61, 2**61]),
    "hole": lambda b: b["tensors"][0][4].pop(),
    "twice": lambda b: b["tensors"].append(b["tensors"][0]),
    "no checksums": lambda b: b["tensors"][0][4][0].__setitem__(4, []),
    "dtype": lambda b: b["tensors"][0].__setitem__(2, "PICKLE"),
    "later": lambda b: b.__setitem__("version", 2),
    "block": lambda b: b.__setitem__("block_size", 0),
    "missing": lambda b: b.pop("ranks"),
    "kinds": lambda b: b.__setitem__("files", [1]),
    "text": lambda b: b.__setitem__("sequence", "9"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_manifest_that_contradicts_itself_is_refused(folder, change):
    rewrite(folder, change)
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        Checkpoint.open(folder)


@pytest.mark.parametrize(
    "text", ["", "[]", "null", "{}", "[" * 100_000, '{"body":{"a":1,"a":1},"sha256":""}', "\x80\x04N.", "9" * 5000]
)
def test_what_is_no_manifest_is_refused(text):
    with pytest.raises(CheckpointError, match="here: "):
        Manifest.from_json(text, "here")


def header(path, document, data=b"", length=None):
    text = document if isinstance(document, bytes) else json.dumps(document).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


F4 = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
BOMBS = {
    "length": (b"{}", b"", 2**63),
    "long": (b"{}", b"", 10**8 + 1),
    "no json": (b"\xff\xfe", b"", None),
    "deep": (b"[" * 200_000, b"", None),
    "digits": (b'{"a":' + b"9" * 10_000 + b"}", b"", None),
    "overlap": ({"a": F4, "b": F4}, b"1234", None),
    "gap": ({"a": {**F4, "data_offsets": [4, 8]}}, b"12345678", None),
    "beyond": ({"a": {**F4, "shape": [2**40], "data_offsets": [0, 2**42]}}, b"1234", None),
    "negative": ({"a": {**F4, "data_offsets": [-4, 0]}}, b"1234", None),
    "size": ({"a": {**F4, "shape": [2]}}, b"1234", None),
    "rest": ({"a": F4}, b"12345", None),
    "dtype": ({"a": {**F4, "dtype": "X"}}, b"1234", None),
    "list": ([1], b"", None),
}


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS.keys())
def test_a_header_that_lies_is_refused(tmp_path, bomb):
    document, data, length = bomb
    header(tmp_path / "x.safetensors", document, data, length)
    with pytest.raises(CheckpointError, match=r"x\.safetensors"):
        SafetensorsSource(str(tmp_path / "x.safetensors"))


def test_an_index_that_names_files_elsewhere_is_refused(tmp_path):
    save_file({"a": torch.ones(1)}, tmp_path / "secret.safetensors")
    (tmp_path / "hf").mkdir()
    for name in ("../secret.safetensors", str(tmp_path / "secret.safetensors")):
        (tmp_path / "hf" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
        (tmp_path / "hf" / "x.safetensors").write_text("")
        with pytest.raises(CheckpointError, match="plain names of files"):
            open_source(tmp_path / "hf")
    (tmp_path / "hf" / "model.safetensors.index.json").write_text('{"weight_map": {"a": "link.safetensors"}}')
    os.symlink(tmp_path / "secret.safetensors", tmp_path / "hf" / "link.safetensors")
    with pytest.raises(CheckpointError, match="symbolic link"):
        open_source(tmp_path / "hf")


def test_a_checkpoint_of_the_first_release_loads():
    """A fixture, never written again; later releases must read it."""
    root = Root(GOLDEN / "checkpoints")
    assert root.newest() == "version_1"
    with Checkpoint.open(root.find("version_1")) as checkpoint:
        assert verify(checkpoint) == []
        assert torch.equal(checkpoint.read("model", "w"), torch.arange(12.0).view(4, 3))
        assert checkpoint.read("optimizer", "w::step").dtype == torch.bfloat16
        assert (checkpoint.metadata, checkpoint.user(), checkpoint.plan) == ({"step": 7}, {"epoch": (1, None)}, "{}")
        assert torch.equal(checkpoint.rank_state(0)["rng"], torch.arange(3))
