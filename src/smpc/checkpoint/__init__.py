"""Checkpoints."""

from smpc.checkpoint.files import read_file, write_file

__all__ = ["read_file", "write_file"]
