"""Checkpoint files: written whole or not at all, read without running code.

A file is written under another name in the same folder, brought to the disk and renamed: under its own name it is always complete. It is
readable by its owner only. Reading unpickles tensors and plain values; anything else is refused, and there is no other way of reading.

`check_archive` looks at archives that torch.save writes, before torch reads them.

    check_archive(stream, where)     raises CheckpointError if it is damaged, or would take more than it has

An archive is a zip file of records: the pickle `data.pkl`, and the bytes of each storage. Each has a crc32, which torch itself does not
look at. Records are stored as they are; one that is compressed, which torch never writes, could grow without bounds. The pickle is read
as records first (`smpc.checkpoint.format.inert_pickle`): objects nested in and shared with each other may take for ever to copy or to hash.
Files of torch's formats before 1.6 are no archives and have no checksums; they are not looked at here.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import re
import tempfile
import zipfile
from typing import IO, Any, Literal

import torch

from smpc.checkpoint.folder.folders import sync_folder
from smpc.checkpoint.format.inert_pickle import expanded, parse
from smpc.checkpoint.format.regular_file import is_file, printable
from smpc.errors import CheckpointError

MOST_OBJECTS = 20_000_000
_MOST_PICKLE = 1 << 29
_READ = 8 << 20


def check_archive(stream: IO[bytes], where: str) -> bool:
    """Whether it is an archive. `where` names it in errors."""
    try:
        if not zipfile.is_zipfile(stream):
            return False
        stream.seek(0)
        with zipfile.ZipFile(stream) as archive:
            _check_records(archive, where)
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, ValueError, OSError) as error:
        raise CheckpointError(f"{where}: damaged: {error}") from error
    return True


def archived_records(stream: IO[bytes], where: str) -> Any:
    """The object in an archive, as records of which nothing runs (`inert_pickle`); the bytes of its tensors are not read.

    Raises CheckpointError if it is no archive, or damaged so that its pickle cannot be read.
    """
    try:
        with zipfile.ZipFile(stream) as archive:
            (record,) = (each for each in archive.infolist() if each.filename.endswith("/data.pkl"))
            if record.compress_type != zipfile.ZIP_STORED or record.file_size > _MOST_PICKLE:
                raise CheckpointError(f"{where}: its pickle is compressed, or has more than {_MOST_PICKLE} bytes")
            return parse(archive.read(record))
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, ValueError, OSError) as error:
        raise CheckpointError(f"{where}: damaged, or no file of torch.save: {error}") from error


def _check_records(archive: zipfile.ZipFile, where: str) -> None:
    names = archive.namelist()
    if len(set(names)) != len(names):
        raise CheckpointError(f"{where}: damaged: two of its records have the same name")
    for record in archive.infolist():
        if record.compress_type != zipfile.ZIP_STORED:
            raise CheckpointError(
                f"{where}: its record {printable(record.filename)} is compressed; torch.save compresses none"
            )
        is_pickle = record.filename.endswith("/data.pkl")
        if is_pickle and record.file_size > _MOST_PICKLE:
            raise CheckpointError(f"{where}: its pickle has {record.file_size} bytes; at most {_MOST_PICKLE} are read")
        kept = []
        with archive.open(record) as opened:
            try:
                while data := opened.read(_READ):
                    kept += [data] if is_pickle else []
            except zipfile.BadZipFile as error:
                raise CheckpointError(
                    f"{where}: damaged: its record {printable(record.filename)} does not have its checksum. A file that was written with "
                    "torch.serialization.set_crc32_options(False) looks the same: load it with torch.load, and save it again"
                ) from error
        if is_pickle:
            _check_pickle(b"".join(kept), where)


def _check_pickle(data: bytes, where: str) -> None:
    try:
        expanded(parse(data), MOST_OBJECTS)
    except CheckpointError as error:
        raise CheckpointError(f"{where}: refused: {error}") from error


_GLOBAL = re.compile(r"GLOBAL (\S+)")  # in torch's text, the rest of which advises to unpickle without care


def write_file(obj: Any, path: str, *, pickle_module: Any = pickle, pickle_protocol: int = 2) -> None:
    """Write an object with torch.save. Raises CheckpointError, naming the path, if that fails; an older file then stays."""
    folder, name = os.path.split(os.path.abspath(path))
    try:
        descriptor, draft = tempfile.mkstemp(prefix=f".{name}.", suffix=".draft", dir=folder)  # 0600
    except OSError as error:
        raise CheckpointError(
            f"cannot write {path}: {error.strerror}; the folder must exist and be writable"
        ) from error
    try:
        with os.fdopen(descriptor, "wb") as file:
            torch.save(obj, file, pickle_module=pickle_module, pickle_protocol=pickle_protocol)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
        sync_folder(folder)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(draft)
        if isinstance(error, (OSError, pickle.PicklingError, RuntimeError, TypeError, AttributeError)):
            raise CheckpointError(f"cannot write {path}: {type(error).__name__}: {error}") from error
        raise


def read_file(path: str, *, map_location: Any = None, mmap: bool | Literal["archives"] | None = None) -> Any:
    """The object in a file that `write_file` or torch.save wrote. `mmap`: as torch.load's; "archives": where that is possible.

    Raises CheckpointError if the file is missing (and says what exists in its place), damaged (by the checksums of its records), or holds
    more than tensors and plain values.
    """
    if not is_file(path):
        raise CheckpointError(f"no checkpoint file {path}; {_similar_names(path)}")
    try:
        with open(path, "rb") as file:
            is_archive = check_archive(file, path)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    return _load_weights_only(path, path, map_location=map_location, mmap=is_archive if mmap == "archives" else mmap)


def load_tensors(data: bytes, where: str) -> Any:
    """As `read_file`, of the bytes of a file; on the CPU. `where` names them in errors."""
    check_archive(io.BytesIO(data), where)
    return _load_weights_only(io.BytesIO(data), where, map_location="cpu")


def _load_weights_only(file: Any, where: str, **options: Any) -> Any:
    """torch.load with weights_only=True; CheckpointError for anything else."""
    try:
        return torch.load(file, weights_only=True, **options)
    except pickle.UnpicklingError as error:
        found = _GLOBAL.search(str(error))
        raise CheckpointError(
            f"{where} holds objects that are not tensors or plain values, or is damaged; such are never unpickled. "
            + (f"It names {found[1]}. " if found else "")
            + (
                "Only files of pickle protocol 2, torch.save's own, are read. "
                if "Unsupported operand" in str(error)
                else ""
            )
            + "Save plain values, or allow a class that you trust with torch.serialization.add_safe_globals"
        ) from error
    except Exception as error:  # bytes that are no pickle make the unpickler raise whatever they happen to lead to
        text = _first_line(error) or "nothing more is known"
        raise CheckpointError(
            f"cannot read {where}, damaged or none of torch.save's: {type(error).__name__}: {text[:300]}"
        ) from error


def _similar_names(path: str) -> str:
    """What there is in the folder of a file that is not there."""
    folder, name = os.path.split(os.path.abspath(path))
    if not os.path.isdir(folder):
        return f"there is no folder {folder} either"
    stem = name.split("_")[0]
    similar = sorted(entry for entry in os.listdir(folder) if entry.startswith(stem))
    if not similar:
        return f"nothing in {folder} has a name that begins with {stem}"
    more = f" and {len(similar) - 10} more" if len(similar) > 10 else ""
    return f"in {folder} there are {', '.join(map(printable, similar[:10]))}{more}"


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
