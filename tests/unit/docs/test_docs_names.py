"""Files and modules that the design and the product's own explanations name, against those that there are."""

import re
from pathlib import Path

import pytest

import smpc

PRODUCT = Path(smpc.__file__).parent
REPOSITORY = PRODUCT.parents[1]
FOLDERS = (PRODUCT, *(entry for entry in PRODUCT.iterdir() if entry.is_symlink()))
FILES = {path.relative_to(PRODUCT).as_posix(): path for folder in FOLDERS for path in folder.rglob("*.py")}
OWN_NAMES = {*smpc.__all__, "json"}  # and `smpc.json`, a file of a checkpoint


def is_there(module):
    """A module, or something in one."""
    parts = module.split(".")[1:]
    heads = ("/".join(parts[:number]) for number in (len(parts), len(parts) - 1) if number)
    return parts[0] in OWN_NAMES or any(f"{head}{end}" in FILES for head in heads for end in (".py", "/__init__.py"))


def test_the_files_of_the_architecture():
    text = (REPOSITORY / "docs/design/architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"(?<![\w>/])[\w/]+\.py\b", text))
    assert len(named) > 30
    assert not [name for name in sorted(named) if not any(f"/{path}".endswith(f"/{name}") for path in FILES)]


@pytest.mark.parametrize("folder", FOLDERS, ids=[folder.name for folder in FOLDERS])
def test_modules_that_explanations_name(folder):
    """Of docstrings and comments: a file that was renamed left its old name in others."""
    own = {name: path for name, path in FILES.items() if path.is_relative_to(folder)}
    missing = [
        f"{name}: {module}"
        for name, path in sorted(own.items())
        for module in sorted(set(re.findall(r"`(smpc(?:\.\w+)+)`", path.read_text(encoding="utf-8"))))
        if not is_there(module)
    ]
    assert not missing, "\n".join(missing)
