"""What tests of the command share."""

import sys

import pytest


@pytest.fixture
def clean_imports(monkeypatch, tmp_path):
    """Targets change what can be imported and what has been: undo it."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]
