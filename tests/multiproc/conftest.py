"""The server runs before any test of this folder: also what torch starts with the method "forkserver" comes from it."""

import pytest
import server


@pytest.fixture(scope="session", autouse=True)
def _server():
    server.context()
