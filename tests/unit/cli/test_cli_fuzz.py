"""The command line under whatever files and options: status 0, or status 2 with clear lines; no traceback; in bounded time and memory.

A few hundred examples with a fixed seed, and real processes for those that the operating system has a say in; in `make test-all` some
thousands with a random seed, which a failure prints: SMPC_FUZZ_SEED=... repeats it.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import secrets
import sys
import time
from pathlib import Path

import fuzz_cases as cases
import pytest
from drawn import examples
from hypothesis import HealthCheck, Phase, given, note, seed, settings
from hypothesis import strategies as st

from smpc.cli import main
from smpc.config import Config
from smpc.errors import ConfigError
from smpc.partitioner.graph.plan import Plan

SEED = int(os.environ.get("SMPC_FUZZ_SEED") or secrets.randbelow(2**32))
MOST_SECONDS = 20.0  # of this process, for one command
MOST_RESIDENT = 4 << 20  # KiB
FACTORIES = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])

    def forward(self, x, mask=None):
        for layer in self.layers:
            x = layer(x)
        return x if mask is None else x * mask

class Fatal(BaseException):
    def __str__(self):
        raise ValueError

def fatal(): raise Fatal
def stops(): raise StopIteration
def recurses(): return recurses()
def nothing(): return None
def kind(): return Net
def half(): return Net.__new__(Net)
def model(): return Net()
def build(): return Net(), torch.zeros(12, 4)
def strange(): return Net(), object()
def scalars(): return Net(), [1, "x", None]
def circle():
    found = []
    found.append(found)
    return Net(), found
"""
QUICK = settings(
    max_examples=examples(40),
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],
)
LONG = settings(
    max_examples=int(os.environ.get("SMPC_FUZZ_EXAMPLES", "1000")),
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)


class Place:
    """A folder with files that are right, and some that are not."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "target.py").write_text(FACTORIES)
        (folder / "script.py").write_text("")
        self.target = f"{folder}/target.py:build"
        assert run(["compile", self.target, "-p", "2", "-m", "2", "--out", str(folder / "out")])[0] == 0
        self.plan = json.loads((folder / "out" / "plan.json").read_text())
        (folder / "odd").mkdir()
        self.odd = st.sampled_from(cases.make_odd_paths(folder / "odd"))
        self.count = 0

    def written(self, data: bytes, suffix: str) -> str:
        """A file with that content."""
        self.count += 1
        path = self.folder / f"case_{self.count % 50}{suffix}"
        path.write_bytes(data)
        return str(path)


def run(arguments):
    """Status, stdout, stderr."""
    out, err = io.StringIO(), io.StringIO()
    before = list(sys.path), dict(sys.modules)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main(arguments)
        finally:
            sys.path[:] = before[0]
            for name in [name for name in sys.modules if name not in before[1]]:
                if name.startswith("target") or name == "this":
                    del sys.modules[name]
    return status, out.getvalue(), err.getvalue()


def check(arguments, statuses=(0, 2)):
    """The property; returns the status."""
    note(f"smpc {[a[:200] for a in arguments]}")
    begin = time.process_time()
    status, out, err = run(arguments)
    took = time.process_time() - begin
    assert took < MOST_SECONDS, f"{took:.1f} s: {[a[:200] for a in arguments]}"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < MOST_RESIDENT
    assert status in statuses, (status, err[-2000:])
    check_lines(status, out, err)
    return status


def check_lines(status, out, err):
    lines = err.split("\n")
    assert lines.pop() == ""
    errors = [line for line in lines if line.startswith("smpc: error: ")]
    others = [line for line in lines if not line.startswith(("smpc: error: ", "smpc: warning: ", "smpc: wrote "))]
    assert not others, others
    assert bool(errors) == (status == 2), err[-2000:]
    assert len(lines) <= 100
    assert max(map(len, errors), default=0) < 4200
    assert all(c.isprintable() for line in lines for c in line), err[-2000:]
    assert all(c.isprintable() or c == "\n" for c in out), "escape codes in the output"
    if status == 2:
        assert "Traceback" not in err


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzz")
    before = os.getcwd()
    os.chdir(folder)
    yield Place(folder)
    os.chdir(before)


def forged(document):
    """The text of a plan with the fingerprint that fits it, where it is enough of a plan to have one."""
    try:
        Plan.from_json(json.dumps({**document, "fingerprint": ""}))
    except ValueError as error:
        words = str(error).split("its fingerprint is ")
        if len(words) == 2:
            return json.dumps({**document, "fingerprint": words[1].split(",")[0]})
    except Exception:
        return json.dumps(document)
    return json.dumps(document)


def plan_files(place):
    found = cases.mutated(place.plan)
    text = st.one_of(found.map(forged), found.map(forged), cases.documents(place.plan))
    return st.one_of(
        cases.contents(text).map(lambda data: place.written(data, ".json")),
        cases.contents(text).map(lambda data: place.written(data, ".json")),
        place.odd,
    )


CONFIG = {
    "partitions": 2,
    "microbatches": 4,
    "schedule": "1f1b",
    "memory_weight": 0.5,
    "start_timeout": 3,
    "ddp": True,
    "kernels": "off",
}
OPTIONS = (
    "-p",
    "-m",
    "-t",
    "-d",
    "-v",
    "--memory-weight",
    "--active-microbatches",
    "--activation-loading-horizon",
    "--world-size",
)
NAMED = ("--schedule", "--pipeline", "--optimizer", "--memory-limit", "--kernels", "--recompute", "--tensor-parallel-plan", "--device",
         "--tensor-parallel-outputs", "--input", "--config")  # fmt: skip
INPUTS = (
    "x=float32[12,4]", "x=int64[12,4]", "x=qint8[4]", "x=complex64[12,4]", "x=float8_e4m3fn[12,4]", "x=float32[]", "x=float32[0]",
    f"x=float32[{cases.DIGITS}]", "x=float32[999999999,999999999]", "x_mask=float32[99999,99999]", "x=float32[" + "1," * 100 + "1]", "x=",
    "x=bits8[1]", "x=uint1[1]", "x=float4_e2m1fn_x2[2]", "mask=bool[12,4]", "x=dtype[1]", "x=float32[\u0663]", "x=float32[12,4", "=",
)  # fmt: skip
DEVICES = (
    "h100",
    "2xh100",
    "0xh100",
    "99999999xh100",
    f"{cases.DIGITS}xh100",
    "-1xh100",
    "x",
    "cpu",
    "a100,h100",
    "1x1xh100",
    "\u0662xh100",
)
SIZES = (
    "80GB",
    "1B",
    "0",
    "-1",
    "nan",
    "inf",
    "1e99GB",
    "1e5000",
    f"{cases.DIGITS}GB",
    "9999999PiB",
    "8 GiB",
    "\u0661GB",
    "GB",
    "1.5.5GB",
)


@st.composite
def compile_arguments(draw, place):
    names = {
        "--schedule": st.one_of(
            st.sampled_from(["1f1b", "gpipe", "list", "zb-v", "zb-h1", "interleaved-1f1b"]),
            cases.contents(cases.csv_texts()).map(lambda data: place.written(data, ".csv")),
        ),
        "--device": st.one_of(
            st.sampled_from(DEVICES),
            cases.contents(cases.toml_texts(cases.DEVICE)).map(lambda d: place.written(d, ".toml")),
        ),
        "--config": st.one_of(
            cases.contents(cases.documents(CONFIG)).map(lambda data: place.written(data, ".json")),
            cases.contents(cases.toml_texts(CONFIG)).map(lambda data: place.written(data, ".toml")),
        ),
        "--tensor-parallel-plan": cases.contents(cases.documents({"layers.*": "colwise"})).map(
            lambda d: place.written(d, ".json")
        ),
        "--input": st.sampled_from(INPUTS),
        "--memory-limit": st.sampled_from(SIZES),
    }
    targets = [f"{place.folder}/target.py:{name}" for name in ("model", "fatal", "stops", "recurses", "nothing", "kind", "half", "strange",
               "scalars", "circle", "Net", "missing", "torch.nn", "a" * 5000, "")]  # fmt: skip
    targets += [
        "sys:exit",
        "builtins:exit",
        "os:getcwd",
        "math:pi",
        "sys:maxsize.real",
        "a" * 5000,
        ":",
        "a:b:c",
        "json:",
        "nul\0:x",
        ".:x",
    ]
    arguments = [draw(st.one_of(st.just(place.target), st.just(place.target), st.sampled_from(targets), place.odd))]
    if draw(st.integers(0, 5)):
        arguments += ["-p", "2", "-m", "2"]
    for _ in range(draw(st.integers(0, 2))):
        arguments += [draw(st.sampled_from(OPTIONS)), draw(cases.NUMBERS)]
    for _ in range(draw(st.integers(0, 2))):
        name = draw(st.sampled_from(NAMED))
        arguments += [
            name,
            draw(st.one_of(names.get(name, cases.TEXTS), names.get(name, cases.TEXTS), cases.TEXTS, place.odd)),
        ]
    if draw(st.integers(0, 3)) == 0:
        arguments += draw(
            st.sampled_from([["--auto"], ["--json"], ["--skip-tracing"], ["--fully-shard"], ["--offload-activations"]])
        )
    if draw(st.integers(0, 5)) == 0:
        arguments += [draw(st.sampled_from(["--out", "--plot"])), draw(st.one_of(place.odd, cases.TEXTS))]
    return arguments


@st.composite
def run_arguments(draw, place, script):
    numbers = ("-n", "--grace", "--nnodes", "--node-rank", "--world-size", "--base-rank", "--master-port")
    texts = ("--stdout", "--stderr", "--console", "--report-to", "--trace", "--trace-steps", "--master-addr")
    templates = st.sampled_from(
        ["{rank:9999999999}", "{rank!r:>99999999}", "{rank.__class__}", "{rank[0]}", "{0}", "{}", "{rank", "{{", "{rank:{rank}}", "{x}",
         "all", "none", "5:8", "8:5", f"{cases.DIGITS}:1", f"0:{cases.DIGITS}", "\u0661:\u0662", "1:", "127.0.0.1", "a" * 300, "\0"]
    )  # fmt: skip
    arguments = []
    for _ in range(draw(st.integers(1, 3))):
        if draw(st.booleans()):
            arguments += [draw(st.sampled_from(numbers)), draw(cases.NUMBERS)]
        else:
            arguments += [draw(st.sampled_from(texts)), draw(st.one_of(templates, templates, cases.TEXTS, place.odd))]
    if draw(st.integers(0, 5)) == 0:
        return [
            *arguments,
            "-m",
            draw(st.one_of(st.sampled_from(["no.such.module", "a..b", "", "os.path.x", "a" * 5000]), cases.TEXTS)),
        ]
    return [*arguments, script]


def fuzz_plans(place, config):
    @config
    @given(st.data())
    def examine(data):
        files = plan_files(place)
        if data.draw(st.booleans()):
            check(["diff", str(place.folder / "out"), data.draw(files)], (0, 1, 2))
            return
        arguments = ["simulate", data.draw(files)]
        for _ in range(data.draw(st.integers(0, 2))):
            arguments += [data.draw(st.sampled_from(["-m", "--active-microbatches"])), data.draw(cases.NUMBERS)]
        if data.draw(st.integers(0, 3)) == 0:
            csv = cases.contents(cases.csv_texts()).map(lambda content: place.written(content, ".csv"))
            arguments += [
                "--schedule",
                data.draw(st.one_of(st.sampled_from(["list", "gpipe", "zb-v"]), csv, cases.TEXTS)),
            ]
        check(arguments)

    return examine


def fuzz_compile(place, config):
    @config
    @given(compile_arguments(place))
    def examine(arguments):
        check(["compile", *arguments])

    return examine


def fuzz_run(place, config):
    """Options of `smpc run`, of a script that does not exist: nothing starts, and all violations are told."""

    @config
    @given(run_arguments(place, "missing.py"))
    def examine(arguments):
        assert check(["run", *arguments]) == 2

    return examine


def fuzz_configurations(place, config):
    @config
    @given(cases.documents(CONFIG), st.booleans())
    def examine(text, in_environment):
        with contextlib.suppress(ConfigError):
            environ = {"SM_HP_MP_PARAMETERS": text.encode("utf-8", "replace").decode()}
            if in_environment:
                Config.parse({"partitions": 2}, environ=environ, warn=False)
            else:
                Config.from_file(place.written(environ["SM_HP_MP_PARAMETERS"].encode(), ".json"), warn=False)

    return examine


TINY = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 2, "n_embd": 8, "n_head": 2, "vocab_size": 16,
        "n_positions": 8,
        "activation_function": "gelu_new", "resid_pdrop": 0.1, "use_cache": True, "pad_token_id": 0, "id2label": {"0": "a"}}  # fmt: skip


def fuzz_models(place, config):
    @config
    @given(cases.contents(cases.documents(TINY)))
    def examine(data):
        check(["compile", place.written(data, ".json"), "-p", "2", "--input", "input_ids=int64[2,4]"])

    return examine


FUZZERS = {
    "plans": fuzz_plans,
    "compile": fuzz_compile,
    "run": fuzz_run,
    "configurations": fuzz_configurations,
    "models": fuzz_models,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FUZZERS)
def test_a_fixed_seed(place, name):
    assert FUZZERS[name](place, QUICK)() is None


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FUZZERS)
def test_a_random_seed(place, name):
    print(f"SMPC_FUZZ_SEED={SEED}")
    try:
        assert seed(SEED)(FUZZERS[name](place, LONG))() is None
    except BaseException as error:
        error.add_note(f"SMPC_FUZZ_SEED={SEED}")
        raise
