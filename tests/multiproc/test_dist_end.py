"""A process ends with status 0 although a thread of gloo still frees a tensor when the script is through."""

import collections
import os
import subprocess
import sys

import pytest

SCRIPT = r"""
import hashlib, os, sys, threading, warnings
import torch
from torch import distributed

BEGIN

warnings.simplefilter("ignore")
sys.setswitchinterval(1e-4)
main, begun = threading.get_native_id(), threading.Event()

class Marker:
    def __del__(self):
        if threading.get_native_id() != main:  # gloo's thread was the last one to let go of the tensor
            begun.set()
            say("begun")
            for _ in range(20):
                hashlib.pbkdf2_hmac("sha256", b"a", b"b", 200_000)  # without Python's lock
            say("freed")

def say(line):
    os.write(1, line.encode() + b"\n")  # at once, whichever thread speaks

while not begun.is_set():
    tensor = torch.ones(1 << 18)
    tensor.marker = Marker()
    work = distributed.all_reduce(tensor, async_op=True)
    del tensor
    work.wait()
    del work
group = distributed.group.WORLD  # as device meshes keep it
say("the end of the script")
"""
BEGINNINGS = {
    "dist": "from smpc import dist\ndist.initialize_dist('cpu')",
    "v1": "import smpc.v1 as smp\nsmp.init({})",
    "v2": "import smpc.v2 as tsm\ntsm.init({})",
}


@pytest.mark.long
@pytest.mark.matrix(1)
@pytest.mark.skipif(sys.platform != "linux", reason="the state of threads is read from /proc")
@pytest.mark.parametrize("name", BEGINNINGS)
def test_a_tensor_is_freed_at_the_end(tmp_path, name):
    (tmp_path / "script.py").write_text(SCRIPT.replace("BEGIN", BEGINNINGS[name]))
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = collections.Counter(done.stdout.splitlines())
    assert lines["the end of the script"] == 1
    assert lines["begun"] == lines["freed"] >= 1  # of a few tensors where several threads were slow
