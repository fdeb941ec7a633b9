"""Storage writers and readers that scripts make themselves; they work with torch.distributed.checkpoint, too.

Source: public training scripts for SMP v2.
"""

from __future__ import annotations

import os

from torch.distributed.checkpoint.filesystem import FileSystemBase

from smpc.checkpoint.torch_format.file_systems import file_system_of
from smpc.checkpoint.torch_format.reader import TorchFormatReader as DistributedFileSystemReader
from smpc.checkpoint.torch_format.saving import TorchFormatWriter as DistributedFileSystemWriter

__all__ = ["DistributedFileSystemReader", "DistributedFileSystemWriter", "path_to_file_system"]


def path_to_file_system(path: str | os.PathLike[str]) -> FileSystemBase:
    """The file system of a folder or a URL."""
    return file_system_of(path)[0]
