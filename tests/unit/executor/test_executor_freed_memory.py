"""`smpc.executor.host_memory.freed_memory`, in a process of its own: what is freed and taken again costs no new pages."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import warm

from smpc.executor.host_memory.freed_memory import _VARIABLES, keep_freed_memory

_FAULTS = """
import resource, torch
import smpc.v1 as smp

smp.init({})

def work():
    held = [torch.ones(1 << 20) for _ in range(32)]  # of 4 MiB each: more than glibc ever keeps at the end of its heap
    del held

for _ in range(3):
    work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
work()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
smp.shutdown()
"""


def faults(folder: Path, **variables: str) -> int:
    environment = {name: value for name, value in os.environ.items() if name not in _VARIABLES}
    (folder / "faults.py").write_text(_FAULTS)
    found = warm.python(folder / "faults.py", timeout=120, env={**environment, **variables})
    assert found.returncode == 0, found.stderr
    return int(found.stdout.split()[-1])


def test_a_rank_on_a_cpu_keeps_what_it_has_freed(tmp_path):
    """The kernel filled each page with zeros again in each microbatch: a fifth of a U-Net's step."""
    assert faults(tmp_path) < 100


def test_the_environment_decides_otherwise(tmp_path):
    """Of glibc's own freed pages a few MiB at the end of its heap stay."""
    pages = 32 * (4 << 20) // os.sysconf("SC_PAGE_SIZE")
    assert faults(tmp_path, MALLOC_TRIM_THRESHOLD_="131072", MALLOC_MMAP_THRESHOLD_="131072") == pytest.approx(
        pages, rel=0.1
    )


@pytest.mark.parametrize(
    "error",
    [OSError(errno.EINVAL, "Invalid argument"), ValueError("unrecognized configuration name")],
    ids=["musl", "macos"],
)
def test_nothing_happens_with_another_c_library(monkeypatch, error):
    asked, loaded = [], []

    def confstr(name):
        asked.append(name)
        raise error

    for name in _VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "confstr", confstr)
    monkeypatch.setattr("ctypes.CDLL", loaded.append)
    keep_freed_memory()
    assert asked, "the library is known by what it says of itself"
    assert not loaded, "it has another malloc"
