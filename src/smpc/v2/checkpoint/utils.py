"""Keeping the newest of several checkpoints. Source: public training scripts for SMP v2."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from typing import Any

from smpc.errors import UsageError

__all__ = ["SORT_BY_LAST_INT", "limit_num_subdirs"]


def SORT_BY_LAST_INT(name: str) -> int:
    """The last whole number in a name; -1 if there is none."""
    found = re.findall(r"\d+", name)
    return int(found[-1]) if found else -1


def limit_num_subdirs(
    dir: str | os.PathLike[str],
    num: int,
    sort_fn: Callable[[str], Any] = SORT_BY_LAST_INT,
    regex: str | None = None,
    log: Callable[[str], object] | bool | None = None,
) -> list[str]:
    """Removes all but the last `num` folders in `dir`, sorted by `sort_fn` of their names; the names of those that are removed.

    `regex`: only names that match it count. Links are left alone. `log` is told of each; True prints. One rank calls this.
    """
    if isinstance(num, bool) or not isinstance(num, int) or num < 1:
        raise UsageError(f"num: expected a number of folders of at least 1, found {num!r}")
    pattern = re.compile(regex or "")
    names = [
        entry.name for entry in os.scandir(dir) if entry.is_dir(follow_symlinks=False) and pattern.search(entry.name)
    ]
    removed = sorted(names, key=lambda name: (sort_fn(name), name))[:-num]
    for name in removed:
        shutil.rmtree(os.path.join(dir, name))
        if log:
            (print if log is True else log)(f"removed {os.path.join(dir, name)}")
    return removed
