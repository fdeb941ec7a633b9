"""`make matrix`: a short choice of tests on every Python and torch that can be had here, each in an environment of its own.

    make matrix                                      Python 3.11 to 3.13, torch 2.11 to 2.14
    make matrix PYTHONS="3.13" TORCHES="2.12 2.13"

Environments are in build/matrix, and are kept. A Python that is not on the path, or a torch that pip does not find for it, is told, and
no failure. Everything but torch and what comes with it has the versions of constraints.txt. With pyenv, PYENV_VERSION puts several
Pythons on the path.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "matrix"
PYTHONS, TORCHES = "3.11 3.12 3.13", "2.11 2.12 2.13 2.14"
OF_TORCH = re.compile(r"(torch|triton|nvidia|cuda|sympy|networkx|filelock|fsspec|jinja2)", re.IGNORECASE)
TESTS = (
    "tests/unit/test_dist_alone.py",
    "tests/unit/mesh",
    "tests/unit/places",
    "tests/unit/test_runtime.py",
    "tests/unit/composer",
    "tests/behaviour/test_parity_schedules.py",
    "tests/multiproc/test_executor_gloo.py",
    "tests/multiproc/test_dist_functions.py",
    "tests/multiproc/test_v1_training.py",
)


def main():
    """Run them all; the exit status is 1 if one has failed."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    kept = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not OF_TORCH.match(line)]
    (FOLDER / "constraints.txt").write_text("\n".join(kept) + "\n")
    found = {}
    for python in os.environ.get("PYTHONS", PYTHONS).split():
        for torch in os.environ.get("TORCHES", TORCHES).split():
            found[python, torch] = _run(python, torch)
            print(f"Python {python}, torch {torch}: {found[python, torch]}", flush=True)
    print("\n".join(["", *(f"{python:>6} {torch:>6}  {says}" for (python, torch), says in found.items())]))
    return int(any(says.startswith("failed") for says in found.values()))


def _run(python, torch):
    program = shutil.which(f"python{python}")
    if program is None or subprocess.run([program, "-c", ""], capture_output=True, check=False).returncode:
        return "no Python"
    own = FOLDER / f"python{python}-torch{torch}"
    if not (own / "installed").exists():
        subprocess.run([program, "-m", "venv", "--clear", str(own)], check=True)
        pip = [str(own / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        made = subprocess.run([*pip, f"torch=={torch}.*"], capture_output=True, text=True, check=False)
        if made.returncode:
            return f"not there: {made.stderr.strip().splitlines()[-1]}"
        made = subprocess.run(
            [*pip, "--constraint", str(FOLDER / "constraints.txt"), f"torch=={torch}.*", "--editable", f"{ROOT}[test]"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if made.returncode:
            return f"failed to install: {made.stderr.strip().splitlines()[-1]}"
        (own / "installed").touch()
    command = [str(own / "bin" / "pytest"), "-q", "-m", "not slow", "-p", "no:cacheprovider", *TESTS]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    (own / "log.txt").write_text(done.stdout)
    last = done.stdout.strip().splitlines()[-1]
    return last if done.returncode == 0 else f"failed: {last} ({own / 'log.txt'})"


if __name__ == "__main__":
    sys.exit(main())
