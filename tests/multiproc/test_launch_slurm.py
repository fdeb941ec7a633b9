"""`examples/slurm.sh` as sbatch would run it, with an srun that starts the launchers of two nodes on this host."""

import json
import os
import subprocess
import sys

import pytest
from locations import REPOSITORY

LIMIT = 240
SRUN = r"""#!/bin/bash
test "$1" = --kill-on-bad-exit=1 || exit 64
shift
for node in 0 1; do
    SLURM_STEP_ID=0 SLURM_PROCID=$node SLURM_NTASKS=2 SLURM_STEP_NUM_TASKS=2 SLURM_LOCALID=0 SLURM_NODEID=$node \
        SLURM_STEP_TASKS_PER_NODE='1(x2)' SLURM_STEP_NODELIST=localhost "$@" &
    tasks+=($!)
done
for task in "${tasks[@]}"; do wait "$task" || status=$?; done
exit "${status:-0}"
"""
TRAIN = """
import json, os, sys
import torch
from torch import distributed
from smpc import dist

dist.initialize_dist("cpu", timeout=120.0)
total = torch.tensor(dist.get_global_rank() + 1)
dist.all_reduce(total)
print(json.dumps([dist.get_global_rank(), dist.get_node_rank(), dist.get_world_size(), total.item(), sys.argv[1:]]), flush=True)
"""


@pytest.mark.slow
def test_the_example_runs_on_two_nodes(tmp_path):
    programs = tmp_path / "bin"
    programs.mkdir()
    start = "import sys; from smpc.cli import main; sys.exit(main())"
    for name, text in (("srun", SRUN), ("smpc", f'#!/bin/bash\nexec {sys.executable} -c "{start}" "$@"\n')):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    (tmp_path / "train.py").write_text(TRAIN)
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "SLURM_JOB_ID": str(os.getpid())}
    environment |= {"LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    command = ["bash", str(REPOSITORY / "examples" / "slurm.sh"), "train.py", "--epochs", "3"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert done.returncode == 0, done.stderr
    logs = tmp_path / "logs" / str(os.getpid())
    found = [json.loads((logs / f"{rank}.out").read_text()) for rank in range(4)]
    assert found == [[rank, rank // 2, 4, 10, ["--epochs", "3"]] for rank in range(4)]
    assert sorted(path.name for path in logs.glob("*.err")) == [f"{rank}.err" for rank in range(4)]
