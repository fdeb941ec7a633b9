"""Files that a user names: read with bounds on their size and kind.

    read_text("plan.json", "plan", most=MAX_PLAN_BYTES)     the text of a regular file, in UTF-8
    parse_json(text, "plan.json")                           an object; parse_toml does the same for a table

Each of these is a ConfigError of one line that begins with `what`: a folder, a named pipe (reading it would wait), a device (it may
never end), a link to itself, a file that is too large or not text; JSON and TOML that are malformed, nested too deeply, or have numbers
of thousands of digits or values that are not numbers (NaN, Infinity, 1e999).
"""

from __future__ import annotations

import json
import math
import os
import stat
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from smpc.config.numbers import shown
from smpc.errors import ConfigError, ConfigTypeError, printable

MAX_FILE_BYTES = 4 << 20  # of settings
MAX_PLAN_BYTES = 16 << 20  # of a plan: one of 126 layers has less than a thirtieth
MAX_DEPTH = 64  # nesting in a file
MAX_BITS = 256  # of a whole number in a file


def read_text(path: str | Path, what: str, *, most: int = MAX_FILE_BYTES) -> str:
    """The text of a regular file of at most `most` bytes; `what` is how messages begin."""
    what = printable(what)
    try:
        # Opens without waiting for the writer of a named pipe.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(f"{what}: cannot read it: {error.strerror}") from None
    except ValueError:
        raise ConfigError(f"{what}: no file can have such a name") from None
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise ConfigError(f"{what}: expected a file, found a {_kind_of_file(mode)}")
        with open(descriptor, "rb", closefd=False) as file:
            data = file.read(most + 1)
    except OSError as error:
        raise ConfigError(f"{what}: cannot read it: {error.strerror}") from None
    finally:
        os.close(descriptor)
    if len(data) > most:
        raise ConfigError(f"{what}: expected at most {most} bytes, found more")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{what}: not UTF-8 text at byte {error.start}") from None


def output_violation(name: str, *, makes_folders: bool = False) -> str:
    """Why a file of that name cannot be written, "" if it can; `makes_folders`: folders above it need not exist.

    Writing to a named pipe that nobody reads would wait.
    """
    try:
        mode = os.stat(name).st_mode
    except ValueError:  # a NUL, or a character that file names cannot encode
        return f"no file can have the name {shown(name)}"
    except (FileNotFoundError, NotADirectoryError):
        mode = 0
    except OSError as error:
        return f"cannot write {shown(name)}: {error.strerror}"
    if not name or stat.S_ISDIR(mode):
        return f"expected the name of a file, found {shown(name)}{', which is a folder' if name else ''}"
    if stat.S_ISSOCK(mode) or (stat.S_ISFIFO(mode) and not _has_reader(name)):
        return f"cannot write {shown(name)}: nobody reads the {_kind_of_file(mode)}"
    above = os.path.dirname(os.path.abspath(name))
    while makes_folders and not os.path.lexists(above):
        above = os.path.dirname(above)
    if not os.path.isdir(above):
        what = "is not a folder" if os.path.lexists(above) else "does not exist"
        return f"cannot write {shown(name)}: {shown(above)} {what}"
    target = name if mode else above
    if not os.access(target, os.W_OK if mode else os.W_OK | os.X_OK):
        return f"cannot write {shown(name)}: no permission to write {shown(target)}"
    return ""


def _has_reader(pipe: str) -> bool:
    try:
        os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    except OSError:
        return False
    return True


def parse_json(text: str, what: str, *, infinite: bool = False) -> dict[str, Any]:
    """A JSON object, each key in it once. `infinite`: accepts NaN and Infinity, which are not JSON."""
    value = _parsed_file(
        what, "JSON", lambda: json.loads(text, object_pairs_hook=_unique_keys, parse_int=_whole_number_in_file)
    )
    if not isinstance(value, dict):
        raise ConfigTypeError(f"{printable(what)}: expected a JSON object, found {type(value).__name__}")
    _check_values(value, what, infinite)
    return value


def parse_toml(text: str, what: str) -> dict[str, Any]:
    """A TOML document."""
    value: dict[str, Any] = _parsed_file(what, "TOML", lambda: tomllib.loads(text))
    _check_values(value, what, infinite=False)
    return value


class _Twice(ValueError):
    """A key that is given twice."""


def _parsed_file(what: str, form: str, parse: Callable[[], Any]) -> Any:
    """What the text of a file says; its faults are ConfigErrors."""
    what = printable(what)
    try:
        return parse()
    except json.JSONDecodeError as error:
        raise ConfigError(f"{what}: malformed JSON at line {error.lineno}, column {error.colno}: {error.msg}") from None
    except _Twice as error:
        raise ConfigError(f"{what}: duplicate key {error}; keep one") from None
    except RecursionError:
        raise ConfigError(f"{what}: malformed {form}: nested too deeply") from None
    except (ValueError, MemoryError) as error:  # of TOML; of a number or date in it that Python cannot hold
        raise ConfigError(f"{what}: malformed {form}: {printable(str(error))}") from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The dict of these pairs; an error if a key is there twice."""
    result = dict(pairs)
    if len(result) < len(pairs):
        seen: dict[str, None] = {}
        for name, _ in pairs:
            if name in seen:
                raise _Twice(printable(name))
            seen[name] = None
    return result


def _whole_number_in_file(digits: str) -> int:
    if len(digits) > MAX_BITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def _check_values(value: Any, what: str, infinite: bool) -> None:
    """Raise ConfigError for values nested too deeply, and for numbers that are too long or not finite; without recursion."""
    what = printable(what)
    level = [value]
    for _ in range(MAX_DEPTH):
        inner: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                inner += item.values()
            elif isinstance(item, list):
                inner += item
            elif isinstance(item, int) and item.bit_length() > MAX_BITS:
                raise ConfigError(f"{what}: expected numbers of at most {MAX_BITS} bits, found {shown(item)}")
            elif isinstance(item, float) and not infinite and not math.isfinite(item):
                raise ConfigError(f"{what}: expected finite numbers, found {item}")
        if not inner:
            return
        level = inner
    raise ConfigError(f"{what}: nested too deeply: more than {MAX_DEPTH} levels")


def _kind_of_file(mode: int) -> str:
    kinds = {stat.S_IFDIR: "folder", stat.S_IFIFO: "named pipe", stat.S_IFSOCK: "socket"}
    return kinds.get(stat.S_IFMT(mode), "device")
