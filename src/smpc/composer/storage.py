"""The folder of a run's checkpoints, on this machine or in object storage.

Names, links, checks and removal of checkpoints are rank 0's alone.

             on this machine                                object storage (`s3://bucket/run`), through fsspec
written      under a hidden name, to the disk, renamed      an object is there when it is complete
latest       a symbolic link                                an object, latest-rank0.pt.symlink, that has the name; written last
checks       size and crc32 of each file                    sizes; the archives that torch writes have checksums of their own
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from smpc import dist
from smpc.checkpoint.folder.folders import sync_folder
from smpc.checkpoint.torch_format.file_systems import file_system_of, is_url
from smpc.errors import CheckpointError

_CHECKS = ".smpc"
_LINK = ".symlink"
_REPLACED = ".replaced"
_NEXT = ".next"  # of checks, until the files are in their place
_BLOCK = 1 << 20


def on_rank_0(work: Callable[[], None]) -> None:
    """Run something on rank 0; an error of it is raised on all ranks, as CheckpointError. Collective."""
    error: Exception | None = None
    if dist.get_global_rank() == 0:
        try:
            work()
        except Exception as caught:  # of storage it may be of any class; the others wait to hear of it
            error = caught
    is_known = isinstance(error, CheckpointError | OSError)
    outcome: list[Any] = [None if error is None else str(error) if is_known else f"{type(error).__name__}: {error}"]
    dist.broadcast_object_list(outcome)
    if outcome[0] is not None:
        raise CheckpointError(outcome[0]) from error


def exists(path: str) -> bool:
    """Whether a checkpoint, or a link to one, exists."""
    if not is_url(path):
        return os.path.exists(path)
    remote = _remote_storage(path)
    return bool(remote.exists(path) or remote.exists(path + _LINK))


def is_folder(path: str) -> bool:
    """Whether it is a sharded checkpoint."""
    return bool(_remote_storage(path).isdir(path)) if is_url(path) else os.path.isdir(path)


def is_link(path: str) -> bool:
    """Whether it is a link, whatever it leads to."""
    return bool(_remote_storage(path).exists(path + _LINK)) if is_url(path) else os.path.islink(path)


def followed(path: str) -> str:
    """The target of a link; the path itself if it is not a link."""
    if not is_url(path):
        return os.path.realpath(path)
    remote, folder = _remote_storage(path), path.rpartition("/")[0]
    if not remote.exists(path + _LINK):
        return path.rstrip("/")
    name = remote.cat_file(path + _LINK).decode("utf-8", "replace").strip()
    if not name or "://" in name or any(part in ("", ".", "..") for part in name.split("/")):
        raise CheckpointError(f"{path}{_LINK}: expected the name of a checkpoint beside it, found {name[:200]!r}")
    return f"{folder}/{name}"


def restore_replaced(path: str) -> None:
    """Put a sharded checkpoint back that a save had moved aside when its job died, before the new one was in its place."""
    aside = replaced_name(path)
    if not is_url(path) and not os.path.lexists(path) and os.path.isdir(aside):
        with contextlib.suppress(OSError):  # another rank is putting it back, or the folder may only be read
            os.rename(aside, path)


def replaced_name(path: str) -> str:
    """Where a sharded checkpoint of this machine is, while another one takes its place."""
    parent, name = os.path.split(os.path.abspath(path))
    return os.path.join(parent, f".{name}{_REPLACED}")


def check_free(path: str, *, overwrite: bool) -> None:
    """Raise CheckpointError if something exists that must not be overwritten."""
    is_there = exists(path) if is_url(path) else os.path.lexists(path)
    if is_there and not overwrite:
        raise CheckpointError(f"{path} is there already; give save_overwrite=True, or another save_folder or name")


def check_writable(folder: str) -> None:
    """Make a folder of this machine, and raise CheckpointError unless files can be written into it."""
    if is_url(folder):
        return
    try:
        os.makedirs(folder or ".", exist_ok=True)
        with tempfile.TemporaryFile(dir=folder or "."):
            pass
    except OSError as error:
        raise CheckpointError(f"save_folder {folder!r}: cannot be written to: {error.strerror}") from error


@contextlib.contextmanager
def written(path: str) -> Iterator[str]:
    """A local file to write to, which then takes the place of the path; what was there stays until then, with its checks."""
    name = os.path.basename(path)
    if is_url(path):
        with tempfile.TemporaryDirectory() as room:
            local = os.path.join(room, "file")
            yield local
            _write_checks(path, {name: [os.path.getsize(local), None]}, suffix=_NEXT)
            _with_folder(path).put_file(local, path)
        adopt_checks(path)
        return
    parent = os.path.dirname(os.path.abspath(path))
    os.makedirs(parent, exist_ok=True)
    draft = os.path.join(parent, f".{name}.draft")
    try:
        yield draft
        announce_checks(path, draft)
        os.replace(draft, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(draft)
        raise
    sync_folder(parent)
    adopt_checks(path)


@contextlib.contextmanager
def fetched(path: str) -> Iterator[str]:
    """A local file with the contents of the path."""
    if not is_url(path):
        yield path
        return
    with tempfile.TemporaryDirectory() as room:
        local = os.path.join(room, os.path.basename(path))
        _remote_storage(path).get_file(path, local)
        yield local


@contextlib.contextmanager
def opened(path: str) -> Iterator[Any]:
    """The path, to read some of its bytes."""
    with _remote_storage(path).open(path, "rb") if is_url(path) else open(path, "rb") as file:
        yield file


def entries(folder: str, depth: int) -> list[str]:
    """The paths of what is `depth` levels below a folder, in order; sharded checkpoints that jobs have left aside are put back first."""
    if is_url(folder):
        remote = _remote_storage(folder)
        root = str(remote._strip_protocol(folder)).rstrip("/")
        found = remote.find(root, maxdepth=depth, withdirs=True) if remote.exists(root) else []
        names = [str(each).removeprefix(root).strip("/") for each in found]
        return [f"{folder.rstrip('/')}/{name}" for name in sorted(names) if name.count("/") == depth - 1]
    levels = "/".join("*" * depth)
    for path in Path(folder).glob(levels):
        if path.name.startswith(".") and path.name.endswith(_REPLACED):
            restore_replaced(str(path.with_name(path.name[1:].removesuffix(_REPLACED))))
    return sorted(str(path) for path in Path(folder).glob(levels) if not path.is_symlink())


def written_at(path: str) -> float:
    """When a checkpoint, or a link itself, was written; 0 for storage that does not say so."""
    if not is_url(path):
        return os.lstat(path).st_mtime
    remote = _remote_storage(path)
    there = [each for each in (path + _LINK, f"{path}/.metadata", path) if remote.exists(each)]
    try:
        return float(remote.modified(there[0]).timestamp())
    except NotImplementedError:
        return 0.0


def link(path: str, latest: str) -> None:
    """Let `latest` lead to a checkpoint in the same folder or below it."""
    name = os.path.relpath(path, os.path.dirname(latest) or ".")
    if is_url(latest):
        _with_folder(latest).pipe_file(latest + _LINK, name.encode())
        return
    draft = f"{latest}.draft"
    if os.path.lexists(draft):
        os.unlink(draft)
    os.symlink(name, draft)
    os.replace(draft, latest)


def remove_from_storage(path: str) -> None:
    """Remove a checkpoint and its checks."""
    if is_url(path):
        remote = _remote_storage(path)
        if remote.exists(path):
            remote.rm(path, recursive=True)
    elif os.path.isdir(path):
        shutil.rmtree(path, ignore_errors=True)
    elif os.path.lexists(path):
        os.unlink(path)
    forget_checks(path)


def forget_checks(path: str) -> None:
    """Called when a path is removed, and before it is replaced file by file."""
    for suffix in ("", _NEXT):
        target = _checks_path_in_storage(path) + suffix
        if not is_url(path):
            Path(target).unlink(missing_ok=True)
        elif _remote_storage(path).exists(target):
            _remote_storage(path).rm_file(target)


def write_checks(path: str) -> None:
    """Write down what `check_files` compares with."""
    _write_checks(path, _sums_of_stored_files(path))


def announce_checks(path: str, draft: str) -> None:
    """Before a draft is renamed to the path: write down its checks beside the checks of what is there, which stay valid until then."""
    sums = _sums_of_stored_files(draft)
    _write_checks(
        path, sums if os.path.isdir(draft) else {os.path.basename(path): next(iter(sums.values()))}, suffix=_NEXT
    )


def adopt_checks(path: str) -> None:
    """After the renaming: the checks that were announced are the path's."""
    target = _checks_path_in_storage(path)
    if is_url(path):
        _remote_storage(path).mv(target + _NEXT, target)
    else:
        os.replace(target + _NEXT, target)


def check_files(path: str) -> None:
    """Compare files with their recorded sizes and checksums; warns if there is no record. Raises CheckpointError."""
    target = _checks_path_in_storage(path)
    expected, announced = (_read_checks(path, target + suffix) for suffix in ("", _NEXT))
    found = None if expected is None and announced is None else _sums_of_stored_files(path)
    if found is not None and found == announced:  # a save ended between the renaming and the end
        return
    if expected is None or found is None:
        warnings.warn(f"{path} has no checksums ({target}): damage to it may not be noticed", stacklevel=2)
        return
    wrong = [name for name in sorted({*expected, *found}) if expected.get(name) != found.get(name)]
    if wrong:
        raise CheckpointError(f"{path}: damaged, missing or replaced: {', '.join(wrong)}")


def _read_checks(path: str, target: str) -> dict[str, Any] | None:
    """The checks of a path that a file has; None if there is no such file."""
    try:
        text = _remote_storage(path).cat_file(target) if is_url(path) else Path(target).read_bytes()
    except FileNotFoundError:
        return None
    try:
        return dict(json.loads(text))
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{target}: cannot be read: {error}") from error


def _write_checks(path: str, sums: Mapping[str, Sequence[int | None]], *, suffix: str = "") -> None:
    target = _checks_path_in_storage(path) + suffix
    text = json.dumps(sums, indent=1)
    if is_url(path):
        _with_folder(target).pipe_file(target, text.encode())
        return
    os.makedirs(os.path.dirname(target), exist_ok=True)
    Path(f"{target}.draft").write_text(text, encoding="utf-8")
    os.replace(f"{target}.draft", target)


def _checks_path_in_storage(path: str) -> str:
    folder, name = os.path.split(path.rstrip("/") if is_url(path) else os.path.abspath(path))
    return os.path.join(folder, _CHECKS, f"{name}.json")


def _sums_of_stored_files(path: str) -> dict[str, list[int | None]]:
    """The size of each file of a checkpoint, and its crc32 if the file is local."""
    if is_url(path):
        remote = _remote_storage(path)
        entries = remote.ls(path, detail=True) if remote.isdir(path) else [remote.info(path)]
        return {str(entry["name"]).rpartition("/")[2]: [int(entry["size"]), None] for entry in entries}
    files = sorted(Path(path).iterdir()) if os.path.isdir(path) else [Path(path)]
    return {file.name: [*_size_and_crc(file)] for file in files}


def _size_and_crc(path: Path) -> tuple[int, int]:
    """The size and the crc32 of a file."""
    size, crc = 0, 0
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            size, crc = size + len(block), zlib.crc32(block, crc)
    return size, crc


def _remote_storage(path: str) -> Any:
    """fsspec's file system of a URL, without cached listings."""
    fs: Any = file_system_of(path)[0]
    fs.fs.invalidate_cache()
    return fs.fs


def _with_folder(path: str) -> Any:
    """The same path, after making its folder, if the storage has folders."""
    remote = _remote_storage(path)
    remote.makedirs(os.path.dirname(path), exist_ok=True)
    return remote
