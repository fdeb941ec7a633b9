"""`smp.save` and `smp.load`: one file, or one file for every rank of a replica.

    smp.save(obj, "model.pt")                      model.pt_0_0 on pp_rank 0 and tp_rank 0, model.pt_1_0 on pp_rank 1, ...
    smp.save(obj, "model.pt", v3=True)             model.pt_0_0_0, ...: with the rdp_rank
    smp.save(obj, "model.pt", partial=False)       model.pt

Call `smp.save` on one of the replicas (`smp.dp_rank() == 0`), `smp.load` on every rank. Files are written whole or not at all, and loading
never runs code: see `smpc.checkpoint.folder.files`.

Source: public SMP v1 API ("APIs for Saving and Loading").

`load_saved` is `smp.load` of files that `smp.save_checkpoint` has written, for scripts that open the parts of a checkpoint themselves.

    smp.load("run/step200_partial")                     {"model": {name: tensor}, "optimizer": {...}, ..., "user_content": ...}
    smp.load("run/step200_partial/user_content.pt")     the user content
    smp.load("run/user_content_step300")                the user content beside the full model step300
    smp.load("run/newest")                              the name of the newest partial checkpoint; newest_full: of the newest full one

A full model, "run/step300", is a file that torch.load reads, and smp.load with it. All tensors are whole, verified, and on the CPU.
"""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Mapping
from typing import Any

from smpc.checkpoint import Checkpoint, read_file, write_file
from smpc.checkpoint.folder.folders import MARKER, is_checkpoint, read_marker
from smpc.checkpoint.format.draft_content import VALUES
from smpc.errors import CheckpointError, ConfigError, ConfigTypeError
from smpc.v1.saving import full
from smpc.v1.session.process_state import state
from smpc.v1.session.ranks import mp_rank, pp_rank, rdp_rank, tp_rank

_USER = "user_content.pt"


def is_saved(path: str) -> bool:
    """Whether `load_saved` loads a path of this name."""
    folder, name = os.path.split(path)
    if os.path.isdir(path):
        return is_checkpoint(path) or name.startswith(full.CONTENT)
    if name == _USER and not os.path.lexists(path):
        return is_checkpoint(folder)
    return name in (MARKER, full.MARKER) and read_marker(folder, name) is not None


def load_saved(path: str) -> Any:
    """See the module's docstring. Raises CheckpointError, naming the file, if it is damaged or incomplete."""
    folder, name = os.path.split(os.path.abspath(path))
    if name in (MARKER, full.MARKER):
        return read_marker(folder, name)
    if name == _USER:
        return _user(folder)
    if is_checkpoint(path):
        return _whole_checkpoint(path)
    rest = full.rest_of(folder, name.removeprefix(full.CONTENT))
    if rest is None:
        raise CheckpointError(f"{path}: the model that it belongs to was not saved by smp.save_checkpoint")
    return _user(rest)


def _user(folder: str) -> Any:
    with Checkpoint.open(folder) as checkpoint:
        return checkpoint.user()


def _whole_checkpoint(folder: str) -> dict[str, Any]:
    """Everything in a partial checkpoint, whole."""
    with Checkpoint.open(folder) as checkpoint:
        found: dict[str, Any] = {}
        for kind, name in checkpoint.entries:
            if kind != VALUES:
                found.setdefault(kind, {})[name] = checkpoint.read(kind, name)
        return found | {"user_content": checkpoint.user()}


_PROTOCOL = 2


def save(
    obj: Any,
    f: str,
    partial: bool = True,
    pickle_module: Any = pickle,
    pickle_protocol: int = 2,
    v3: bool = False,
) -> None:
    """Save an object. `f`: the name of a file, to which `partial` adds this process's ranks (and `v3` the rdp_rank).

    `pickle_module`, `pickle_protocol`: ignored; files are always written with protocol 2, since no other can be loaded without running
    code. Raises CheckpointError, naming the file, if it cannot be written; an older file then stays.
    """
    path = _checked(f)
    if type(pickle_protocol) is not int or not -1 <= pickle_protocol <= pickle.HIGHEST_PROTOCOL:
        raise ConfigError(
            f"pickle_protocol: expected a whole number up to {pickle.HIGHEST_PROTOCOL}, found {pickle_protocol!r}"
        )
    if pickle_protocol != _PROTOCOL:
        warnings.warn(
            f"pickle_protocol={pickle_protocol} has no effect: files are written with protocol {_PROTOCOL}, which smp.load and "
            "torch.load(weights_only=True) read",
            stacklevel=2,
        )
    write_file(
        obj, _partial_name(path, v3) if partial else path, pickle_module=pickle_module, pickle_protocol=_PROTOCOL
    )


def load(
    f: str,
    map_location: Any = None,
    pickle_module: Any = None,
    pickle_load_args: Mapping[str, Any] | None = None,
    partial: bool = True,
    back_compat: bool = False,
    **more: Any,
) -> Any:
    """Load an object that `save` saved. `back_compat`: partial files are named by mp_rank alone, as the oldest releases did.

    `map_location`: as for torch.load. If partial files exist with and without the rdp_rank, `shard_optimizer_state` selects the former,
    otherwise the latter are loaded. Only tensors and plain values are loaded, so `pickle_module` and `pickle_load_args` (`more` as
    well) have no effect, but for `mmap`, which is torch.load's. For files of `save_checkpoint`, see `smpc.v1.saving.serialization`.
    Raises CheckpointError, naming the file, if it is missing, damaged or holds anything else.
    """
    path = _checked(f)
    if pickle_load_args is not None and not isinstance(pickle_load_args, Mapping):
        raise ConfigTypeError(
            f"pickle_load_args: expected a dict or None, found {pickle_load_args!r}; `partial` comes after it, pass it by name: "
            "smp.load(f, partial=False)"
        )
    options = {**(pickle_load_args or {}), **more}
    mmap = options.pop("mmap", None)
    if not options.pop("weights_only", True):
        raise ConfigError("weights_only: expected True, found False; files are never unpickled as arbitrary objects")
    ignored = [*(["pickle_module"] if pickle_module not in (None, pickle) else []), *options]
    if ignored:
        warnings.warn(f"smp.load ignores {', '.join(ignored)}: only tensors and plain values are loaded", stacklevel=2)
    if partial and back_compat:
        path = f"{path}_{mp_rank()}"
    elif partial and not is_saved(path):
        names = [_partial_name(path, v3=is_it) for is_it in (False, True)]
        if state.cfg.shard_optimizer_state:
            names.reverse()  # every replica has saved its own; a file of all may be of another job
        path = next((name for name in names if os.path.isfile(name)), _partial_name(path, v3=False))
    if is_saved(path):
        return load_saved(path)
    return read_file(path, map_location=map_location, mmap=mmap)


def _partial_name(f: str, v3: bool) -> str:
    return f"{f}_{pp_rank()}_{tp_rank()}" + (f"_{rdp_rank()}" if v3 else "")


def _checked(f: Any) -> str:
    if not isinstance(f, (str, os.PathLike)):
        raise ConfigTypeError(f"f: expected the name of a file, found {type(f).__name__}; open files are not supported")
    return os.fspath(f)
