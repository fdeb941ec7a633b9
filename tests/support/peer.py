"""The Trainer that `smpc.composer` is written after, in an environment of its own, with few of the packages that it asks for."""

import subprocess
import sys
import sysconfig

import pytest

LIMIT = 600
PACKAGES = (
    "mosaicml==0.32.1", "torchmetrics==1.7.4", "lightning-utilities==0.15.3", "torchvision==0.28.0", "coolname<3", "tabulate==0.9.0",
    "py-cpuinfo==9.0.0", "psutil", "pyyaml", "tqdm", "requests", "urllib3", "certifi", "charset-normalizer", "idna",
    "importlib-metadata==8.7.0", "zipp",
)  # fmt: skip


def install(folder):
    """The Python of a new environment in `folder`, which borrows torch from the one that runs the tests. Skips where it cannot be had."""
    _run([sys.executable, "-m", "venv", "--without-pip", str(folder / "env")])
    python = folder / "env" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--python", str(python)]
    found = _run([*pip, "install", "--no-deps", *PACKAGES], check=False)
    if found.returncode:
        pytest.skip(f"the peer cannot be installed here: {found.stderr[-300:]}")
    [own] = (folder / "env" / "lib").glob("*/site-packages")
    (own / "zz_borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def _run(command, check=True):
    found = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, cwd="/", check=False)
    assert not check or found.returncode == 0, found.stdout + found.stderr
    return found
