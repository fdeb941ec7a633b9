"""Whole models in files that torch.load reads: what it reads, what is shared, and that no flipped bit goes unnoticed."""

import os
import random
import zipfile

import pytest
import torch

from smpc.checkpoint import Shard, open_source, write_archive_of
from smpc.checkpoint.folder.files import write_file
from smpc.checkpoint.format.dtypes import _DTYPES
from smpc.checkpoint.format.torch_archive import write_archive
from smpc.checkpoint.sources.conversion_sources import LegacySource, SafetensorsSource, damaged_of
from smpc.errors import CheckpointError

BLOCK = 64


def tensors():
    generator = torch.Generator().manual_seed(0)
    found = {}
    for number, dtype in enumerate(_DTYPES.values()):
        data = torch.randint(0, 2, (5, 3, dtype.itemsize), generator=generator, dtype=torch.uint8)
        found[f"layer.{number}.{dtype}"] = data.view(dtype).reshape(5, 3)
    return {**found, "empty": torch.zeros(0, 3), "scalar": torch.tensor(2.5), "long": torch.arange(100.0)}


def write(path, values, **options):
    write_archive(
        str(path), [(name, Shard.whole("model", name, value)) for name, value in values.items()], BLOCK, **options
    )
    return path


def same(a, b):
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    flat = [value.reshape(-1).view(torch.uint8) for value in (a, b)] if a.numel() else [a, b]
    return torch.equal(*flat)


@pytest.mark.parametrize("mmap", [False, True])
def test_torch_loads_every_dtype_and_shape(tmp_path, mmap):
    values = tensors()
    found = torch.load(write(tmp_path / "model.bin", values), weights_only=True, mmap=mmap)
    assert list(found) == list(values)
    assert all(same(found[name], value) for name, value in values.items())
    assert all(value.data_ptr() % value.element_size() == 0 for value in found.values())


def test_tied_names_share_memory(tmp_path):
    path = write(tmp_path / "model.bin", {"embedding": torch.ones(4, 4)}, aliases={"head": "embedding"})
    found = torch.load(path, weights_only=True)
    assert found["head"].data_ptr() == found["embedding"].data_ptr()
    with open_source(path) as source:
        assert {item.name: tuple(source.read(item).shape) for item in source.items} == {
            "embedding": (4, 4),
            "head": (4, 4),
        }


def test_the_library_reads_it_without_the_pickle(tmp_path):
    values = tensors()
    path = write(tmp_path / "model.bin", values, metadata={"smpc_tag": "model.bin"})
    with open_source(path) as source:
        assert isinstance(source, SafetensorsSource)
        assert source.notes["smpc_tag"] == "model.bin"
        assert damaged_of(source) == []
        assert all(same(source.read(item), values[item.name]) for item in source.items)


def test_a_zip_reader_finds_all_of_it_and_two_writes_are_the_same(tmp_path):
    first, second = (write(tmp_path / name, tensors()) for name in ("first", "second"))
    with zipfile.ZipFile(first) as archive:
        assert archive.testzip() is None
        assert {info.compress_type for info in archive.infolist()} == {zipfile.ZIP_STORED}
    assert first.read_bytes() == second.read_bytes()


def found_damage(path):
    """Whether opening or checking a file says that it is damaged."""
    try:
        with open_source(path) as source:
            return not isinstance(source, LegacySource) and bool(damaged_of(source))
    except CheckpointError:
        return True


def test_every_flipped_byte_is_told(tmp_path):
    path = write(tmp_path / "model.bin", {"w": torch.arange(40.0), "b": torch.ones(3)}, aliases={"head": "w"})
    data, rng = path.read_bytes(), random.Random(0)
    assert not found_damage(path)
    for position in range(len(data)):
        flipped = bytearray(data)
        flipped[position] ^= 1 << rng.randrange(8)
        path.write_bytes(flipped)
        assert found_damage(path), f"a flipped bit of byte {position} of {len(data)} goes unnoticed"


def test_every_truncation_is_told(tmp_path):
    path = write(tmp_path / "model.bin", {"w": torch.arange(40.0)})
    data = path.read_bytes()
    for length in range(0, len(data), 7):
        path.write_bytes(data[:length])
        assert found_damage(path), f"{length} of {len(data)} bytes pass for all"


def test_bytes_of_others_behind_it_are_told(tmp_path):
    path = write(tmp_path / "model.bin", {"w": torch.arange(4.0)})
    path.write_bytes(path.read_bytes() + b"more")
    assert found_damage(path)


def test_what_torch_saves_is_read_by_its_pickle(tmp_path):
    torch.save({"w": torch.ones(3)}, tmp_path / "other.bin")
    with open_source(tmp_path / "other.bin") as source:
        assert isinstance(source, LegacySource)


def test_names_that_cannot_be_are_refused(tmp_path):
    shard = Shard.whole("model", "w", torch.ones(2))
    with pytest.raises(CheckpointError, match="two tensors of one file would be called w"):
        write_archive(str(tmp_path / "a"), [("w", shard)], BLOCK, aliases={"w": "w"})
    with pytest.raises(CheckpointError, match="two tensors of one file would be called w"):
        write_archive(str(tmp_path / "b"), [("w", shard), ("w", shard)], BLOCK)
    assert os.listdir(tmp_path) == []


def test_a_source_is_written_and_nothing_is_overwritten(tmp_path):
    with open_source(write(tmp_path / "model.bin", {"w": torch.ones(2)})) as source:
        written = write_archive_of(
            source, tmp_path / "half.bin", aliases={"v": "w", "x": "missing"}, dtype=torch.float16
        )
        with pytest.raises(CheckpointError, match="exists and is not overwritten"):
            write_archive_of(source, tmp_path / "half.bin")
    found = torch.load(written, weights_only=True)
    assert {name: value.dtype for name, value in found.items()} == {"w": torch.float16, "v": torch.float16}


def test_the_name_of_a_written_file_is_brought_to_the_disk(tmp_path, monkeypatch):
    """The file was, and its folder was not: after a power failure the older file could be there again."""
    synced, real = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (synced.append(os.readlink(f"/proc/self/fd/{file}")), real(file)))
    write_file({"a": torch.ones(2)}, str(tmp_path / "a.pt"))
    assert synced[-1] == str(tmp_path)
    assert torch.equal(torch.load(tmp_path / "a.pt")["a"], torch.ones(2))
