"""Plain safetensors files that can be checked byte for byte, and what is said of those that cannot."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from smpc.checkpoint import Alone, Content, Root, Shard, open_source, save
from smpc.checkpoint.format.header_checksums import KEY, Seal, sealed, unsealed
from smpc.checkpoint.sources.export import write_file_of, write_folder
from smpc.checkpoint.sources.verify_files import FileCheck, safetensors_files, verify_file
from smpc.cli import main
from smpc.errors import CheckpointError

TENSORS = {
    "a": torch.arange(12.0).view(3, 4),
    "b": torch.tensor(3, dtype=torch.int64),
    "empty": torch.ones(0, 3),
    "half": torch.ones(5, dtype=torch.bfloat16),
}


@pytest.fixture
def source(tmp_path):
    save(Root(tmp_path / "run"), "s", Content([Shard.whole("model", *each) for each in TENSORS.items()]), Alone())
    with open_source(tmp_path / "run" / "s") as opened:
        yield opened


def test_every_byte_that_is_turned_over_is_found(tmp_path, source):
    path = write_file_of(source, tmp_path / "full", notes={"note": f'"{KEY}":"crc32'})
    assert verify_file(path) == FileCheck((), True, 4, os.path.getsize(path))
    loaded = load_file(path)
    assert all(torch.equal(loaded[name], value) for name, value in TENSORS.items())
    data = Path(path).read_bytes()
    for position in range(len(data)):
        for bit in (1, 32):
            damaged = bytearray(data)
            damaged[position] ^= bit
            with open(tmp_path / "damaged", "wb") as file:
                file.write(damaged)
            try:
                found = verify_file(str(tmp_path / "damaged"))
            except CheckpointError:
                continue  # the structure is gone
            assert found.damaged, position
    for end in (0, 7, 20, len(data) - 1):
        with open(tmp_path / "damaged", "wb") as file:
            file.write(data[:end])
        with pytest.raises(CheckpointError, match=r"truncated|expected .* bytes"):
            verify_file(str(tmp_path / "damaged"))


def test_blocks_of_large_tensors_are_told_apart(tmp_path):
    large = torch.zeros(3 << 20)  # 12 MiB: three blocks
    save(Root(tmp_path / "run"), "s", Content([Shard.whole("model", "large", large)]), Alone())
    with open_source(tmp_path / "run" / "s") as opened:
        path = write_file_of(opened, tmp_path / "full")
    seen = []
    assert verify_file(path, seen.append).damaged == ()
    assert sum(seen) == 12 << 20
    with open(path, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x01")
    (line,) = verify_file(path).damaged
    size = os.path.getsize(path)
    assert line == f"{path}: damaged: large, in bytes {size - (4 << 20)} to {size} of the file"


def test_a_seal_is_what_it_says():
    text = unsealed([10, 0, 4], 4)
    assert text == "crc32/4/00000000/" + 4 * "00000000"
    header = sealed(f'{{"{KEY}":"{text}"}}'.encode(), [1, 2, 3, 0xFFFFFFFF], 4)
    seal = Seal.parse(json.loads(header)[KEY])
    assert seal.sums == (1, 2, 3, 0xFFFFFFFF)
    assert seal.fits(header)
    assert not seal.fits(header + b" ")
    assert [Seal.parse(bad) for bad in ("", "crc32/0/00000000/", "crc32/4/0/", text + "0", text.upper())] == [None] * 5


def run(capsys, *arguments):
    status = main(["checkpoint", "verify", *map(str, arguments)])
    out, err = capsys.readouterr()
    return status, out, err


def test_the_command_checks_files_and_folders(tmp_path, source, capsys):
    path = write_file_of(source, tmp_path / "full")
    status, out, err = run(capsys, path)
    assert (status, err) == (0, "")
    assert out.startswith(f"{path}: 4 tensors, ")
    assert out.endswith("all as written\n")
    folder = write_folder(source, tmp_path / "hf", max_file_bytes=48, files={"config.json": "{}"})
    status, out, err = run(capsys, folder)
    assert (status, err, len(out.splitlines())) == (0, "", 2)
    first = safetensors_files(folder)[0]
    with safe_open(first, "pt") as opened:
        assert opened.metadata()["format"] == "pt"
    shutil.copyfile(first, tmp_path / "copy.safetensors")
    with open(first, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xff")
    status, out, err = run(capsys, folder)
    assert (status, err) == (1, "")
    assert f"{first}: damaged: " in out
    os.replace(tmp_path / "copy.safetensors", first)
    index = tmp_path / "hf" / "model.safetensors.index.json"
    said = json.loads(index.read_text())
    said["weight_map"]["a"], said["weight_map"]["half"] = said["weight_map"]["half"], said["weight_map"].pop("a")
    index.write_text(json.dumps(said))
    status, out, err = run(capsys, folder)
    assert (status, err) == (1, "")
    assert "model.safetensors.index.json: damaged: " in out


def test_files_of_others_are_checked_as_far_as_they_can_be(tmp_path, capsys):
    path = tmp_path / "theirs.safetensors"
    save_file(TENSORS, path)
    status, out, err = run(capsys, path)
    assert (status, err) == (0, "")
    assert out.endswith("in order; it has no checksums, so its values cannot be checked\n")
    os.truncate(path, os.path.getsize(path) - 1)
    status, out, err = run(capsys, path)
    assert (status, err) == (1, "")
    assert "expected" in out


def test_full_models_in_the_folder_of_a_run_are_checked_too(tmp_path, source, capsys):
    path = write_file_of(source, tmp_path / "run" / "whole")
    save(Root(tmp_path / "run" / "user_content_whole"), "content_1", Content(user={"x": torch.ones(2)}), Alone())
    status, out, _ = run(capsys, tmp_path / "run")
    assert (status, len(out.splitlines())) == (0, 3)
    with open(path, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xff")
    status, out, _ = run(capsys, tmp_path / "run")
    assert (status, f"{path}: damaged" in out) == (1, True)
