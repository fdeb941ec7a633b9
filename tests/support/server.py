"""The server from which the processes of tests are forked: one for all tests of a worker, with the modules of `preloaded.py` imported.

It is started in this folder. A server's path begins with the folder in which it is started: in the repository's own, `kernels/` would be
taken for Hugging Face's package of that name, transformers would not be imported, and `multiprocessing` would not say so.
"""

import contextlib
import multiprocessing
import multiprocessing.context
import multiprocessing.forkserver
from pathlib import Path


def context() -> multiprocessing.context.ForkServerContext:
    """The context whose processes come from the server, which runs from now on. They have the folder and the path of their parent."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(["preloaded"])
    with contextlib.chdir(Path(__file__).parent):
        multiprocessing.forkserver.ensure_running()
    return found
