"""Where the folders of the repository are, for tests."""

from pathlib import Path

TESTS = Path(__file__).parents[1]
REPOSITORY = TESTS.parent
GOLDEN = TESTS / "golden"
SUPPORT = TESTS / "support"
