"""Scripts that run with the transformers that is installed run with other releases of it, too, in environments of their own."""

import pytest
import releases

SCRIPTS = "tests/scripts/test_scripts.py"


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("release", [release for release in releases.NEEDS if release < "5"])
def test_scripts_run_with_releases_before_5(release):
    printed = releases.run_tests(release, "-m", "not slow", SCRIPTS, "-k", "gpt2 or families")
    assert " passed" in printed
    assert "skipped" not in printed
