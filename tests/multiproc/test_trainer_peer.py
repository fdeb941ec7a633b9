"""Beside the Trainer that ours is written after: the same bits as it, and as torch's own loops; and each other's checkpoints."""

import os
import subprocess

import pytest
from locations import REPOSITORY
from support import peer


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    return peer.install(tmp_path_factory.mktemp("peer"))


def _run(folder, *command):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY / "src")}
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=800, check=False, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_peers_bits(tmp_path, python):
    """Replicas and FSDP2, six steps of AdamW."""
    script = str(REPOSITORY / "benchmarks" / "trainer.py")
    found = _run(tmp_path, python, "-P", script, "--peer", "--rounds", "2", "--batches", "3", "--width", "32")
    lines = [line for line in found if "ratio" in line]
    found = [(line.split(":")[0], line.split(", ")[1].split()[0], line.split()[-1]) for line in lines]
    assert found == [(name, who, "True") for name in ("replicas", "fsdp") for who in ("torch", "peer")]


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_each_others_checkpoints(tmp_path, python):
    """Ours goes on from the peer's, with its optimizer, as the peer does; the peer takes our weights."""
    launcher = ("-P", "-c", "import sys; from smpc.cli import main; sys.exit(main())", "run", "-n", "2")
    found = _run(tmp_path, python, *launcher, str(REPOSITORY / "tests" / "support" / "peer_files.py"), str(tmp_path))
    lines = [line.removeprefix("[rank 0] ") for line in found if line.endswith((": True", ": False"))]
    assert lines == [
        f"{kind}: {what}: True"
        for kind in ("whole", "sharded")
        for what in ("ours has what the peer saved", "both go on alike", "the peer has the weights that ours saved")
    ]
