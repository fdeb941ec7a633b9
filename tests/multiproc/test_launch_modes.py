"""`smpc run` for real: programs without Python, restarts, expanded arguments, what is logged and what is hidden."""

import json
import os
import re

import warm

LIMIT = 300  # seconds; a hang fails the test


def _run(*arguments, **changes):
    return warm.run("run", *arguments, timeout=LIMIT, env={**os.environ, **changes})


def test_a_program_without_python(monkeypatch):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    program = "echo $0 of $1; echo ${PYTHONUNBUFFERED:-buffered}"
    done = _run("-n", "2", "-c", "--expand-args", "-v", "--console", "all", "sh", "-c", program, "$RANK", "$WORLD_SIZE")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[rank 0] 0 of 2", "[rank 0] 1", "[rank 1] 1", "[rank 1] 1 of 2"]
    starts = re.findall(
        r"smpc: rank (\d) of 2 \(local rank (\d) of 2, node 0\) is process \d+: sh -c '.*' (\d) 2",
        done.stderr,
    )
    assert starts == [("0", "0", "0"), ("1", "1", "1")]
    assert sorted(re.findall(r"smpc: rank (\d) \(process \d+\) ended with status 0", done.stderr)) == ["0", "1"]


def test_the_status_of_a_program_that_fails():
    done = _run("-n", "2", "--command_mode", "sh", "-c", "test $RANK = 0 || { echo lost; exit 7; }; sleep 60")
    assert done.returncode == 7
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        "smpc: stdout of rank 1:",
        "lost",
        "smpc: error: rank 1 exited with status 7, which ended the other ranks",
    ]


def test_all_ranks_start_again(tmp_path):
    """Each attempt has a store of its own: a rank that meets the others in the second one does not see the first one's keys."""
    script = tmp_path / "train.py"
    script.write_text(
        "import json, os, sys, torch\n"
        "from torch import distributed\n"
        "attempt, rank = os.environ['TORCHELASTIC_RESTART_COUNT'], os.environ['RANK']\n"
        "distributed.init_process_group('gloo')\n"
        "total = torch.tensor([float(rank) + 1])\n"
        "distributed.all_reduce(total)\n"
        "json.dump(total.item(), open(f'{sys.argv[1]}/{attempt}.{rank}', 'w'))\n"
        "distributed.barrier()\n"
        "if attempt == '0' and rank == '1':\n"
        "    raise RuntimeError('the first time')\n"
        "distributed.barrier()\n"
        "distributed.destroy_process_group()\n"
    )
    done = _run("-n", "2", "--max-restarts", "3", str(script), str(tmp_path))
    assert done.returncode == 0, done.stderr
    found = {path.name: json.loads(path.read_text()) for path in tmp_path.glob("?.?")}
    assert found == {"0.0": 3.0, "0.1": 3.0, "1.0": 3.0, "1.1": 3.0}
    assert "RuntimeError: the first time" in done.stderr
    assert done.stderr.splitlines().count("smpc: restart 1 of 3: all ranks start again") == 1
    assert "restart 2" not in done.stderr


def test_restarts_end(tmp_path):
    """The last failure's status; a user's mistake is not tried again."""
    script = tmp_path / "train.py"
    script.write_text("import sys; open(sys.argv[1], 'a').write('x'); sys.exit(int(sys.argv[2]))")
    for status, tries in ((3, 3), (2, 1)):
        log = tmp_path / f"log{status}"
        assert _run("--max-restarts", "2", str(script), str(log), str(status)).returncode == status
        assert log.read_text() == "x" * tries


def test_a_failed_rank_shows_what_was_hidden(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import os\nprint('hello from', os.environ['RANK'], flush=True)\nif os.environ['RANK'] == '1': raise ValueError('lost')\n"
        "import time; time.sleep(60)\n"
    )
    done = _run("-n", "2", str(script))
    assert done.returncode == 1
    assert done.stdout == "[rank 0] hello from 0\n"
    assert done.stderr.startswith("smpc: stdout of rank 1:\nhello from 1\nsmpc: error: rank 1 failed")
    assert done.stderr.rstrip().endswith("ValueError: lost")
