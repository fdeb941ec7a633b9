"""The file system that a checkpoint is on: the machine's own, or one that fsspec knows.

A checkpoint's location is a folder, or a URL that fsspec knows (`s3://bucket/run/step_100`, with s3fs installed).

    fs, path = file_system_of("s3://bucket/run", {"region_name": "eu-west-1"})
    with fs.create_stream(fs.concat_path(path, ".metadata"), "rb") as file: ...

No cloud SDK is needed for folders. `fs` is a file system as torch.distributed.checkpoint's writers and readers use them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemBase

from smpc.checkpoint.folder.folders import sync_folder
from smpc.errors import CheckpointError

_INSTALL = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "az": "adlfs"}


def is_url(path: str | os.PathLike[str]) -> bool:
    """Whether a location is no folder of this machine."""
    return isinstance(path, str) and "://" in path


def file_system_of(
    path: str | os.PathLike[str], options: Mapping[str, Any] = MappingProxyType({})
) -> tuple[FileSystemBase, str | os.PathLike[str]]:
    """The file system of a location, and the location as that file system has it. `options`: of fsspec, for a URL.

    Raises CheckpointError for a URL of a kind that is not known, or whose package is not installed.
    """
    if not is_url(path):
        local = FileSystem()
        return local, local.init_path(path)
    from torch.distributed.checkpoint._fsspec_filesystem import FileSystem as Remote

    remote = Remote()
    try:
        return remote, remote.init_path(path, **options)
    except (ImportError, ValueError) as error:
        scheme = str(path).partition("://")[0]
        package = _INSTALL.get(scheme)
        advice = f"pip install {package}" if package else "use a folder, or install the fsspec package for it"
        raise CheckpointError(f"cannot reach {path}: {error}; {advice}") from error


def names_in(fs: FileSystemBase, path: str | os.PathLike[str]) -> list[str]:
    """The names of the entries of a location, sorted; none if there is no such location."""
    try:
        return sorted(os.path.basename(str(entry).rstrip("/")) for entry in fs.ls(path))  # type: ignore[attr-defined]
    except FileNotFoundError:
        return []


def replace_file(fs: FileSystemBase, path: str | os.PathLike[str], name: str, data: bytes) -> None:
    """Write a file whole or not at all: an old file of that name stays until this one is complete."""
    target = fs.concat_path(path, name)
    if not isinstance(fs, FileSystem):
        with fs.create_stream(target, "wb") as file:  # an object appears when it is complete
            file.write(data)
        return
    draft = fs.concat_path(path, f"{name}.tmp")
    with fs.create_stream(draft, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, target)
    sync_folder(str(path))
