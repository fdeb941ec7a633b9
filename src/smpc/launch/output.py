"""Output of this host's ranks: to files, one for every rank, and to the console, with a prefix.

Terms
    template    a file name with the fields {rank}, {local_rank}, {world_size}, {local_world_size}, {node_rank}: `--stdout 'out/{rank}.log'`
    console     the launcher's own stdout and stderr: lines of all ranks, of the first one of this host, or none

The last 64 KiB of each hidden stream are kept: `hidden` returns a failed rank's.

A line of the console begins with `[rank 3] `, in a colour of its rank where the console is a terminal. A single rank whose output goes to
no file has the console to itself, without a prefix: a debugger works. Files have what the rank wrote, byte by byte, at once.
"""

from __future__ import annotations

import os
import string
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, BinaryIO, TextIO

from smpc.config.numbers import shown
from smpc.config.user_files import output_violation
from smpc.errors import printable

CONSOLES = ("all", "first", "none")
_FIELDS = ("rank", "local_rank", "world_size", "local_world_size", "node_rank")
_COLOURS = (36, 33, 35, 32, 34, 31)  # cyan, yellow, magenta, green, blue, red
_LONGEST_LINE = 1 << 16  # bytes; a longer one is shown in pieces
_JOIN_SECONDS = 2.0
_KEPT_BYTES = 1 << 16  # of each stream that is not shown


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """Where output goes. `stdout`, `stderr`: templates, None for no file. `prefix`: whether lines on the console say whose they are."""

    stdout: str | None = None
    stderr: str | None = None
    console: str = "all"
    prefix: bool = True

    def violations(self, places: Sequence[Mapping[str, int]]) -> list[str]:
        """The error of these file names, for ranks with these values of the fields."""
        found = (
            []
            if self.console in CONSOLES
            else [f"--console: expected {', '.join(CONSOLES)}, found {shown(self.console)}"]
        )
        for option, template in (("--stdout", self.stdout), ("--stderr", self.stderr)):
            if template is not None:
                found += _template_violations(option, template, places)
        return found

    def is_inherited(self, num_ranks: int) -> bool:
        """Whether the ranks simply have the launcher's streams."""
        return num_ranks == 1 and self.stdout is None and self.stderr is None and self.console != "none"


def _template_violations(option: str, template: str, places: Sequence[Mapping[str, int]]) -> list[str]:
    try:
        fields = [parts[1:] for parts in string.Formatter().parse(template) if parts[1] is not None]
    except ValueError as error:
        return [f"{option}: {shown(template)} is no file name with fields: {error}; write {{{{ for a brace"]
    unknown = [f"{name}{'!' + how if how else ''}{':' + form if form else ''}" for name, form, how in fields]
    unknown = [name for name in unknown if name not in _FIELDS]
    if unknown:
        known = ", ".join(f"{{{name}}}" for name in _FIELDS)
        return [f"{option}: unknown field {{{printable(unknown[0][:100])}}} in {shown(template)}; known are {known}"]
    names = [template.format(**place) for place in places]
    if len(set(names)) < len(names):
        return [f"{option}: {shown(template)} is one file for several ranks; put {{rank}} into it"]
    lines = (output_violation(name, makes_folders=True) for name in names)
    return [f"{option}: {line}" for line in lines if line][:1]


class RankOutput:
    """The streams of the ranks; `attach` each, `close` at the end."""

    def __init__(self, options: OutputOptions, stdout: TextIO, stderr: TextIO) -> None:
        self._options = options
        self._consoles = (stdout, stderr)
        self._coloured = tuple(_wants_colour(stream) for stream in self._consoles)
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._files: dict[str, BinaryIO] = {}
        self._damaged: list[BinaryIO] = []  # files that lack something
        self._hidden: dict[
            int, list[bytes]
        ] = {}  # by rank: the ends of its stdout and stderr, where they are not shown

    def attach(self, streams: Sequence[IO[bytes] | None], place: Mapping[str, int]) -> None:
        """Begin to read the stdout and the stderr of a rank."""
        shown = self._options.console == "all" or (self._options.console == "first" and place["local_rank"] == 0)
        for index, (stream, template) in enumerate(
            zip(streams, (self._options.stdout, self._options.stderr), strict=True)
        ):
            if stream is not None:
                file = None if template is None else self._open(template.format(**place))
                prefix = self._prefix(index, place["rank"]) if shown else None
                kept = self._hidden.setdefault(place["rank"], [b"", b""])
                arguments = (stream, file, prefix, self._consoles[index], (kept, index))
                self._threads.append(threading.Thread(target=self._pump, args=arguments, daemon=True))
                self._threads[-1].start()

    def close(self) -> None:
        """Wait for the ranks' last output. A process that outlived them and holds a stream is not waited for."""
        for thread in self._threads:
            thread.join(_JOIN_SECONDS)
        for file in self._files.values():
            file.close()

    def hidden(self, rank: int) -> str:
        """The end of a rank's hidden output; "" if there is none. Call it after `close`."""
        parts = []
        for name, kept in zip(("stdout", "stderr"), self._hidden.get(rank, ()), strict=False):
            if kept.strip():
                cut = f", its last {_KEPT_BYTES // 1024} KiB" if len(kept) >= _KEPT_BYTES else ""
                parts.append(f"smpc: {name} of rank {rank}{cut}:\n{kept.decode(errors='backslashreplace').rstrip()}")
        return "\n".join(parts)

    def _open(self, name: str) -> BinaryIO:
        if name not in self._files:  # stdout and stderr may share one
            Path(name).parent.mkdir(parents=True, exist_ok=True)
            self._files[name] = open(name, "wb", buffering=0)  # noqa: SIM115, closed by `close`
        return self._files[name]

    def _prefix(self, index: int, rank: int) -> str:
        if not self._options.prefix:
            return ""
        text = f"[rank {rank}]"
        return f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m{text}\x1b[0m " if self._coloured[index] else f"{text} "

    def _pump(
        self,
        stream: IO[bytes],
        file: BinaryIO | None,
        prefix: str | None,
        console: TextIO,
        keep: tuple[list[bytes], int],
    ) -> None:
        rest = b""
        while chunk := os.read(stream.fileno(), _LONGEST_LINE):
            if file is not None:
                self._write(file, chunk)
            if prefix is None:
                kept, index = keep
                kept[index] = (kept[index] + chunk)[-_KEPT_BYTES:]
                continue
            # A progress bar ends its lines with \r.
            *lines, rest = (rest + chunk).replace(b"\r\n", b"\n").replace(b"\r", b"\r\n").split(b"\n")
            if len(rest) > _LONGEST_LINE:
                lines, rest = [*lines, rest], b""
            self._show(lines, prefix, console)
        if rest and prefix is not None:
            self._show([rest], prefix, console)

    def _write(self, file: BinaryIO, chunk: bytes) -> None:
        """Write to a rank's file. A full disk does not stop the rank; it is reported once."""
        try:
            while chunk:
                chunk = chunk[file.write(chunk) :]
        except (OSError, ValueError) as error:
            with self._lock, suppress(OSError, ValueError):
                if file not in self._damaged:
                    self._damaged.append(file)
                    reason = getattr(error, "strerror", None) or error
                    print(
                        f"smpc: warning: output is missing in {file.name!r}: {reason}",
                        file=self._consoles[1],
                        flush=True,
                    )

    def _show(self, lines: list[bytes], prefix: str, console: TextIO) -> None:
        text = "".join(
            f"{prefix}{line.decode(errors='backslashreplace')}" + ("" if line.endswith(b"\r") else "\n")
            for line in lines
        )
        with self._lock, suppress(OSError, ValueError):  # whoever reads the console may be gone
            console.write(text)
            console.flush()


def _wants_colour(stream: TextIO) -> bool:
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
