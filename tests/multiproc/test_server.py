"""The server of tests/support/server.py has imported what `preloaded.py` names.

`multiprocessing` goes on without a word if an import of the server's fails. Those of transformers failed once, and every rank of every test
imported what was missing: a fifth of the processor time of these tests.
"""

import sys

import checkpoint_harness


def missing(rank, channel):
    preloaded = sys.modules.get("preloaded")
    return ["preloaded"] if preloaded is None else [name for name in preloaded.MODULES if name not in sys.modules]


def test_ranks_find_all_modules_imported(tmp_path):
    [outcome] = checkpoint_harness.run_ranks(1, missing, tmp_path)
    assert (outcome.error, outcome.value) == (None, [])
