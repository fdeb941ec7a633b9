"""A tensor-parallel rank goes away while the other one waits for it in shared memory: both end in time, and the right one is named."""

import json
import os
import tempfile
from pathlib import Path

import forked_launch
import pytest
import server
import tensor_fault_script

from smpc.launch.job import Job

LIMIT = (
    60.0  # seconds after the fault, on a loaded machine; stalls are found after 3, and silent ranks get some to answer
)

SHOWN = {  # by the launcher, of rank {bad}
    "kill": ["rank {bad} was killed by signal 9 (SIGKILL)"],
    "raise": ["rank {bad} failed, which ended the other ranks", "ArithmeticError: bomb", "instruction 'F s0 m2'"],
    "sleep": [
        "rank {bad} stalled, nothing moved for 3 s: step 2, ",
        "instruction 'F s0 m2' (stage 0, microbatch 2), busy for ",
        "instruction 'F s0 m2' (stage 0, microbatch 2), exchanging for ",
        "in fire",
    ],
    "stop": [
        "rank {bad} stalled, nothing moved for 3 s: no answer",
        "instruction 'F s0 m2' (stage 0, microbatch 2), exchanging for ",
    ],
}


def drive(action, folder):
    """Run the job in a process that has imported torch."""
    temporary = folder / "tmp"
    temporary.mkdir()
    os.environ["TMPDIR"] = str(temporary)
    tempfile.tempdir = None
    job = Job(tensor_fault_script.__file__, (action, str(folder / "moment")), 4)
    status, shown, _, pids, ended = forked_launch.run(job, folder)
    (folder / "found.json").write_text(json.dumps({"status": status, "shown": shown, "ended": ended, "pids": pids}))


@pytest.mark.long
@pytest.mark.parametrize(
    "action", ["kill", "sleep", pytest.param("raise", marks=pytest.mark.slow), pytest.param("stop", marks=pytest.mark.slow)]
)  # fmt: skip
def test_the_rank_at_fault_is_named(tmp_path, action):
    context = server.context()
    before = sorted(path.name for path in Path("/dev/shm").iterdir())
    driver = context.Process(target=drive, args=(action, tmp_path))
    driver.start()
    driver.join(120)
    if driver.is_alive():
        driver.kill()
        driver.join()
    found = json.loads((tmp_path / "found.json").read_text())
    logs = [(tmp_path / f"{rank}.log").read_text() for rank in range(4)]
    text = "\n".join([found["shown"], *logs])
    assert (tmp_path / "moment").exists(), text
    bad, moment = (tmp_path / "moment").read_text().split()
    assert found["ended"] - float(moment) < LIMIT, text
    assert found["status"] == (137 if action == "kill" else 1), text
    for expected in SHOWN[action]:
        assert expected.format(bad=bad) in found["shown"], text
    left = [name for name in os.listdir("/dev/shm") if name not in before]
    assert not any(str(pid) in name for name in left for pid in found["pids"])
    assert not any(Path(f"/proc/{pid}").exists() for pid in found["pids"])
