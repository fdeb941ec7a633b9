"""`smpc run` for real: ranks that meet on loopback, failures, signals, and nothing left behind."""

import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import warm
from torch.distributed import TCPStore

SMPC = [sys.executable, "-c", "import sys; from smpc.cli import main; sys.exit(main())"]
LIMIT = 300  # seconds; a hang fails the test

ALL_REDUCE = """
import json, os, sys, torch
from torch import distributed
distributed.init_process_group("gloo")
rank = distributed.get_rank()
total = torch.tensor([float(rank + 1)])
distributed.all_reduce(total)
"""

# Every listening socket of this rank and of the launcher, its parent, as (kernel's hexadecimal address, owner).
LISTENERS = """
def inodes(pid):
    paths = [f"/proc/{pid}/fd/{fd}" for fd in os.listdir(f"/proc/{pid}/fd")]
    links = [os.readlink(path) for path in paths if os.path.islink(path)]
    return {link[8:-1] for link in links if link.startswith("socket:[")}
owners = {"rank": inodes(os.getpid()), "launcher": inodes(os.getppid())}
found = []
for table in ("/proc/net/tcp", "/proc/net/tcp6"):
    if os.path.exists(table):
        for fields in (line.split() for line in open(table).read().splitlines()[1:]):
            for owner, sockets in owners.items():
                if fields[3] == "0A" and fields[9] in sockets:
                    found.append((fields[1].rpartition(":")[0], owner))
"""

needs_proc = pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="needs /proc")


@pytest.fixture
def write(tmp_path):
    def write(text):
        path = tmp_path / "script.py"
        path.write_text(text)
        return str(path)

    return write


def _environment(**changes):
    """This process's environment without what would steer the ranks."""
    steering = ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    return {**{name: value for name, value in os.environ.items() if name not in steering}, **changes}


def _run(*arguments, environment=None):
    return warm.run("run", "--console", "all", *arguments, timeout=LIMIT, env=environment or _environment())


def _start(*arguments, **changes):
    return warm.Command("run", "--console", "all", *arguments, env=_environment(**changes))


def _run_cold(*arguments, environment=None):
    """In a Python of its own, as users do."""
    command = [*SMPC, "run", "--console", "all", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT, env=environment or _environment(), check=False
    )


def _start_cold(*arguments):
    command = [*SMPC, "run", "--console", "all", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=_environment())


def _await(job, files):
    """Wait for files that the ranks of a job write."""
    deadline = time.monotonic() + LIMIT
    while not all(file.exists() for file in files):
        assert job.poll() is None, job.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _ends_within(seconds, pids):
    """Whether all processes are gone by then (a zombie counts as gone: its parent is)."""
    deadline = time.monotonic() + seconds
    while any(map(_lives, pids)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _lives(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.long
@needs_proc
def test_ranks_meet_on_loopback_and_get_their_arguments(write, tmp_path):
    seen = "[total.item(), sys.argv[1:], os.environ['OMP_NUM_THREADS'], found]"
    report = f"json.dump({seen}, open(f'{{sys.argv[1]}}/{{rank}}', 'w'))"
    script = write(f"{ALL_REDUCE}{LISTENERS}\n{report}\ndistributed.barrier()\ndistributed.destroy_process_group()\n")
    arguments = [str(tmp_path), "--help", "-n", "7", "${local_rank}", "$$HOME;`id`", "a  b\nc"]
    done = _run_cold("-n", "2", script, *arguments)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    for rank in range(2):
        total, seen, threads, listeners = json.loads((tmp_path / str(rank)).read_text())
        assert (total, seen, threads) == (3.0, arguments, "1")
        assert {owner for _, owner in listeners} == {"rank", "launcher"}  # gloo's and the store's: the check sees them
        assert {address for address, _ in listeners} == {"0100007F"}


@pytest.mark.slow
def test_plain_torchrun_runs_the_same_script(write):
    script = write(f"{ALL_REDUCE}\nprint(total.item())\ndistributed.destroy_process_group()\n")
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--local-addr=127.0.0.1",
        "--nproc-per-node=1",
    ]
    done = subprocess.run(
        [*command, script], capture_output=True, text=True, timeout=LIMIT, env=_environment(), check=False
    )
    assert (done.returncode, done.stdout) == (0, "1.0\n")


# One system call: `print` makes two, and two ranks may get between each other's.
ONE_WRITE = "import os\nos.write(1, b'%d\\n' % int(total))\n"


@pytest.mark.long
@pytest.mark.matrix(1)
@pytest.mark.parametrize("is_safe", [False, True])
def test_the_path_is_that_of_python_itself(write, tmp_path, is_safe):
    """PYTHONSAFEPATH keeps the script's folder out of it; the launcher had taken the first of PYTHONPATH away for it."""
    script = write("import json, sys; print(json.dumps(sys.path))")
    given = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    given["PYTHONPATH"] = os.pathsep.join([str(tmp_path / "mine"), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = given | ({"PYTHONSAFEPATH": "1"} if is_safe else {})
    alone = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment, check=True)
    assert str(tmp_path / "mine") in json.loads(alone.stdout)[: 1 if is_safe else 2]
    done = _run_cold("-n", "1", "--no-prefix", script, environment=environment)
    assert done.stdout == alone.stdout, done.stderr


@pytest.mark.slow
def test_two_jobs_share_the_host(write):
    script = write(f"{ALL_REDUCE}\ndistributed.barrier()\ndistributed.destroy_process_group()\n{ONE_WRITE}")
    jobs = [_start("-n", "2", script) for _ in range(2)]
    for job in jobs:
        out, err = job.communicate(timeout=LIMIT)
        assert (job.returncode, sorted(out.splitlines()), err) == (0, ["[rank 0] 3", "[rank 1] 3"], "")


def test_exception_on_one_rank_ends_all_with_its_traceback(write):
    script = write(f"{ALL_REDUCE}\nif rank == 1:\n    raise ValueError('boom on rank 1')\ndistributed.barrier()\n")
    done = _run("-n", "2", script, environment=_environment(HUB_TOKEN="hunter2"))
    assert "hunter2" not in done.stderr + done.stdout
    lines = done.stderr.splitlines()
    assert done.returncode == 1
    assert lines[:2] == [
        "smpc: error: rank 1 failed, which ended the other ranks:",
        "Traceback (most recent call last):",
    ]
    assert lines[2].startswith(f'  File "{script}", line 10')
    assert "ValueError: boom on rank 1" in lines
    assert done.stderr.count("Traceback") == 1


@pytest.mark.matrix(1)
@pytest.mark.parametrize(
    ("death", "status", "says"),
    [
        ("sys.exit(42)", 42, "exited with status 42"),
        ("os._exit(43)", 43, "exited with status 43"),
        ("os.kill(os.getpid(), 9)", 137, "was killed by signal 9 (SIGKILL)"),
    ],
)
def test_status_is_that_of_the_first_rank_to_fail(write, death, status, says):
    script = write(f"import os, sys, time\nif os.environ['RANK'] == '1':\n    {death}\ntime.sleep(600)\n")
    done = _run("-n", "2", script)
    assert (done.returncode, done.stderr) == (status, f"smpc: error: rank 1 {says}, which ended the other ranks\n")


def test_users_mistake_in_the_script_is_told_once(write):
    script = write("from smpc.errors import ConfigError\nraise ConfigError('WORLD_SIZE: expected 4, found 2')\n")
    done = _run("-n", "2", script)
    assert (done.returncode, done.stderr) == (2, "smpc: error: WORLD_SIZE: expected 4, found 2\n")


@pytest.mark.matrix(1)
@needs_proc
@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_signal_to_the_launcher_leaves_nothing(write, tmp_path, sent):
    script = write(
        "import os, subprocess, sys, time\n"
        "path = f'{sys.argv[1]}/{os.environ[\"RANK\"]}'\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        "open(path + '.new', 'w').write(f'{os.getpid()} {child.pid}')\n"
        "os.rename(path + '.new', path)\n"
        "time.sleep(600)\n"
    )
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    job = _start("-n", "2", script, str(tmp_path), TMPDIR=str(temporary))
    files = [tmp_path / str(rank) for rank in range(2)]
    _await(job, files)
    ranks = [int(number) for file in files for number in file.read_text().split()]
    assert all(map(_lives, ranks))
    job.send_signal(sent)
    assert _ends_within(LIMIT, ranks)
    job.communicate(timeout=LIMIT)
    assert job.returncode == (-9 if sent == signal.SIGKILL else 128 + sent)
    assert not list(temporary.iterdir())


@pytest.mark.slow
@needs_proc
def test_a_failure_is_shown_though_the_user_is_impatient(write, tmp_path):
    """Ctrl-C, while the launcher waited for the others to end, used to lose what had failed."""
    script = write(
        "import os, signal, sys, time\n"
        "rank, folder = os.environ['RANK'], sys.argv[1]\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "open(f'{folder}/new{rank}', 'w').write(str(os.getpid()))\n"
        "os.rename(f'{folder}/new{rank}', f'{folder}/{rank}')\n"
        "while not os.path.exists(f'{folder}/1'):\n"
        "    time.sleep(0.01)\n"
        "sys.exit(3) if rank == '0' else time.sleep(600)\n"
    )
    job = _start("-n", "2", "--grace", "600", script, str(tmp_path))
    _await(job, [tmp_path / "0", tmp_path / "1"])
    assert _ends_within(LIMIT, [int((tmp_path / "0").read_text())])
    job.send_signal(signal.SIGINT)
    _, shown = job.communicate(timeout=LIMIT)
    assert "smpc: error: rank 0 exited with status 3, which ended the other ranks\n" in shown
    assert job.returncode == 3


@needs_proc
def test_failed_rank_leaves_no_children(write, tmp_path):
    script = write(
        "import subprocess, sys\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        "open(sys.argv[1] + '/child', 'w').write(str(child.pid))\n"
        "sys.exit(3)\n"
    )
    done = _run("-n", "1", script, str(tmp_path))
    assert done.returncode == 3
    assert _ends_within(LIMIT, [int((tmp_path / "child").read_text())])


def test_interface_that_the_user_chose_stays(write):
    script = write("import os\nprint(os.environ['GLOO_SOCKET_IFNAME'], os.environ['OMP_NUM_THREADS'])\n")
    done = _run("-n", "1", script, environment=_environment(GLOO_SOCKET_IFNAME="eth7", OMP_NUM_THREADS="3"))
    assert (done.returncode, done.stdout) == (0, "eth7 3\n")


@needs_proc
def test_ranks_that_ignore_the_signal_are_killed(write, tmp_path):
    script = write(
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "path = f'{sys.argv[1]}/pid'\n"
        "open(path + '.new', 'w').write(str(os.getpid()))\n"
        "os.rename(path + '.new', path)\n"
        "time.sleep(600)\n"
    )
    job = _start("-n", "1", "--grace", "0.2", script, str(tmp_path))
    _await(job, [tmp_path / "pid"])
    started = time.monotonic()
    job.terminate()
    assert _ends_within(LIMIT, [int((tmp_path / "pid").read_text())])
    assert time.monotonic() - started >= 0.2
    job.communicate(timeout=LIMIT)
    assert job.returncode == 143


def test_a_module_and_its_logs(tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "train.py").write_text(
        "import os, sys\n"
        "os.write(1, b'out of %s\\n\\xff' % os.environ['RANK'].encode())\n"
        "print(__name__, sys.argv[1:], file=sys.stderr)\n"
    )
    logs = tmp_path / "logs"
    options = [
        "--stdout",
        f"{logs}/{{rank}}of{{world_size}}.out",
        "--stderr",
        f"{logs}/{{node_rank}}-{{local_rank}}.err",
    ]
    arguments = ["run", "-n", "2", "--console", "first", *options, "-m", "package.train", "-m", "x"]
    done = warm.run(*arguments, timeout=LIMIT, env=_environment(), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "[rank 0] out of 0\n[rank 0] \\xff\n")
    assert done.stderr == "[rank 0] __main__ ['-m', 'x']\n"
    for rank in range(2):
        assert (logs / f"{rank}of2.out").read_bytes() == b"out of %d\n\xff" % rank
        assert (logs / f"0-{rank}.err").read_text() == "__main__ ['-m', 'x']\n"


NODE = """
import os, sys, torch
from torch import distributed
distributed.init_process_group("gloo")
total = torch.tensor([float(distributed.get_rank() + 1)])
distributed.all_reduce(total)
os.write(1, b"%d of %d, %s\\n" % (distributed.get_rank(), int(total), os.environ["LOCAL_RANK"].encode()))
distributed.barrier()
if "fail" in sys.argv and distributed.get_rank() == 2:
    os._exit(42)
distributed.barrier() if "fail" in sys.argv else distributed.destroy_process_group()
"""


@pytest.mark.matrix(1)
@pytest.mark.parametrize("fails", [False, True], ids=["success", "failure"])
def test_two_nodes(write, fails):
    """Two launchers on this host, with two ranks and one: what one of them learns, the other one says."""
    script = write(NODE)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    common = ["--world-size", "3", "--master-addr", "127.0.0.1", "--master-port", port]
    arguments = [script, "fail"] if fails else [script]
    first = _start("-n", "2", *common, "--node-rank", "0", *arguments)
    second = _start("-n", "1", *common, "--node-rank", "1", "--base-rank", "2", *arguments)
    (out, err), (more, others) = (job.communicate(timeout=LIMIT) for job in (first, second))
    assert sorted(out.splitlines()) == ["[rank 0] 0 of 6, 0", "[rank 1] 1 of 6, 1"], err
    assert more == "2 of 6, 0\n"
    assert (first.returncode, second.returncode) == ((42, 42) if fails else (0, 0)), err + others
    if fails:
        assert "on another node, rank 2 exited with status 42" in err
        assert "smpc: error: rank 2 exited with status 42, which ended the other ranks\n" in others


SLOW_TO_TELL = """
import os, signal
from torch import distributed
distributed.init_process_group("gloo")
distributed.barrier()
if distributed.get_rank() == 1:
    os.kill(os.getppid(), signal.SIGSTOP)
    os._exit(42)
distributed.barrier()
"""


@pytest.mark.slow
def test_a_node_that_only_lost_its_peer_waits_for_the_cause(write):
    """The launcher of the node at fault tells it when it can: after longer than the others wait for last words."""
    script = write(SLOW_TO_TELL)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    common = ["-n", "1", "--world-size", "3", "--master-addr", "127.0.0.1", "--master-port", port]
    jobs = [_start(*common, "--node-rank", str(node), "--base-rank", str(node), script) for node in range(3)]
    limit = time.monotonic() + LIMIT
    while Path(f"/proc/{jobs[1].pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        assert time.monotonic() < limit, "rank 1 has not stopped its launcher"
        time.sleep(0.1)
    time.sleep(6)
    jobs[1].send_signal(signal.SIGCONT)
    texts = [job.communicate(timeout=LIMIT)[1] for job in jobs]
    assert [job.returncode for job in jobs] == [42, 42, 42], texts
    for node in (0, 2):
        assert "on another node, rank 1 exited with status 42" in texts[node]


WAITS = """
import os, sys, time
if os.environ["RANK"] == "1":
    from torch.distributed import TCPStore
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    while store.add("smpc_run/nodes", 0) < 2:  # both launchers
        time.sleep(0.05)
path = f"{sys.argv[1]}/{os.environ['RANK']}"
open(path + ".new", "w").write(str(os.getpid()))
os.rename(path + ".new", path)
time.sleep(600 if os.environ["RANK"] == "1" else 0)
"""


@pytest.mark.long
def test_a_rank_of_another_node_that_fails_at_once(write):
    """Its launcher left before it had told anybody, for that takes an import of torch: the other node's ranks ran on until killed."""
    script = write("import os, time\nos._exit(42) if os.environ['RANK'] == '1' else time.sleep(600)\n")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    common = ["-n", "1", "--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", port]
    jobs = [_start_cold(*common, "--node-rank", node, script) for node in "01"]
    try:
        (_, told), (_, own) = (job.communicate(timeout=LIMIT) for job in jobs)
    finally:
        for job in jobs:
            job.terminate()
    assert [job.returncode for job in jobs] == [42, 42]
    assert "on another node, rank 1 exited with status 42" in told
    assert "smpc: error: rank 1 exited with status 42, which ended the other ranks\n" in own


@pytest.mark.slow
@needs_proc
def test_signal_to_a_node_whose_ranks_have_ended(write, tmp_path):
    """Its launcher used to end at once: its folder stayed, and the other node was told that the store was lost."""
    script, temporary = write(WAITS), tmp_path / "temporary"
    temporary.mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    common = ["-n", "1", "--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", port]
    jobs = [_start(*common, "--node-rank", node, script, str(tmp_path), TMPDIR=str(temporary)) for node in "01"]
    _await(jobs[0], [tmp_path / "0", tmp_path / "1"])
    assert _ends_within(LIMIT, [int((tmp_path / "0").read_text())])
    jobs[0].terminate()
    jobs[0].communicate(timeout=LIMIT)
    _, told = jobs[1].communicate(timeout=LIMIT)
    assert [job.returncode for job in jobs] == [143, 143]
    assert "on another node, node 0 was ended by signal 15" in told
    assert not list(temporary.iterdir())


JUNK = """
import os, sys, torch
import smpc.v1 as smp
smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
model = smp.DistributedModel(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)))

@smp.step
def evaluate(model, x):
    return model(x)

evaluate(model, torch.ones(2, 2))
if smp.rank() == 0:
    open(sys.argv[1] + ".new", "w").write(os.environ["MASTER_PORT"])
    os.rename(sys.argv[1] + ".new", sys.argv[1])
while True:
    evaluate(model, torch.ones(2, 2))
"""


class Canary:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_junk_in_the_store_runs_no_code_and_is_named(write, tmp_path):
    job = _start("-n", "2", write(JUNK), str(tmp_path / "port"))
    _await(job, [tmp_path / "port"])
    port = int((tmp_path / "port").read_text())
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(os.urandom(4096))
    payload = pickle.dumps(Canary(tmp_path / "canary"))
    store = TCPStore("127.0.0.1", port, is_master=False)
    for key in (
        "smpc_attempt_0/session1/smpc/stall/0",
        "smpc_attempt_0/session1/smpc/stall/0/0",
        "smpc_attempt_0/session1/smpc/process/0",
        "smpc_attempt_0/session1/smpc/left",
        "smpc_run/failure",
        "smpc_attempt_0/smpc/error",
    ):
        store.set(key, payload)
    _, err = job.communicate(timeout=LIMIT)
    assert job.returncode == 1
    assert "under the key 'smpc/error' that no rank of the job wrote: b'\\x80" in err
    assert "another process has written to the store's port" in err
    assert not (tmp_path / "canary").exists()


@needs_proc
def test_a_rank_that_ends_too_early_is_named(write, tmp_path):
    script = write(
        "import os, sys, time\n"
        "path = f'{sys.argv[1]}/pid'\n"
        "if os.environ['RANK'] == '1':\n"
        "    open(path + '.new', 'w').write(str(os.getpid()))\n"
        "    os.rename(path + '.new', path)\n"
        "    os._exit(0)\n"
        "while not os.path.exists(path) or os.path.exists('/proc/' + open(path).read()):\n"
        "    time.sleep(0.01)\n"
        "raise RuntimeError('Connection closed by peer')\n"
    )
    done = _run("-n", "2", script, str(tmp_path))
    assert done.returncode == 1
    assert "smpc: error: rank 1 ended with status 0 while rank 0 still needed its peers:" in done.stderr


@pytest.mark.slow
@needs_proc
def test_a_rank_whose_exit_handlers_take_long_is_named(write, tmp_path):
    """Its peer misses it while it is still there."""
    script = write(
        "import atexit, os, sys, time\n"
        "path = f'{sys.argv[1]}/gone'\n"
        "if os.environ['RANK'] == '1':\n"
        "    atexit.register(lambda: (open(path, 'w').close(), time.sleep(600)))\n"
        "    sys.exit(0)\n"
        "while not os.path.exists(path):\n"
        "    time.sleep(0.01)\n"
        "raise RuntimeError('Connection closed by peer')\n"
    )
    done = _run("-n", "2", script, str(tmp_path))
    assert done.returncode == 1
    assert "smpc: error: rank 1 ended with status 0 while rank 0 still needed its peers:" in done.stderr


@pytest.mark.slow
def test_a_rank_that_ends_before_the_others_meet_is_named(write):
    """The others used to wait for `start_timeout`; now they do not wait for slow ranks either, without which nothing would help."""
    script = write(
        "import os, sys, time\n"
        "if os.environ['RANK'] == '1':\n"
        "    sys.exit(0)\n"
        "if os.environ['RANK'] == '2':\n"
        "    time.sleep(600)\n"
        "import smpc.v1 as smp\n"
        "smp.init({'pipeline_parallel_degree': 3, 'start_timeout': 600})\n"
    )
    done = _run("-n", "3", script)
    assert done.returncode == 1
    assert done.stderr.startswith("smpc: error: rank 1 ended with status 0 while rank 0 still needed its peers:\n")
    assert (
        "expected 3 processes, but rank 1 ended with status 0 before smp.init; every rank must call it" in done.stderr
    )


@pytest.mark.slow
def test_closed_streams_do_not_matter(write, tmp_path):
    """Python has None for them; it used to end the launcher with an AttributeError."""
    script = write("import os, sys\nprint('shown')\nopen(f\"{sys.argv[1]}/{os.environ['RANK']}\", 'w')\n")
    command = ["sh", "-c", 'exec "$@" >&- 2>&-', "sh", *SMPC, "run", "-n", "2", script, str(tmp_path)]
    done = subprocess.run(command, timeout=LIMIT, env=_environment(), check=False)
    assert done.returncode == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "script.py"]
