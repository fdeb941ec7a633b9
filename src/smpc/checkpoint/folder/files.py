"""Checkpoint files: written whole or not at all, read without running code.

A file is written under another name in the same folder, brought to the disk and renamed: under its own name it is always complete. It is
readable by its owner only. Reading unpickles tensors and plain values; anything else is refused, and there is no other way of reading.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import re
import tempfile
from typing import Any, Literal

import torch

from smpc.checkpoint.format.archives import check_archive
from smpc.checkpoint.format.regular import is_file, printable
from smpc.errors import CheckpointError

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
        raise CheckpointError(f"no checkpoint file {path}; {_neighbours(path)}")
    try:
        with open(path, "rb") as file:
            is_archive = check_archive(file, path)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    return _load(path, path, map_location=map_location, mmap=is_archive if mmap == "archives" else mmap)


def load_tensors(data: bytes, where: str) -> Any:
    """As `read_file`, of the bytes of a file; on the CPU. `where` names them in errors."""
    check_archive(io.BytesIO(data), where)
    return _load(io.BytesIO(data), where, map_location="cpu")


def _load(file: Any, where: str, **options: Any) -> Any:
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


def _neighbours(path: str) -> str:
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
