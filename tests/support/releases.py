"""Releases of transformers beside the one that is installed, each in a folder that goes before it on the path; torch stays what it is.

The folders are made by pip, once, under SMPC_TEST_CACHE, or ~/.cache/smpc-tests.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HTTP = ("requests", "urllib3", "idna", "certifi", "charset_normalizer")
# What each needs that current releases do not need, or need newer; accelerate and peft and what they import for the Trainer of 4.30.
NEEDS = {
    "4.30.2": (
        "tokenizers==0.13.3",
        "huggingface_hub==0.25.2",
        *HTTP,
        "accelerate==0.20.3",
        "peft==0.4.0",
        "psutil",
        "setuptools<81",
    ),
    "4.57.6": ("tokenizers==0.22.2", "huggingface_hub==0.36.2", *HTTP),
    "5.23.0": (),
}
LIMIT = 600


def folder_of(release):
    """The folder with a release of transformers, made where it is not there yet."""
    cache = Path(os.environ.get("SMPC_TEST_CACHE") or Path.home() / ".cache" / "smpc-tests")
    found = cache / f"transformers-{release}"
    if found.is_dir():
        return found
    cache.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(dir=cache))
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "install", "--no-deps"]
    command = [*pip, "--target", str(draft), f"transformers=={release}", *NEEDS[release]]
    made = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert made.returncode == 0, made.stdout + made.stderr
    try:
        draft.rename(found)
    except OSError:  # another process was faster
        shutil.rmtree(draft)
    return found


def environment(release):
    """Environment variables of a process that imports this release."""
    before = [str(folder_of(release)), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, before))}


def run_tests(release, *arguments):
    """Runs pytest with a release of transformers, whose own warnings are no errors; what it printed."""
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "filterwarnings=default"]
    root = Path(__file__).parents[2]
    found = subprocess.run(
        [*command, *arguments], capture_output=True, text=True, check=False, cwd=root, env=environment(release)
    )
    assert found.returncode == 0, found.stdout[-6000:] + found.stderr[-2000:]
    return found.stdout
