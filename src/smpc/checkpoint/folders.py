"""The folder of a run's checkpoints: what appears in it only does so whole.

    run/                     Root
      step_100/              a checkpoint, published by renaming its draft: manifest.json and files of tensors
      step_200/
      newest                 the marker: the name of the last one published
      .step_300.7f3a90c1.draft       being written; removed by the next writer once its owner is dead
      .step_200.99e0b1c2.replaced    what a forced save replaces, until the new one stands; found if that never does
      .step_100.5b21d7aa.removed     pruned, on its way out

Order of saving: draft, files and manifest on the disk, rename, marker. A crash before the rename leaves a draft, which nobody reads; after
it, a checkpoint that the marker does not name yet: `newest` goes by the number in the manifests then. A draft's owner (rank 0 of
the job) holds a lock on it, which ends with the process; so a draft of another job at work is left alone.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
import warnings
from dataclasses import dataclass

from smpc.checkpoint.manifest import MAX_BYTES, NAME, Manifest, is_plain_name
from smpc.checkpoint.tensorfile import open_regular
from smpc.errors import CheckpointError

MARKER = "newest"
DRAFT, REPLACED, REMOVED = "draft", "replaced", "removed"
_HIDDEN = re.compile(r"\.(?P<tag>.+)\.[0-9a-f]{8}\.(?P<state>draft|replaced|removed)")
LOCK = ".lock"


@dataclass(frozen=True, slots=True)
class Draft:
    """A checkpoint being written by this process; `lock` is the descriptor that says so."""

    tag: str
    path: str
    lock: int


class Root:
    """A folder with checkpoints. Reading never changes it; rank 0 alone calls what writes."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.path.abspath(os.fspath(path))

    # Reading ------------------------------------------------------------------------------------------------------------

    def find(self, tag: str) -> str:
        """The folder of a checkpoint. Raises CheckpointError, saying what there is, if there is none."""
        check_tag(tag)
        path = os.path.join(self.path, tag)
        if os.path.isfile(os.path.join(path, NAME)):
            return path
        replaced = self.replaced(tag)
        if replaced is not None:
            return replaced
        there = self.tags()
        raise CheckpointError(
            f"no checkpoint {tag} in {self.path}; there {'are ' + ', '.join(there) if there else 'is none'}"
        )

    def replaced(self, tag: str) -> str | None:
        """Where a forced save has moved what it was to replace, if it died before the new one stood."""
        names = [name for name, found, state in self._hidden() if found == tag and state == REPLACED]
        return os.path.join(self.path, names[0]) if names else None

    def tags(self) -> list[str]:
        """Whole checkpoints, oldest first. Whole: the manifest is valid and the files have their sizes; bytes are not read."""
        return [tag for _, tag in self._complete()]

    def newest(self) -> str | None:
        """The last checkpoint that was published whole, or None. Warns if the marker says otherwise or something is incomplete."""
        complete = self._complete()
        for problem in self.incomplete():
            warnings.warn(f"ignored: {problem}", stacklevel=2)
        if not complete:
            return None
        last = complete[-1][1]
        marked = self._marked()
        if marked != last:
            found = "nothing" if marked is None else repr(marked)
            warnings.warn(
                f"{os.path.join(self.path, MARKER)} names {found}, not {last}, the last whole checkpoint; that one is used. To go back, "
                "ask for another by name",
                stacklevel=2,
            )
        return last

    def incomplete(self) -> list[str]:
        """What lies here and is no whole checkpoint, one line each."""
        reasons = {
            DRAFT: "a save under way, or one that did not end",
            REPLACED: "replaced by a forced save",
            REMOVED: "pruned, not yet gone",
        }
        left = [f"{os.path.join(self.path, name)}: {reasons[state]}" for name, _, state in self._hidden()]
        return left + self.damaged()

    def damaged(self) -> list[str]:
        """Checkpoints whose manifest is not valid, or whose files are missing or not as long as they should be, one line each."""
        problems = []
        for name in self._names():
            if is_plain_name(name) and os.path.lexists(os.path.join(self.path, name, NAME)):
                try:
                    check_whole(os.path.join(self.path, name))
                except CheckpointError as error:
                    problems += str(error).splitlines()
        return problems

    # Writing ------------------------------------------------------------------------------------------------------------

    def begin(self, tag: str, *, force: bool) -> Draft:
        """Make the draft of a checkpoint. Refuses a tag that exists, unless forced."""
        check_tag(tag)
        try:
            _make_folder(self.path)
            if os.path.isdir(os.path.join(self.path, MARKER)):
                raise CheckpointError(f"expected a file, found a folder: {os.path.join(self.path, MARKER)}")
            target = os.path.join(self.path, tag)
            if os.path.lexists(target) and not (force and os.path.isfile(os.path.join(target, NAME))):
                hint = (
                    "choose another tag, or force"
                    if os.path.isfile(os.path.join(target, NAME))
                    else "it is no checkpoint"
                )
                raise CheckpointError(f"{target} exists and is not overwritten; {hint}")
            path = self._hide(tag, DRAFT)
            lock = make_locked(path)
        except OSError as error:
            raise CheckpointError(f"cannot write {error.filename or self.path}: {error.strerror}") from error
        return Draft(tag, path, lock)

    def publish(self, draft: Draft, *, force: bool) -> str:
        """Make a draft the checkpoint of its tag, and mark it as the newest. Its files must be on the disk."""
        target = os.path.join(self.path, draft.tag)
        replaced = None
        try:
            sync_folder(draft.path)
            if force and os.path.lexists(target):
                replaced = self.move_aside(draft.tag)
            try:
                os.rename(draft.path, target)
            except OSError as error:
                if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    raise CheckpointError(f"{target} exists and is not overwritten; another job made it") from error
                raise
            sync_folder(self.path)
            os.unlink(os.path.join(target, LOCK))
            self._mark(draft.tag)
        except OSError as error:
            raise CheckpointError(f"cannot publish {target}: {error.strerror}: {error.filename}") from error
        finally:
            os.close(draft.lock)
        if replaced is not None:
            remove(replaced)
        return target

    def move_aside(self, tag: str) -> str:
        """Make room for what replaces a file or folder; until that stands, `find` and `replaced` have the old one."""
        replaced = self._hide(tag, REPLACED)
        os.rename(os.path.join(self.path, tag), replaced)
        return replaced

    def discard(self, draft: Draft) -> None:
        """Remove a draft that failed."""
        with contextlib.suppress(OSError):
            os.close(draft.lock)
        shutil.rmtree(draft.path, ignore_errors=True)

    def clean(self) -> list[str]:
        """Remove what dead jobs left, and put back what they had moved aside. Returns what was done, one line each."""
        done = []
        for name, tag, state in self._hidden():
            path = os.path.join(self.path, name)
            if state == REPLACED and not os.path.lexists(os.path.join(self.path, tag)):
                with contextlib.suppress(OSError):
                    os.rename(path, os.path.join(self.path, tag))
                    done.append(f"put back {os.path.join(self.path, tag)}: the save that should replace it did not end")
            elif (state != DRAFT or _is_abandoned(path)) and remove(path):
                done.append(f"removed {path}")
        return done

    def prune(self, keep: int) -> list[str]:
        """Remove all but the `keep` newest checkpoints. Returns their tags; warns of those that cannot be removed."""
        check_keep(keep)
        pruned = []
        for tag in self.tags()[:-keep]:
            path, hidden = os.path.join(self.path, tag), self._hide(tag, REMOVED)
            try:
                os.rename(path, hidden)  # gone at once: a crash never leaves half a checkpoint under its name
            except OSError as error:
                warnings.warn(f"cannot remove the old checkpoint {path}: {error.strerror}", stacklevel=2)
                continue
            pruned.append(tag)
            remove(hidden)
        return pruned

    def next_sequence(self) -> int:
        """The number of the checkpoint that comes after all there are."""
        return 1 + max((sequence for sequence, _ in self._complete()), default=0)

    # --------------------------------------------------------------------------------------------------------------------

    def _names(self) -> list[str]:
        try:
            return sorted(os.listdir(self.path))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise CheckpointError(f"cannot read {self.path}: {error.strerror}") from error

    def _hidden(self) -> list[tuple[str, str, str]]:
        matches = [(name, _HIDDEN.fullmatch(name)) for name in self._names()]
        return [
            (name, match["tag"], match["state"]) for name, match in matches if match and is_plain_name(match["tag"])
        ]

    def _complete(self) -> list[tuple[int, str]]:
        found = {tag: name for name, tag, state in self._hidden() if state == REPLACED}
        found |= {
            name: name
            for name in self._names()
            if is_plain_name(name) and os.path.isfile(os.path.join(self.path, name, NAME))
        }
        complete = []
        for tag, name in found.items():
            with contextlib.suppress(CheckpointError):
                complete.append((check_whole(os.path.join(self.path, name)).sequence, tag))
        return sorted(complete)

    def _marked(self) -> str | None:
        try:
            with open(os.path.join(self.path, MARKER), "rb") as file:
                return file.read(300).decode("utf-8", "backslashreplace").strip()
        except OSError:
            return None

    def _mark(self, tag: str) -> None:
        marker, draft = os.path.join(self.path, MARKER), os.path.join(self.path, f".{MARKER}.{DRAFT}")
        with contextlib.suppress(FileNotFoundError):
            os.unlink(draft)  # of a job that died here
        write_new(draft, f"{tag}\n".encode())
        os.replace(draft, marker)
        sync_folder(self.path)

    def _hide(self, tag: str, state: str) -> str:
        return os.path.join(self.path, f".{tag}.{secrets.token_hex(4)}.{state}")


def remove(path: str) -> bool:
    """Remove a file, a folder or a link; a warning if that fails."""
    try:
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        else:
            os.unlink(path)
    except OSError as error:
        warnings.warn(f"cannot remove {path}: {error.strerror}", stacklevel=3)
        return False
    return True


def check_tag(tag: object) -> None:
    """Raises CheckpointError unless `tag` can name a checkpoint."""
    if not is_plain_name(tag) or tag == MARKER:
        raise CheckpointError(f"tag: expected letters, digits, '.', '_' and '-', and not {MARKER!r}, found {tag!r}")


def check_keep(keep: object) -> None:
    """Raises CheckpointError unless `keep` is a number of checkpoints to keep."""
    if type(keep) is not int or keep < 1:
        raise CheckpointError(f"number of checkpoints to keep: expected at least 1, found {keep!r}")


def read_manifest(folder: str) -> Manifest:
    """The manifest of a checkpoint's folder. Raises CheckpointError, naming the file."""
    path = os.path.join(folder, NAME)
    descriptor = open_regular(path)
    with open(descriptor, "rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise CheckpointError(f"{path}: larger than {MAX_BYTES} bytes, so no manifest")
    try:
        return Manifest.from_json(data.decode(), path)
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: not a manifest, or damaged: {error}") from error


def check_whole(folder: str) -> Manifest:
    """The manifest, if every file is there with its size. Raises CheckpointError, listing those that are not."""
    manifest = read_manifest(folder)
    wrong = []
    for name, file in manifest.files.items():
        path = os.path.join(folder, name)
        try:
            found = os.lstat(path)
        except OSError as error:
            wrong.append(f"{path}: {error.strerror}")
            continue
        if not stat.S_ISREG(found.st_mode):
            wrong.append(f"{path}: not a regular file; links are never followed")
        elif found.st_size != file.size:
            wrong.append(f"{path}: expected {file.size} bytes, found {found.st_size}")
    if wrong:
        raise CheckpointError("\n".join(wrong))
    return manifest


def write_new(path: str, data: bytes) -> None:
    """Write a new file, 0600, and bring it to the disk."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def make_locked(path: str) -> int:
    """Make a folder, 0700, that belongs to this process until it closes the descriptor that is returned."""
    os.mkdir(path, 0o700)
    lock = os.open(os.path.join(path, LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


def sync_folder(path: str) -> None:
    """Bring the names in a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _make_folder(path: str) -> None:
    if not os.path.isdir(path):
        os.makedirs(path, 0o700, exist_ok=True)
        sync_folder(os.path.dirname(path))
    parent = os.path.dirname(path)
    for folder, protection in ((path, 0), (parent, stat.S_ISVTX)):
        mode = os.stat(folder).st_mode
        if mode & stat.S_IWOTH and not mode & protection:
            warnings.warn(
                f"{folder} can be written by everybody, who can so replace checkpoints; chmod o-w it", stacklevel=3
            )


def _is_abandoned(draft: str) -> bool:
    """Whether nobody holds the lock of a draft."""
    try:
        lock = os.open(os.path.join(draft, LOCK), os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return True  # died before it was locked, or after it was given up
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(lock)
    return True
