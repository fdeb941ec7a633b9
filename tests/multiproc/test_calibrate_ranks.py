"""`smpc calibrate` on two gloo processes: what they send each other is in the file, and plans are made with it."""

from __future__ import annotations

import os
import sys

import pytest
import warm

from smpc.calibration import communication, operations, probes, programs
from smpc.cli import calibrate, main
from smpc.partitioner.costs.device_file import find_device

# `test_calibration.py` measures sizes of all kinds, in one process.
FEWER = (
    (calibrate, "_SECONDS", (1.0, 5.0)),
    (probes, "_WIDTHS", (64,)), (probes, "_CHANNELS", (8,)), (operations, "_MOST", 3), (programs, "_ROUNDS", 2),
    (communication, "_SIZES", (1 << 10, 1 << 14)), (communication, "_ROUNDS", 3),
)  # fmt: skip
SMPC = [sys.executable, "-P", "-c", "import sys; from smpc.cli import main; sys.exit(main())"]


def measuring_little(arguments):
    """The command, which measures few and small sizes; so do its ranks, which are forked from it."""
    for module, name, value in FEWER:
        assert hasattr(module, name), name
        setattr(module, name, value)
    return main(list(arguments))


@pytest.mark.long
@pytest.mark.parametrize("way", ["ranks", pytest.param("job", marks=pytest.mark.slow)])
def test_two_ranks_measure_at_once(tmp_path, way):
    path = tmp_path / "here.toml"
    arguments = ["calibrate", "--out", str(path), "--seconds", "1" if way == "ranks" else "5"]
    commands = {"ranks": [*arguments, "--ranks", "2"], "job": ["run", "-n", "2", "-c", *SMPC, *arguments]}
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    found = warm.run(*commands[way], timeout=280, env=environment, main=measuring_little if way == "ranks" else None)
    assert found.returncode == 0, found.stdout + found.stderr
    assert found.stdout.count("predict times for this machine with --device") == 1
    device = find_device(str(path))
    assert device.devices_per_host == 2
    assert device.inside_host.bandwidth > 1e6
    assert {"all-reduce", "all-gather", "reduce-scatter", "in-operations", "in-operations-moves"} <= set(
        device.collectives
    )
    assert "2 processes at once" in device.source
