"""Tests of kernels in Triton's interpreter, which has to be switched on before a kernel is imported, for a whole process.

`pytest` collects nothing here without TRITON_INTERPRET=1; tests/unit/kernels/test_kernels_interpreter.py runs this folder in a process
of its own with it set, so that `make test` includes it. By hand: `TRITON_INTERPRET=1 pytest tests/kernels`.
"""

import pytest
import torch

from smpc.kernels.launch.backend import interpreting

collect_ignore_glob = [] if interpreting() else ["test_*.py"]


@pytest.fixture(autouse=True)
def numbers():
    """The same random numbers in every run."""
    torch.manual_seed(0)
