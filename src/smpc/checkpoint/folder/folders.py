"""The folder of a run's checkpoints: what appears in it only does so whole.

    run/                     Root
      step_100/              a checkpoint, published by renaming its draft: manifest.json and files of tensors
      step_200/
      newest                 the marker: the name of the last one published
      .step_300.7f3a90c1.draft       being written; removed by the next writer once its owner is dead
      .step_200.99e0b1c2.replaced    replaced by a forced save, until the new one is complete; found if it never is
      .step_100.5b21d7aa.removed     pruned, on its way out

Order of saving: draft, files and manifest on the disk, rename, marker. A crash before the rename leaves a draft, which nobody reads; after
it, a checkpoint that the marker does not name yet: `newest` goes by the number in the manifests then. A draft's owner (rank 0 of
the job) holds a lock on it, which ends with the process; so a draft of another job at work is left alone. Numbers are given, and names
changed, by one job at a time (`smpc.checkpoint.folder.locks`).

A checkpoint is identified by its tag: the name of its folder and the tag in its manifest must agree. A folder that was renamed, copied
under another name, or exchanged with another is not a checkpoint of that name; `same_name` says so, and what to do.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
import stat
import warnings
from dataclasses import dataclass

from smpc.checkpoint.folder.locks import LOCK, Lock, abandoned, make_locked, publishing
from smpc.checkpoint.format.manifest import MAX_BYTES, NAME, Manifest, is_plain_name
from smpc.checkpoint.format.regular_file import printable, read_regular
from smpc.errors import CheckpointError

MARKER = "newest"
DRAFT, REPLACED, REMOVED = "draft", "replaced", "removed"
_HIDDEN = re.compile(r"\.(?P<tag>.+)\.[0-9a-f]{8}\.(?P<state>draft|replaced|removed)")
_SHARE = re.compile(r"[a-z][a-z0-9_]*_[0-9]{5}\.safetensors")  # a rank's share, as `smpc.checkpoint.save` names it
_MAX_MARKER = 300


@dataclass(frozen=True, slots=True)
class Draft:
    """A checkpoint being written by this process; `lock` says so to others."""

    tag: str
    path: str
    lock: Lock


class Root:
    """A folder with checkpoints. Reading never changes it; rank 0 alone calls what writes."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.path.abspath(os.fspath(path))

    # Reading ------------------------------------------------------------------------------------------------------------

    def find(self, tag: str) -> str:
        """The folder of a checkpoint. Raises CheckpointError, saying what there is, if there is none."""
        check_tag(tag)
        path = os.path.join(self.path, tag)
        if os.path.lexists(os.path.join(path, NAME)):
            return path
        replaced = self.replaced(tag)
        if replaced is not None:
            return replaced
        there = self.tags()
        raise CheckpointError(
            "\n".join(
                [
                    f"no checkpoint {tag} in {self.path}; there {'are ' + ', '.join(there) if there else 'is none'}",
                    *(f"not whole: {line}" for line in self.damaged()),
                ]
            )
        )

    def replaced(self, tag: str) -> str | None:
        """Where a forced save has moved the old checkpoint, if it died before the new one was complete."""
        names = [name for name, found, state in self._hidden() if found == tag and state == REPLACED]
        return os.path.join(self.path, names[0]) if names else None

    def tags(self) -> list[str]:
        """Whole checkpoints, oldest first. Whole: the manifest is valid and the files have their sizes; bytes are not read."""
        return [tag for _, tag in self._complete()]

    def newest(self) -> str | None:
        """The last checkpoint that was published whole, or None if none ever was. Warns if the marker says otherwise or something is
        incomplete.

        Raises CheckpointError if there are checkpoints and not one is whole: to start anew beside them would lose them unnoticed.
        """
        complete, damaged = self._complete(), self.damaged()
        if damaged and not complete:
            raise CheckpointError(
                "\n".join(
                    [
                        f"{self.path}: none of the checkpoints there is whole; mend one, or move them away to start anew",
                        *damaged,
                    ]
                )
            )
        for problem in [*self._left(), *damaged]:
            warnings.warn(f"ignored: {problem}", stacklevel=2)
        if not complete:
            return None
        marked = read_marker(self.path, MARKER)
        last = last_in_folder(complete, marked)
        if marked != last:
            warnings.warn(wrong_marker(self.path, MARKER, marked, last), stacklevel=2)
        return last

    def incomplete(self) -> list[str]:
        """The entries of this folder that are not whole checkpoints, one line each."""
        return self._left() + self.damaged()

    def _left(self) -> list[str]:
        reasons = {
            DRAFT: "a save under way, or one that did not end",
            REPLACED: "replaced by a forced save",
            REMOVED: "pruned, not yet gone",
        }
        return [f"{os.path.join(self.path, name)}: {reasons[state]}" for name, _, state in self._hidden()]

    def damaged(self) -> list[str]:
        """Checkpoints whose manifest is not valid or another's, or whose files are missing or not as long as they should be."""
        problems = []
        for name in self._names():
            if is_plain_name(name) and is_checkpoint(os.path.join(self.path, name)):
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
                    else "it is not a checkpoint"
                )
                raise CheckpointError(f"{target} exists and is not overwritten; {hint}")
            path, lock = make_locked(self.path, tag, DRAFT)
        except OSError as error:
            raise CheckpointError(f"cannot write {error.filename or self.path}: {error.strerror}") from error
        return Draft(tag, path, lock)

    def publishing(self) -> contextlib.AbstractContextManager[None]:
        """Around `next_sequence` and `publish`: jobs that save into one folder do so one after the other."""
        return publishing(self.path)

    def publish(self, draft: Draft, *, force: bool) -> str:
        """Make a draft the checkpoint of its tag, and mark it as the newest. Its files must be on the disk. Inside `publishing`.

        Raises CheckpointError if that fails; then the old one is restored. A marker that cannot be moved is a warning.
        """
        target = os.path.join(self.path, draft.tag)
        replaced, is_renamed = None, False
        try:
            sync_folder(draft.path)
            if force and os.path.lexists(target):
                replaced = self.move_aside(draft.tag)
            _rename_new(draft.path, target)
            is_renamed = True
            sync_folder(self.path)
        except BaseException as error:
            with contextlib.suppress(OSError):
                if is_renamed:
                    os.rename(target, draft.path)
                if replaced is not None:
                    os.rename(replaced, target)
            if isinstance(error, OSError):
                raise CheckpointError(f"cannot publish {target}: {error.strerror}: {error.filename}") from error
            raise
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(target, LOCK))
        draft.lock.close()
        mark(self.path, MARKER, draft.tag)
        if replaced is not None:
            remove(replaced)
        return target

    def move_aside(self, tag: str) -> str:
        """Move a file or folder aside for its replacement; until that is complete, `find` and `replaced` return the old one."""
        replaced = self._hide(tag, REPLACED)
        os.rename(os.path.join(self.path, tag), replaced)
        return replaced

    def discard(self, draft: Draft) -> None:
        """Remove a draft that failed."""
        draft.lock.close()
        shutil.rmtree(draft.path, ignore_errors=True)

    def clean(self) -> list[str]:
        """Remove what dead jobs left, and put back what they had moved aside. Returns what was done, one line each."""
        if not self._hidden():
            return []
        done = []
        with self.publishing():  # what another job replaces just now is not put back
            for name, tag, state in self._hidden():
                path = os.path.join(self.path, name)
                if state == REPLACED and not os.path.lexists(os.path.join(self.path, tag)):
                    with contextlib.suppress(OSError):
                        os.rename(path, os.path.join(self.path, tag))
                        done.append(
                            f"put back {os.path.join(self.path, tag)}: the save that should replace it did not end"
                        )
                elif state != DRAFT:
                    done += [f"removed {path}"] if remove(path) else []
                else:
                    with abandoned(path) as is_abandoned:
                        done += [f"removed {path}"] if is_abandoned and remove(path) else []
        return done

    def prune(self, keep: int) -> list[str]:
        """Remove all but the `keep` newest checkpoints. Returns their tags; warns of those that cannot be removed."""
        check_keep(keep)
        pruned, hidden = [], []
        with self.publishing():
            for tag in self.tags()[:-keep]:
                path, aside = os.path.join(self.path, tag), self._hide(tag, REMOVED)
                try:
                    os.rename(path, aside)  # gone at once: a crash never leaves half a checkpoint under its name
                except OSError as error:
                    warnings.warn(f"cannot remove the old checkpoint {path}: {error.strerror}", stacklevel=2)
                    continue
                pruned.append(tag)
                hidden.append(aside)
        for path in hidden:
            remove(path)
        return pruned

    def next_sequence(self) -> int:
        """The number of the checkpoint that comes after all there are, those that have lost files too. Inside `publishing`."""
        last = 0
        for name in self._places().values():
            with contextlib.suppress(CheckpointError):
                last = max(last, read_manifest(os.path.join(self.path, name)).sequence)
        return last + 1

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

    def _places(self) -> dict[str, str]:
        """The folders that are checkpoints or should be, by tag."""
        found = {tag: name for name, tag, state in self._hidden() if state == REPLACED}
        names = [name for name in self._names() if is_plain_name(name)]
        return found | {name: name for name in names if is_checkpoint(os.path.join(self.path, name))}

    def _complete(self) -> list[tuple[int, str]]:
        complete = []
        for tag, name in self._places().items():
            with contextlib.suppress(CheckpointError):
                complete.append((check_whole(os.path.join(self.path, name)).sequence, tag))
        return sorted(complete)

    def _hide(self, tag: str, state: str) -> str:
        return os.path.join(self.path, f".{tag}.{secrets.token_hex(4)}.{state}")


def remove(path: str) -> bool:
    """Remove a file, a folder or a link; a warning if that fails. An entry that another process removes meanwhile is not a failure."""
    try:
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        else:
            os.unlink(path)
    except FileNotFoundError:
        return not os.path.lexists(path) or remove(path)
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


def read_marker(folder: str, marker: str) -> str | None:
    """The text of a marker; None if there is no readable one."""
    try:
        data = read_regular(os.path.join(folder, marker), _MAX_MARKER)
    except CheckpointError:
        return None
    return data.decode("utf-8", "backslashreplace").strip()


def wrong_marker(folder: str, marker: str, marked: str | None, last: str) -> str:
    """The warning that a marker does not name the last whole checkpoint."""
    found = "nothing" if marked is None else repr(marked)
    return (
        f"{os.path.join(folder, marker)} names {found}, not {last}, the last whole checkpoint; that one is used. To go back, "
        "ask for another by name"
    )


def last_in_folder(complete: list[tuple[int, str]], marked: str | None) -> str:
    """The tag with the highest number; where several have it, which no save makes, the one that is marked."""
    highest = max(sequence for sequence, _ in complete)
    tags = [tag for sequence, tag in complete if sequence == highest]
    return marked if marked is not None and marked in tags else tags[-1]


def mark(folder: str, marker: str, tag: str) -> None:
    """Let a marker name a checkpoint that has been published; inside `publishing`. If that fails, a warning: the number in it counts."""
    draft = os.path.join(folder, f".{marker}.{DRAFT}")
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(draft)  # of a job that died here
        write_new(draft, f"{tag}\n".encode())
        os.replace(draft, os.path.join(folder, marker))
        sync_folder(folder)
    except OSError as error:
        warnings.warn(
            f"{os.path.join(folder, tag)} is saved, but {os.path.join(folder, marker)} cannot be written to name it: {error.strerror}",
            stacklevel=3,
        )


def read_manifest(folder: str) -> Manifest:
    """The manifest of a checkpoint's folder. Raises CheckpointError, naming the file."""
    path = os.path.join(folder, NAME)
    try:
        return Manifest.from_json(read_regular(path, MAX_BYTES).decode(), path)
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: not a manifest, or damaged: {error}") from error


def is_checkpoint(folder: str) -> bool:
    """Whether a folder is a checkpoint, perhaps a damaged one that has lost its manifest."""
    if os.path.lexists(os.path.join(folder, NAME)):
        return True
    try:
        return any(map(is_share, os.listdir(folder)))
    except OSError:
        return False


def is_share(name: str) -> bool:
    """Whether this names the file of a rank's share of a checkpoint."""
    return _SHARE.fullmatch(name) is not None


def same_name(folder: str, tag: str) -> str | None:
    """The error for a folder that holds a checkpoint of another tag than its name; the name may also be a link's."""
    names = [os.path.basename(os.path.abspath(folder)), os.path.basename(os.path.realpath(folder))]
    hidden = [_HIDDEN.fullmatch(name) for name in names]
    if tag in [match["tag"] if match else name for name, match in zip(names, hidden, strict=True)]:
        return None
    return (
        f"{folder}: this folder holds the checkpoint {printable(tag)}, so it was renamed, copied or exchanged with another; rename it to "
        f"{printable(tag)}, in a folder of its own if there is another of that name, or make a link of that name to it"
    )


def check_whole(folder: str, *, any_name: bool = False) -> Manifest:
    """The manifest, if every file exists with its size, and (unless `any_name`) it is the folder's own.

    Raises CheckpointError, listing all that is wrong.
    """
    manifest = read_manifest(folder)
    renamed = None if any_name else same_name(folder, manifest.tag)
    if renamed is not None:
        raise CheckpointError(renamed)
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


def _rename_new(draft: str, target: str) -> None:
    try:
        os.rename(draft, target)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise CheckpointError(f"{target} exists and is not overwritten; another job made it") from error
        raise


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
