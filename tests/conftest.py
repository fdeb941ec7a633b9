"""Set before anything is imported: one thread per process, the modules of `support` importable, Hugging Face's notes about tiny
configurations kept out of the output.

Property tests draw the same examples in every run, so that a failure is somebody's change and not chance. With `SMPC_TEST_SEED=7`, or
pytest's own `--hypothesis-seed=7`, they draw other ones, by that seed: `make test-all` does so and prints it.
"""

import gc
import logging
import os
import sys
from pathlib import Path

import pytest
from hypothesis import core, settings

gc.disable()  # until all tests are collected: see `pytest_collection_finish`
os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # reductions then have one order, in workers too: bitwise comparisons are fair
sys.path.insert(0, str(Path(__file__).parent / "support"))
logging.getLogger("transformers").setLevel(logging.ERROR)

SEED = "SMPC_TEST_SEED"
settings.register_profile("fixed", deadline=None, derandomize=True, max_examples=20)  # a fifth: see support/drawn.py
settings.register_profile("random", deadline=None, derandomize=False, database=None)
settings.load_profile("fixed")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Chooses how examples are drawn, before tests are imported: their own settings add to these."""
    seed = os.environ.get(SEED, "")
    if seed and core.global_force_seed is None:
        try:
            core.global_force_seed = int(seed)
        except ValueError:
            raise pytest.UsageError(f"{SEED}: expected a whole number, found {seed!r}") from None
    if core.global_force_seed is not None:
        settings.load_profile("random")


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leaves a few cases of each large matrix to `make test`; see support/matrices.py. Slow tests have half an hour."""
    from matrices import mark_the_rest_slow

    mark_the_rest_slow(items)
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(1800))


def pytest_collection_finish() -> None:
    """Lets the garbage collector begin. Nothing is garbage before, and a third of that time was spent looking for it."""
    gc.enable()


def pytest_report_header() -> str:
    """Says how to draw the same examples again."""
    seed = core.global_force_seed
    return "examples: the same in every run" if seed is None else f"examples: {SEED}={seed} draws the same again"


LAUNCHED = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT", "SMPC_ALIAS",
)  # fmt: skip
ALIASED = ("smdistributed", "torch.sagemaker", "composer")


def _has_group() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


@pytest.fixture(autouse=True)
def _nothing_is_left_of_a_launch():
    """What a test sets as a launcher would, process groups, and names that it has given to other packages, are gone afterwards."""
    had_group = _has_group()
    variables = {name: os.environ.get(name) for name in LAUNCHED}
    modules, finders = set(sys.modules), list(sys.meta_path)
    yield
    if _has_group() and not had_group:
        sys.modules["torch.distributed"].destroy_process_group()
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    sys.meta_path[:] = finders
    for name in [name for name in sys.modules if name not in modules and name.startswith(ALIASED)]:
        del sys.modules[name]
