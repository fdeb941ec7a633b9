"""Every test begins without variables of a launcher, and leaves no process group."""

import pytest
from torch import distributed


@pytest.fixture(autouse=True)
def no_group_is_left(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    yield
    if distributed.is_initialized():
        distributed.destroy_process_group()
