"""One server has imported what the processes of the tests in this folder need, and all of them are forked from it."""

import multiprocessing
import multiprocessing.forkserver

import pytest

_IMPORTED = (
    "numpy",
    "pytest",
    "smpc.v1",
    "smpc.checkpoint",
    "smpc.compile",
    "transformers.models.bert.modeling_bert",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "transformers.models.t5.modeling_t5",
)


@pytest.fixture(scope="session", autouse=True)
def server():
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(_IMPORTED))
    multiprocessing.forkserver.ensure_running()
