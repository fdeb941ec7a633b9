"""What runs every rank: the script sees what `python SCRIPT` would show it, and failures become reports."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import smpc.launch.worker
from smpc.launch.worker import GUARD_VARIABLE

WORKER = str(Path(smpc.launch.worker.__file__))


@pytest.fixture
def run(tmp_path):
    """Runs a script under the worker; returns the process and the report's extra fields, {} for none."""

    def run(text, *arguments, error_file=True, parent=None):
        script = tmp_path / "script.py"
        script.write_text(text)
        report = tmp_path / "error.json"
        command = [sys.executable, WORKER, str(os.getpid() if parent is None else parent), str(script), *arguments]
        environment = {**os.environ, "TORCHELASTIC_ERROR_FILE": str(report) if error_file else ""}
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=False)
        extra = json.loads(report.read_text())["message"]["extraInfo"] if report.exists() else {}
        return done, extra

    return run


def test_script_sees_its_own_world(run, tmp_path):
    (tmp_path / "neighbour.py").write_text("NAME = 'neighbour'")
    done, report = run(
        "import json, sys, pickle, neighbour\n"
        "class Thing: pass\n"
        "assert type(pickle.loads(pickle.dumps(Thing()))) is Thing\n"
        "heavy = [name for name in ('torch', 'smpc', 'numpy') if name in sys.modules]\n"
        "print(json.dumps([__name__, __file__, sys.argv, sys.path[0], neighbour.NAME, heavy]))\n",
        "--flag",
        "a b",
    )
    script = str(tmp_path / "script.py")
    assert json.loads(done.stdout) == ["__main__", script, [script, "--flag", "a b"], str(tmp_path), "neighbour", []]
    assert (done.returncode, done.stderr, report) == (0, "", {})


def test_exception_becomes_a_report(run, tmp_path):
    done, report = run("def f():\n    raise KeyError('boom')\nf()\n")
    assert (done.returncode, done.stderr) == (1, "")
    assert (report["type"], report["text"], report["status"]) == ("KeyError", "'boom'", 1)
    assert report["py_callstack"].splitlines()[:2] == [
        "Traceback (most recent call last):",
        f'  File "{tmp_path / "script.py"}", line 3, in <module>',
    ]


def test_user_errors_have_status_2(run):
    done, report = run("from smpc.errors import ConfigTypeError\nraise ConfigTypeError('no')\n")
    assert (done.returncode, report["status"]) == (2, 2)
    assert report["smpc_classes"] == ["ConfigTypeError", "ConfigError", "SmpcError"]


@pytest.mark.parametrize(("argument", "status"), [("3", 3), ("-1", 255), ("'sorry'", 1)])
def test_exit_becomes_a_report(run, argument, status):
    done, report = run(f"import sys\nsys.exit({argument})\n")
    assert (done.returncode, report["status"], report["is_exit"]) == (status, status, True)
    assert ("sorry" in done.stderr) == (argument == "'sorry'")


@pytest.mark.parametrize("argument", ["0", "None", ""])
def test_good_exit_is_no_failure(run, argument):
    done, report = run(f"import sys\nsys.exit({argument})\n")
    assert (done.returncode, report) == (0, {})


def test_syntax_error_shows_the_line(run):
    done, report = run("x = (\n")
    assert done.returncode == 1
    assert "line 1" in report["py_callstack"]
    assert "launch/worker.py" not in report["py_callstack"]


def test_without_a_place_for_reports_the_traceback_is_printed(run):
    done, report = run("raise ValueError('boom')\n", error_file=False)
    assert (done.returncode, report) == (1, {})
    assert done.stderr.endswith("ValueError: boom\n")


def test_hook_of_the_script_is_called(run):
    done, _ = run("import sys\nsys.excepthook = lambda *what: print('hook', what[1])\nraise ValueError('boom')\n")
    assert done.stdout == "hook boom\n"


@pytest.mark.long
def test_failed_rank_does_not_wait_for_its_threads(run):
    done, report = run("import threading\nimport time\n"
                       "threading.Thread(target=time.sleep, args=(600,)).start()\nraise ValueError\n")  # fmt: skip
    assert (done.returncode, report["type"]) == (1, "ValueError")


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_rank_without_its_launcher_does_not_start(run):
    done, _ = run("print('started')\n", parent=1)
    assert (done.returncode, done.stdout) == (-9, "")


@pytest.mark.parametrize("ends", ["sys.exit(3)", "raise KeyError('of a child')"])
def test_a_forked_child_is_no_rank(run, ends):
    """Its exception used to come up through the worker as well, which reported it, and `smpc run` ended a job that was well."""
    done, report = run(
        f"import os, sys\nchild = os.fork()\nif child == 0:\n    {ends}\nprint(os.waitpid(child, 0)[1] != 0)\n"
    )
    assert (done.returncode, done.stdout, report) == (0, "True\n", {})


def test_an_exception_while_another_is_reported(run):
    """A data loader's worker is killed: first its connection breaks, then torch's handler of SIGCHLD raises the reason, at any moment."""
    done, report = run(
        "import os, signal, sys\n"
        "def handler(*_):\n"
        "    raise RuntimeError('worker is killed')\n"
        "signal.signal(signal.SIGUSR1, handler)\n"
        "told = []\n"
        "def hook(*_):\n"
        "    told.append(True)\n"
        "    if len(told) == 1:\n"
        "        os.kill(os.getpid(), signal.SIGUSR1)\n"
        "sys.excepthook = hook\n"
        "raise KeyError('lost')\n"
    )
    assert (done.returncode, report["type"], report["text"]) == (1, "RuntimeError", "worker is killed")
    assert "KeyError: 'lost'" in report["py_callstack"]


def test_interrupt_of_a_rank_has_the_status_of_the_signal(run):
    done, report = run(
        "import os, signal\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background, shells ignore it\n"
        "os.kill(os.getpid(), signal.SIGINT)\n"
    )
    assert (done.returncode, report["status"], report["type"]) == (130, 130, "KeyboardInterrupt")


def test_the_guard_is_told_before_the_script_runs(tmp_path):
    """A launcher that was killed before it could say so left what its last rank had started."""
    script = tmp_path / "script.py"
    script.write_text(f"import os\nprint({GUARD_VARIABLE!r} in os.environ, flush=True)\ninput()\n")
    reading, writing = os.pipe()
    with subprocess.Popen(
        [sys.executable, WORKER, str(os.getpid()), str(script)],
        env={**os.environ, GUARD_VARIABLE: str(writing)},
        pass_fds=(writing,),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as worker:
        os.close(writing)
        assert worker.stdout.readline() == "False\n"
        with open(reading) as pipe:  # to its end, which is there while the script runs
            assert pipe.read() == f"{worker.pid}\n"
        worker.communicate("\n", timeout=60)
    assert worker.returncode == 0
