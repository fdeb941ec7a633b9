"""Archives that torch.save writes, looked at before torch reads them.

    check_archive(stream, where)     raises CheckpointError if it is damaged, or would take more than it has

An archive is a zip file of records: the pickle `data.pkl`, and the bytes of each storage. Each has a crc32, which torch itself does not
look at. Records are stored as they are; one that is compressed, which torch never writes, could grow without bounds. The pickle is read
as records first (`smpc.checkpoint.format.inert_pickle`): objects nested in and shared with each other may take for ever to copy or to hash.
Files of torch's formats before 1.6 are no archives and have no checksums; they are not looked at here.
"""

from __future__ import annotations

import zipfile
from typing import IO

from smpc.checkpoint.format.inert_pickle import expanded, parse
from smpc.checkpoint.format.regular import printable
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
