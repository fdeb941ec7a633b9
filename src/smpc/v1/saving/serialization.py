"""`smp.save` and `smp.load`: one file, or one file for every rank of a replica.

    smp.save(obj, "model.pt")                      model.pt_0_0 on pp_rank 0 and tp_rank 0, model.pt_1_0 on pp_rank 1, ...
    smp.save(obj, "model.pt", v3=True)             model.pt_0_0_0, ...: with the rdp_rank
    smp.save(obj, "model.pt", partial=False)       model.pt

Call `smp.save` on one of the replicas (`smp.dp_rank() == 0`), `smp.load` on every rank. Files are written whole or not at all, and loading
never runs code: see `smpc.checkpoint.files`.

Source: public SMP v1 API ("APIs for Saving and Loading").
"""

from __future__ import annotations

import os
import pickle
import warnings
from typing import Any

from smpc.checkpoint import read_file, write_file
from smpc.errors import ConfigError, ConfigTypeError
from smpc.v1.session.ranks import mp_rank, pp_rank, rdp_rank, tp_rank


def save(
    obj: Any,
    f: str,
    partial: bool = True,
    pickle_module: Any = pickle,
    pickle_protocol: int = 2,
    v3: bool = False,
) -> None:
    """Save an object. `f`: the name of a file, to which `partial` adds this process's ranks (and `v3` the rdp_rank).

    Raises CheckpointError, naming the file, if it cannot be written; an older one then stays.
    """
    write_file(
        obj,
        _partial_name(_checked(f), v3) if partial else _checked(f),
        pickle_module=pickle_module,
        pickle_protocol=pickle_protocol,
    )


def load(
    f: str,
    map_location: Any = None,
    pickle_module: Any = None,
    partial: bool = True,
    back_compat: bool = False,
    **pickle_load_args: Any,
) -> Any:
    """Load an object that `save` saved. `back_compat`: partial files are named by mp_rank alone, as the oldest releases did.

    Only tensors and plain values are loaded, so `pickle_module` and `pickle_load_args` have no effect; `mmap` is torch.load's.
    Raises CheckpointError, naming the file, if it is missing, damaged or holds anything else.
    """
    path = _checked(f)
    mmap = pickle_load_args.pop("mmap", None)
    if not pickle_load_args.pop("weights_only", True):
        raise ConfigError("weights_only: expected True, found False; files are never unpickled as arbitrary objects")
    ignored = [*(["pickle_module"] if pickle_module not in (None, pickle) else []), *pickle_load_args]
    if ignored:
        warnings.warn(f"smp.load ignores {', '.join(ignored)}: only tensors and plain values are loaded", stacklevel=2)
    if partial and back_compat:
        path = f"{path}_{mp_rank()}"
    elif partial:
        name, with_rdp = _partial_name(path, v3=False), _partial_name(path, v3=True)
        path = with_rdp if os.path.isfile(with_rdp) and not os.path.isfile(name) else name
    return read_file(path, map_location=map_location, mmap=mmap)


def _partial_name(f: str, v3: bool) -> str:
    return f"{f}_{pp_rank()}_{tp_rank()}" + (f"_{rdp_rank()}" if v3 else "")


def _checked(f: Any) -> str:
    if not isinstance(f, (str, os.PathLike)):
        raise ConfigTypeError(f"f: expected the name of a file, found {type(f).__name__}; open files are not supported")
    return os.fspath(f)
