"""`smpc calibrate` on two gloo processes: what they send each other is in the file, and plans are made with it."""

from __future__ import annotations

import os
import sys

import pytest
import warm

from smpc.partitioner.costs.device_file import find_device

SMPC = [sys.executable, "-P", "-c", "import sys; from smpc.cli import main; sys.exit(main())"]


@pytest.mark.parametrize("way", ["ranks", pytest.param("job", marks=pytest.mark.slow)])
def test_two_ranks_measure_at_once(tmp_path, way):
    path = tmp_path / "here.toml"
    arguments = ["calibrate", "--out", str(path), "--seconds", "5"]
    commands = {"ranks": [*arguments, "--ranks", "2"], "job": ["run", "-n", "2", "-c", *SMPC, *arguments]}
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    found = warm.run(*commands[way], timeout=280, env=environment)
    assert found.returncode == 0, found.stdout + found.stderr
    assert found.stdout.count("predict times for this machine with --device") == 1
    device = find_device(str(path))
    assert device.devices_per_host == 2
    assert device.inside_host.bandwidth > 1e6
    assert {"all-reduce", "all-gather", "reduce-scatter", "in-operations"} <= set(device.collectives)
    assert "2 processes at once" in device.source
