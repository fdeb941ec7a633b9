"""smpc as a user has it: a wheel, installed into an environment of its own."""

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parents[2]
_LEFT_OUT = shutil.ignore_patterns(
    ".git", ".venv", "build", "*.egg-info", ".*_cache", "__pycache__", "tests", "docs", ".hypothesis"
)
LIMIT = 300


def install(folder):
    """The Python of a new environment in `folder`, which has smpc, and borrows what smpc needs from the one that runs the tests."""
    shutil.copytree(ROOT, folder / "source", ignore=_LEFT_OUT, symlinks=True)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    alone = ["--no-deps", "--no-build-isolation", "--no-index"]
    _run([*pip, "wheel", *alone, "--wheel-dir", str(folder), str(folder / "source")])
    _run([sys.executable, "-m", "venv", "--without-pip", str(folder / "env")])
    python = folder / "env" / "bin" / "python"
    [wheel] = folder.glob("*.whl")
    _run([*pip, "--python", str(python), "install", *alone, str(wheel)])
    paths = "".join(f"{sysconfig.get_path(name)}\n" for name in ("purelib", "platlib"))
    [own] = (folder / "env" / "lib").glob("*/site-packages")
    (own / "zz_borrowed.pth").write_text(paths)
    return python


def _run(command):
    found = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, cwd="/")
    assert found.returncode == 0, found.stdout + found.stderr
