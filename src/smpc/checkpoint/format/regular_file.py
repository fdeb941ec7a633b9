"""Reading what is a regular file, and nothing else: no links, pipes, sockets or devices, and never more than expected.

    open_regular(path)               a descriptor; returns or raises at once, for any kind of entry
    read_regular(path, most)         the bytes, at most so many
    is_file(path)                    whether there is one, links followed; anything else under that name is refused
    printable(name)                  a name out of a file, fit to be shown: control characters and line breaks as escapes

A named pipe would make an ordinary `open` wait for a writer for ever, and a device may never end.
"""

from __future__ import annotations

import os
import stat

from smpc.errors import CheckpointError

_FLAGS = os.O_RDONLY | os.O_NONBLOCK | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}


def open_regular(path: str) -> int:
    """A descriptor for reading. Raises CheckpointError if the file is missing, a link or no regular file."""
    try:
        descriptor = os.open(path, _FLAGS)
    except OSError as error:
        what = (
            "a symbolic link, which is never followed"
            if os.path.islink(path)
            else _kind_of_entry(path) or error.strerror
        )
        raise CheckpointError(f"cannot read {path}: {what}") from error
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise CheckpointError(f"cannot read {path}: expected a regular file, found {_KINDS[stat.S_IFMT(mode)]}")
    return descriptor


def read_regular(path: str, most: int) -> bytes:
    """All bytes of a regular file. Raises CheckpointError if there are more than `most`, or it cannot be read."""
    with open(open_regular(path), "rb") as file:
        try:
            data = file.read(most + 1)
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    if len(data) > most:
        raise CheckpointError(f"{path}: expected at most {most} bytes, found more")
    return data


def is_file(path: str) -> bool:
    """Whether a regular file, or a link to one, has this name. Raises CheckpointError if a pipe, socket or device has it."""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return False
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
        return stat.S_ISREG(mode)
    raise CheckpointError(f"cannot read {path}: expected a regular file, found {_KINDS[stat.S_IFMT(mode)]}")


def printable(name: object) -> str:
    """A name as it is where it can be shown; the rest is escaped, so that it cannot steer a terminal or pass for a line."""
    text = str(name)
    return text if text.isprintable() else "".join(map(_escaped_file_name, text))


def _escaped_file_name(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape", "surrogatepass").decode()


def _kind_of_entry(path: str) -> str | None:
    """The kind of an entry that cannot be opened because it is not a file."""
    try:
        kind = stat.S_IFMT(os.lstat(path).st_mode)
    except (OSError, ValueError):
        return None
    return None if kind == stat.S_IFREG or kind not in _KINDS else f"expected a regular file, found {_KINDS[kind]}"
