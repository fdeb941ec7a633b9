"""Object storage: names of the form `s3://bucket/key`, reached through fsspec with s3fs (pip install s3fs).

Source: public training scripts for SMP v2.
"""

from __future__ import annotations

import functools
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from smpc.checkpoint.torch_format.file_systems import file_system_of
from smpc.errors import UsageError

__all__ = [
    "S3ClientConfig",
    "S3FileSystem",
    "format_s3_path",
    "get_s3_region_from_uri",
    "is_s3_uri",
    "parse_s3_uri",
    "retry_with_jitter",
]
_SCHEME = "s3://"
_P = ParamSpec("_P")
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class S3ClientConfig:
    """How objects are moved. `part_size`: bytes of the parts of an upload."""

    part_size: int = 64 << 20

    def __post_init__(self) -> None:
        """Raise UsageError for sizes that S3 does not take."""
        if (
            isinstance(self.part_size, bool)
            or not isinstance(self.part_size, int)
            or not 5 << 20 <= self.part_size <= 5 << 30
        ):
            raise UsageError(f"part_size: expected bytes from 5 MiB to 5 GiB, found {self.part_size!r}")


def is_s3_uri(uri: str | os.PathLike[str]) -> bool:
    """Whether a name is one of an object storage."""
    return isinstance(uri, str) and uri.startswith(_SCHEME)


def parse_s3_uri(uri: str) -> tuple[str, str]:
    """Bucket and key of `s3://bucket/key`."""
    bucket, _, key = uri.removeprefix(_SCHEME).partition("/")
    if not is_s3_uri(uri) or not bucket:
        raise UsageError(f"expected s3://bucket/key, found {uri!r}")
    return bucket, key


def format_s3_path(bucket: str, key: str = "") -> str:
    """The inverse of `parse_s3_uri`."""
    return f"{_SCHEME}{bucket}/{key.lstrip('/')}"


def get_s3_region_from_uri(uri: str) -> str:
    """The region of a bucket; asks the storage."""
    bucket, _ = parse_s3_uri(uri)
    found = S3FileSystem().fs.call_s3("get_bucket_location", Bucket=bucket)
    return found.get("LocationConstraint") or "us-east-1"


def s3_options(region: str | None = None, config: Any = None) -> dict[str, Any]:
    """The fsspec options for a region, and an S3ClientConfig (or anything with a `part_size`)."""
    options: dict[str, Any] = {"default_block_size": getattr(config, "part_size", S3ClientConfig().part_size)}
    if region is not None:
        options["client_kwargs"] = {"region_name": region}
    return options


class S3FileSystem:
    """The file system of object storage, for a region; `fs` is fsspec's."""

    def __init__(self, region: str | None = None, s3client_config: S3ClientConfig | None = None) -> None:
        file_system, _ = file_system_of(f"{_SCHEME}", s3_options(region, s3client_config))
        self.fs: Any = vars(file_system)["fs"]


def retry_with_jitter(
    func: Callable[_P, _T] | None = None, *, max_attempts: int = 5, base_delay: float = 0.5, max_delay: float = 30.0
) -> Any:
    """Decorates a function so that an OSError, which storage raises when it is busy, makes it try again after a random wait (seconds)."""
    if func is None:
        return functools.partial(
            retry_with_jitter, max_attempts=max_attempts, base_delay=base_delay, max_delay=max_delay
        )
    work = func

    @functools.wraps(work)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        for attempt in range(max_attempts - 1):
            try:
                return work(*args, **kwargs)
            except OSError:
                time.sleep(random.uniform(0, min(max_delay, base_delay * 2**attempt)))
        return work(*args, **kwargs)

    return call
