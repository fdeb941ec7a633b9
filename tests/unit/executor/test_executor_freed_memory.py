"""`smpc.executor.host_memory.freed_memory`, in a Python of its own, as glibc reads its variables when a process starts."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from smpc.executor.host_memory.freed_memory import _VARIABLES, keep_freed_memory

_FREED = 32 * (4 << 20)
_WORK = """
import os, resource, torch
import smpc.v1 as smp

smp.init({})

def resident():
    with open("/proc/self/statm") as pages:
        return int(pages.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def work():
    held = [torch.ones(1 << 20) for _ in range(32)]  # of 4 MiB each: more than glibc ever keeps at the end of its heap
    del held

before = resident()
for _ in range(3):
    work()
faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
work()
print(resident() - before, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults)
smp.shutdown()
"""


def kept_and_faults(folder: Path, **variables: str) -> tuple[int, int]:
    """Bytes that stay with the process when all is freed, and the pages that it asks for when it works again."""
    environment = {name: value for name, value in os.environ.items() if name not in _VARIABLES}
    (folder / "work.py").write_text(_WORK)
    command = [sys.executable, str(folder / "work.py")]
    found = subprocess.run(command, env={**environment, **variables}, capture_output=True, text=True, timeout=240)
    assert found.returncode == 0, found.stderr
    kept, faults = found.stdout.split()[-2:]
    return int(kept), int(faults)


@pytest.mark.long
def test_a_rank_on_a_cpu_keeps_what_it_has_freed(tmp_path):
    """The kernel filled each page with zeros again in each microbatch: a fifth of a U-Net's step."""
    kept, faults = kept_and_faults(tmp_path)
    assert kept > 0.9 * _FREED
    assert faults < 100


@pytest.mark.long
def test_the_environment_decides_otherwise(tmp_path):
    """Of glibc's own freed pages a few MiB at the end of its heap stay. Faults are not counted: huge pages need few."""
    kept, _ = kept_and_faults(tmp_path, MALLOC_TRIM_THRESHOLD_="131072", MALLOC_MMAP_THRESHOLD_="131072")
    assert kept < 0.1 * _FREED


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
