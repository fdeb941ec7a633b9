"""`smp.load` of files that `smp.save_checkpoint` has written: for scripts that open the parts of a checkpoint themselves.

    smp.load("run/step200_partial")                     {"model": {name: tensor}, "optimizer": {...}, ..., "user_content": ...}
    smp.load("run/step200_partial/user_content.pt")     the user content
    smp.load("run/user_content_step300")                the user content beside the full model step300
    smp.load("run/newest")                              the name of the newest partial checkpoint; newest_full: of the newest full one

A full model, "run/step300", is a file that torch.load reads, and smp.load with it. All tensors are whole, verified, and on the CPU.
"""

from __future__ import annotations

import os
from typing import Any

from smpc.checkpoint import Checkpoint
from smpc.checkpoint.folder.folders import MARKER, is_checkpoint, read_marker
from smpc.checkpoint.format.content import VALUES
from smpc.errors import CheckpointError
from smpc.v1.saving import full_folder

_USER = "user_content.pt"


def is_saved(path: str) -> bool:
    """Whether `load_saved` loads a path of this name."""
    folder, name = os.path.split(path)
    if os.path.isdir(path):
        return is_checkpoint(path) or name.startswith(full_folder.CONTENT)
    if name == _USER and not os.path.lexists(path):
        return is_checkpoint(folder)
    return name in (MARKER, full_folder.MARKER) and read_marker(folder, name) is not None


def load_saved(path: str) -> Any:
    """See the module's docstring. Raises CheckpointError, naming the file, if it is damaged or incomplete."""
    folder, name = os.path.split(os.path.abspath(path))
    if name in (MARKER, full_folder.MARKER):
        return read_marker(folder, name)
    if name == _USER:
        return _user(folder)
    if is_checkpoint(path):
        return _whole(path)
    rest = full_folder.rest_of(folder, name.removeprefix(full_folder.CONTENT))
    if rest is None:
        raise CheckpointError(f"{path}: the model that it belongs to was not saved by smp.save_checkpoint")
    return _user(rest)


def _user(folder: str) -> Any:
    with Checkpoint.open(folder) as checkpoint:
        return checkpoint.user()


def _whole(folder: str) -> dict[str, Any]:
    with Checkpoint.open(folder) as checkpoint:
        found: dict[str, Any] = {}
        for kind, name in checkpoint.entries:
            if kind != VALUES:
                found.setdefault(kind, {})[name] = checkpoint.read(kind, name)
        return found | {"user_content": checkpoint.user()}
