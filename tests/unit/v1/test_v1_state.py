"""Process-wide state is read by what users call, and passed to everything else."""

import ast
from pathlib import Path

import smpc.v1

PACKAGE = Path(smpc.v1.__file__).parent
# Functions for users are beside their helpers: `smp.step`, `smp.tp_register` and the like.
DOORS = {"steps/step.py": "StepFunction", "layout/tensor_parallel.py": "tp_register tp_register_with_module"}


def readers(path: Path) -> set[str]:
    """The functions and classes of a file that name `state`, which the file has imported."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    if not any(alias.name == "state" for node in imports for alias in node.names):
        return set()
    named = {part: [n.id for n in ast.walk(part) if isinstance(n, ast.Name)] for part in tree.body}
    return {part.name for part, names in named.items() if "state" in names and hasattr(part, "name")}


def test_nothing_in_a_step_reads_process_wide_state():
    files = [path for folder in ("steps", "layout", "state_dicts") for path in sorted((PACKAGE / folder).rglob("*.py"))]
    found = {path.relative_to(PACKAGE).as_posix(): readers(path) for path in files}
    assert len(found) > 15
    assert {name: names for name, names in found.items() if names} == {
        name: set(doors.split()) for name, doors in DOORS.items()
    }
