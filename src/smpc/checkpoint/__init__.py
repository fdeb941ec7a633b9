"""Checkpoints: whole or not there, verified, and loadable on any topology. See docs/checkpoints.md."""

from smpc.checkpoint.async_save import BackgroundSaver
from smpc.checkpoint.channel import Alone, Channel, GroupChannel, StoreChannel, together
from smpc.checkpoint.convert import open_source, write_checkpoint
from smpc.checkpoint.distributed import write_distributed
from smpc.checkpoint.folder.files import read_file, write_file
from smpc.checkpoint.folder.folders import Root
from smpc.checkpoint.format.draft_content import Content, Shard
from smpc.checkpoint.format.regions import Box
from smpc.checkpoint.load import Loaded, check, load, verify_source
from smpc.checkpoint.modules import load_modules, module_content, shard_of
from smpc.checkpoint.reader import Checkpoint, verify
from smpc.checkpoint.rng import capture_rng, restore_rng
from smpc.checkpoint.save import Saving, save
from smpc.checkpoint.sources.export import (
    FullSaving,
    save_full,
    standing,
    write_archive_of,
    write_file_of,
    write_folder,
)

__all__ = [
    "Alone",
    "BackgroundSaver",
    "Box",
    "Channel",
    "Checkpoint",
    "Content",
    "FullSaving",
    "GroupChannel",
    "Loaded",
    "Root",
    "Saving",
    "Shard",
    "StoreChannel",
    "capture_rng",
    "check",
    "load",
    "load_modules",
    "module_content",
    "open_source",
    "read_file",
    "restore_rng",
    "save",
    "save_full",
    "shard_of",
    "standing",
    "together",
    "verify",
    "verify_source",
    "write_archive_of",
    "write_checkpoint",
    "write_distributed",
    "write_file",
    "write_file_of",
    "write_folder",
]
