"""Public names, signatures and command-line options are held: nothing that a user imports or types changes unnoticed."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import public_names
import pytest
import warm

REMEDY = "if the change is meant: python tests/support/public_names.py --record"


def test_names_and_signatures_are_those_recorded():
    recorded, found = public_names.GOLDEN.read_text(encoding="utf-8"), public_names.describe()
    assert public_names.parts(found)[1] == public_names.parts(recorded)[1], REMEDY


def test_commands_and_options_are_those_recorded():
    recorded = public_names.GOLDEN.read_text(encoding="utf-8")
    version = importlib.metadata.version("typer")
    if f"typer {version} " not in public_names.parts(recorded)[0]:
        pytest.skip(f"recorded with another typer than {version}, which describes its options in its own way")
    assert public_names.parts(public_names.describe())[2] == public_names.parts(recorded)[2], REMEDY


def test_modules_with_the_same_text_of_an_annotation_give_the_same_line():
    assert public_names.short("dict[smpc.a.b.Key, nn.Module] | None") == "dict[Key, Module] | None"
    assert public_names.short(dict[str, Path]) == "dict[str, Path]"


OFFERED = """
import importlib, pkgutil, smpc

offered, missing = 0, []
for found in pkgutil.walk_packages(smpc.__path__, "smpc."):
    try:
        module = importlib.import_module(found.name)
    except ImportError as error:  # of a library that an extra brings
        missing += [found.name] if (error.name or "").startswith("smpc") else []
        continue
    for name in getattr(module, "__all__", ()):
        offered += 1
        missing += [] if hasattr(module, name) else [f"{found.name}.{name}"]
print(offered, missing)
"""


def test_every_name_that_a_module_offers_is_there(tmp_path):
    """In a process of its own, which imports everything."""
    (tmp_path / "offered.py").write_text(OFFERED)
    run = warm.python(tmp_path / "offered.py", timeout=300)
    assert run.returncode == 0, run.stderr
    offered, _, missing = run.stdout.strip().splitlines()[-1].partition(" ")
    assert int(offered) > 400
    assert missing == "[]"


def test_the_folder_of_kernels_is_no_package_of_that_name():
    """transformers imports a package `kernels` where it finds one: in the root of the repository, the folder of smpc's."""
    root = Path(__file__).parents[2]
    lines = "import transformers.utils as utils; print(utils.is_kernels_available()); from kernels import attention"
    run = subprocess.run([sys.executable, "-c", lines], cwd=root, capture_output=True, text=True, timeout=120)
    assert run.stdout.strip() == "False"
    assert run.stderr.strip().endswith(
        "import smpc.kernels, not kernels: the folders at the top of the repository are parts of smpc"
    )
