"""Sizes beyond all bounds, numbers of thousands of digits, files that are none: one line, status 2, at once.

Each of these once was a traceback, took for ever or all memory, or waited for somebody to write into a pipe.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest
from locations import REPOSITORY

from smpc.cli import main
from smpc.cli import model_target as huggingface
from smpc.cli.terminal import clear_lines
from smpc.codegen.schedules import csv_file
from smpc.config import numbers, user_files
from smpc.config.numbers import MAX_MICROBATCHES, size_violation
from smpc.config.user_files import output_violation, parse_json, parse_toml, read_text
from smpc.errors import ConfigError
from smpc.launch.job import Job
from smpc.launch.output import OutputOptions

DIGITS = "9" * 5000
FACTORIES = """
import torch
from torch import nn

class Fatal(BaseException):
    def __str__(self):
        raise ValueError

def build():
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))), torch.zeros(12, 4)

def model():
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))

def fatal():
    raise Fatal

def kind():
    return nn.Linear
"""
WIRE = "devices = 8\nbandwidth = 1e9\nlatency = {}\n"
DEVICE = (
    'memory_bandwidth = 1e12\nmemory = "80GB"\n[peak_flops]\nfloat32 = 1e12\n[inside_host]\n'
    + WIRE
    + "[between_hosts]\nbandwidth = 1e9\nlatency = 0\n"
)
LLAMA = {"model_type": "llama", "hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8, "vocab_size": 8}
FILES = {
    "digits.csv": f"0F{DIGITS},0B0\n",
    "large.csv": "9999999F0,0B0\n",
    "long.csv": "0F0," + "x" * 200_000 + "\n",
    "digits.toml": f"partitions = {DIGITS}\n",
    "hexadecimal.toml": f"partitions = 0x{'f' * 5000}\n",
    "deep.toml": f"partitions = {'[' * 5000}\n",
    "digits.json": f'{{"partitions": {DIGITS}}}',
    "deep.json": '{"a":' * 5000 + "1" + "}" * 5000,
    "brackets.json": "[" * 100_000,
    "infinite.json": '{"partitions": 2, "memory_weight": 1e999}',
    "large.json": json.dumps(
        {"partitions": 2, "microbatches": 10**9, "start_timeout": 1e300, "tensor_parallel_seed": 2**70}
    ),
    "latency.toml": DEVICE.format("inf"),
    "latency_digits.toml": DEVICE.format(DIGITS),
    "latency_year.toml": DEVICE.format("3e7"),
    "ranks.toml": 'ranks = ["99999999xh100"]\n',
    "text.json": "x = 1",
    "gpt2.json": json.dumps({"model_type": "gpt2", "n_layer": 10**30}),
    "gpt2_layers.json": json.dumps({"model_type": "gpt2", "n_layer": 100_000}),
    "gpt2_labels.json": json.dumps({"model_type": "gpt2", "num_labels": 10**12}),
    "gpt2_digits.json": f'{{"model_type": "gpt2", "n_embd": {DIGITS}}}',
    "llama.json": json.dumps({**LLAMA, "num_hidden_layers": 10**9}),
    "llama_nested.json": json.dumps({**LLAMA, "text_config": {"num_hidden_layers": 10**9}}),
    "styles.json": f'{{"*": {DIGITS}}}',
}
IDS = ("--input", "input_ids=int64[2,4]")
TWO = ("-p", "2", "-m", "2")
BUILD = "target.py:build"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bounds")
    for name, text in {"target.py": FACTORIES, "script.py": "", **FILES}.items():
        (folder / name).write_text(text)
    for suffix in ("json", "csv", "toml"):
        (folder / f"folder.{suffix}").mkdir()
        os.mkfifo(folder / f"pipe.{suffix}")
        os.symlink(f"loop.{suffix}", folder / f"loop.{suffix}")
        os.symlink("/dev/zero", folder / f"endless.{suffix}")
        (folder / f"binary.{suffix}").write_bytes(b"\xff\xfe\x00")
        (folder / f"empty.{suffix}").write_bytes(b"")
        (folder / f"huge.{suffix}").touch()
        os.truncate(folder / f"huge.{suffix}", 1 << 40)  # of a terabyte that is not there
    os.mkfifo(folder / "pipe.png")
    before = os.getcwd()
    os.chdir(folder)
    assert main(["compile", BUILD, *TWO, "--json", "--out", "plan"]) == 0
    yield folder
    os.chdir(before)


@pytest.fixture
def refused(folder, capsys, monkeypatch):
    """The one line that a command is refused with."""
    monkeypatch.setattr(sys, "path", list(sys.path))

    def refused(*arguments):
        begin = time.process_time()
        assert main(arguments) == 2
        assert time.process_time() - begin < 5.0
        out, err = capsys.readouterr()
        *progress, line = err.splitlines()
        assert all(each.endswith(" so far") for each in progress)  # a line every 10 s
        assert line.startswith("smpc: error: ")
        assert len(line) < 4200
        assert out == ""
        return line

    yield refused
    sys.modules.pop("target", None)


LARGE = [
    (("simulate", "plan", "-m", "1000000"), "microbatches: expected at most 16384, found 1000000"),
    (("simulate", "plan", "--schedule", "list", "-m", "200000"), "microbatches: expected at most 16384"),
    (
        ("simulate", "plan", "--schedule", "list", "-m", "16000"),
        "expected at most 16384 stages x microbatches for the list schedule",
    ),
    (("simulate", "plan", "-m", DIGITS), "microbatches"),
    (("simulate", "plan", "--active-microbatches", "99999999999"), "active_microbatches: expected at most 16384"),
    (("compile", BUILD, "-p", "99999999999"), "pipeline_parallel_degree: expected at most 4096"),
    (("compile", BUILD, "-p", "4096"), "expected at most as many stages as modules"),
    (("compile", BUILD, *TWO, "-m", "99999999999"), "microbatches: expected at most 16384"),
    (("compile", BUILD, *TWO, "-v", "99999999999"), "virtual_pipeline_degree: expected at most 1024"),
    (("compile", BUILD, *TWO, "-v", "1000"), "expected at most as many stages as modules"),
    (("compile", BUILD, *TWO, "-d", "99999999999"), "--data-parallel-degree: expected at most 65536"),
    (("compile", BUILD, *TWO, "-t", "99999999999"), "--tensor-parallel-degree: expected at most 65536"),
    (("compile", BUILD, *TWO, "--active-microbatches", "99999999999"), "active_microbatches: expected at most 16384"),
    (("compile", BUILD, *TWO, "--memory-limit", "9e99GB"), "at most 1 EiB"),
    (("compile", BUILD, *TWO, "--memory-limit", DIGITS), "at most 1 EiB"),
    (("compile", BUILD, "--auto", "--world-size", "99999999999"), "--world-size: expected at most 1048576"),
    (("compile", BUILD, *TWO, "--device", "99999999xh100"), "device: expected at most 65536 of a kind"),
    (("compile", BUILD, *TWO, "--device", f"{DIGITS}xh100"), "device: expected at most 65536 of a kind"),
    (("compile", BUILD, *TWO, "--device", "60000xh100", "--device", "60000xa100"), "devices of at most 65536 ranks"),
    (("compile", BUILD, *TWO, "--device", "ranks.toml"), "device: expected at most 65536 of a kind"),
    (("compile", "target.py:model", *TWO, "--input", "input=float32[99999999999,4]"), "inputs of at most"),
    (("compile", "target.py:model", *TWO, "--input", "input=float32[999999999,4]"), "microbatches of at most"),
    (("compile", "target.py:model", *TWO, "--input", "mask=float32[99999,99999]"), "of at most"),
    (("compile", "target.py:model", *TWO, "--input", f"input=float32[{DIGITS}]"), "expected sizes of at least 1"),
    (
        ("compile", "target.py:model", *TWO, "--input", "input=float32[" + "1," * 5000 + "1]"),
        "expected at most 16 sizes",
    ),
    (("compile", "target.py:model", *TWO, "--input", "input=qint8[12,4]"), "unknown dtype 'qint8'"),
    (("compile", "gpt2.json", *TWO, *IDS), "'n_layer': expected at most 1024, found 1000000000000000000000000000000"),
    (("compile", "gpt2_layers.json", *TWO, *IDS), "'n_layer': expected at most 1024, found 100000"),
    (("compile", "gpt2_labels.json", *TWO, *IDS), "'num_labels': expected at most"),
    (("compile", "gpt2_digits.json", *TWO, *IDS), "a number of 5000 digits"),
    (("compile", "llama.json", *TWO, *IDS), "'num_hidden_layers': expected at most 1024"),
    (("compile", "llama_nested.json", *TWO, *IDS), "'num_hidden_layers': expected at most 1024"),
    (("run", "--stdout", "{rank:9999999999}", "script.py"), "--stdout: unknown field {rank:9999999999}"),
    (("run", "--stderr", "{rank!r:>9999999999}", "script.py"), "--stderr: unknown field {rank!r:>9999999999}"),
    (("run", "--stdout", "{rank:{world_size}}", "script.py"), "--stdout: unknown field"),
    (("run", "-n", "99999999999", "script.py"), "-n: expected at most 1024 ranks on a node"),
    (("run", "-n", "99999999999", "--stdout", "{rank}", "script.py"), "-n: expected at most 1024 ranks on a node"),
    (("run", "--grace", "inf", "script.py"), "--grace: expected 0 to 31536000 seconds, found inf"),
    (("run", "--grace", "nan", "script.py"), "--grace: expected"),
    (("run", "--nnodes", "99999999999", "script.py"), "--nnodes: expected a whole number from 1 to 1048576"),
    (("run", "--world-size", DIGITS[:40], "script.py"), "--world-size"),
    (("run", "--report", "--trace-steps", f"0:{DIGITS}", "script.py"), "--trace-steps"),
    (("run", "--master-port", "99999999999", "script.py"), "--master-port: expected a whole number from 1 to 65535"),
]


@pytest.mark.long
@pytest.mark.parametrize(("arguments", "says"), LARGE, ids=[f"{i}" for i in range(len(LARGE))])
def test_sizes_that_nobody_has(refused, arguments, says):
    assert says in refused(*arguments)


WRONG = [
    (("compile", BUILD, *TWO, "--schedule", "digits.csv"), "digits.csv, row 1, cell 1: expected an action"),
    (("compile", BUILD, *TWO, "--schedule", "large.csv"), "of at most 16384 microbatches"),
    (("compile", BUILD, *TWO, "--schedule", "long.csv"), "malformed CSV: field larger than field limit"),
    (("compile", BUILD, "--config", "digits.toml"), "digits.toml: malformed TOML"),
    (("compile", BUILD, "--config", "hexadecimal.toml"), "found a number of about 6021 digits"),
    (("compile", BUILD, "--config", "deep.toml"), "nested too deeply"),
    (("compile", BUILD, "--config", "digits.json"), "a number of 5000 digits"),
    (("compile", BUILD, "--config", "deep.json"), "nested too deeply"),
    (("compile", BUILD, "--config", "brackets.json"), "nested too deeply"),
    (("compile", BUILD, "--config", "infinite.json"), "expected finite numbers, found inf"),
    (("compile", BUILD, *TWO, "--device", "latency.toml"), "expected finite numbers, found inf"),
    (("compile", BUILD, *TWO, "--device", "latency_digits.toml"), "malformed TOML"),
    (("compile", BUILD, *TWO, "--device", "latency_year.toml"), "latency: expected a number from 0 to 3600"),
    (("compile", BUILD, *TWO, "--tensor-parallel-plan", "styles.json"), "a number of 5000 digits"),
    (("diff", "plan", "deep.json"), "nested too deeply"),
    (("compile", "sys:exit", *TWO), "raised SystemExit"),
    (("compile", "builtins:exit", *TWO), "raised SystemExit"),
    (("compile", "target.py:fatal", *TWO), "raised Fatal: <ValueError while formatting it>"),
    (("compile", "target.py:kind", *TWO), "found type"),
    (("compile", "sys:maxsize", *TWO), "expected a function of no arguments, found int"),
    (("compile", "a" * 5000, *TWO), "(5002 characters)"),
    (("compile", "a" * 5000 + ":b", *TWO), "(5004 characters)"),
    (("compile", "os:" + "b" * 5000, *TWO), "has no"),
    (("compile", "nul\0:b", *TWO), "no module"),
    (("run", "-m", "no.such.module"), "-m: no module 'no.such.module' on the path"),
    (("run", "-m", "os.nothing"), "'os' is no package"),
    (("run", "a" * 5000), "does not exist"),
    (("run", "pipe.json"), "is not a file"),
    (("run", "--report-to", "pipe.json", "script.py"), "nobody reads the named pipe"),
    (("run", "--stdout", "pipe.json", "script.py"), "nobody reads the named pipe"),
    (("run", "--stdout", "loop.json", "script.py"), "Too many levels of symbolic links"),
    (("run", "--trace", "loop.json", "script.py"), "--trace: expected a folder"),
    (("run", "--stdout", "a" * 5000, "script.py"), "File name too long"),
    (("compile", BUILD, *TWO, "--plot", "pipe.png"), "nobody reads the named pipe"),
    (("compile", BUILD, *TWO, "--out", "a" * 5000), "File name too long"),
    (("compile", BUILD, *TWO, "--out", "loop.json"), "Too many levels of symbolic links"),
    (("compile", BUILD, *TWO, "--out", ""), "--out '': expected a folder"),
]


@pytest.mark.parametrize(("arguments", "says"), WRONG, ids=[f"{i}" for i in range(len(WRONG))])
def test_numbers_names_and_targets_that_cannot_be(refused, arguments, says):
    assert says in refused(*arguments)


@pytest.mark.parametrize(
    "name", ["folder", "pipe", "loop", "endless", "binary", "empty", "huge", "missing", "new\nline", "a" * 5000]
)
def test_files_that_are_none(refused, name):
    for command in (
        ("diff", "plan", f"{name}.json"),
        ("simulate", f"{name}.json"),
        ("compile", BUILD, "--config", f"{name}.json"),
        ("compile", BUILD, "--config", f"{name}.toml"),
        ("compile", BUILD, *TWO, "--schedule", f"{name}.csv"),
        ("compile", BUILD, *TWO, "--device", f"{name}.toml"),
        ("compile", BUILD, *TWO, "--tensor-parallel-plan", f"{name}.json"),
        ("compile", f"{name}.json", *TWO, *IDS),
    ):
        if command[-1] == "empty.toml":
            continue  # a document, without any settings: a line for each that is missing
        line = refused(*command)
        assert name.encode("unicode_escape").decode()[:100] in line


def test_a_step_as_large_as_is_allowed_is_simulated_and_one_larger_is_not():
    assert size_violation(1, MAX_MICROBATCHES) == ""
    assert size_violation(8, MAX_MICROBATCHES) == ""
    assert "found 9 x 16384" in size_violation(9, MAX_MICROBATCHES)


def test_a_file_that_can_be_read_is():
    assert parse_json('{"a": [1, 1e3, true]}', "x") == {"a": [1, 1e3, True]}
    assert parse_json('{"a": Infinity}', "x", infinite=True) == {"a": float("inf")}
    assert parse_toml("a = 0x10\n[b]\nc = 1.5\n", "x") == {"a": 16, "b": {"c": 1.5}}


def test_bounds_of_a_file_are_of_its_content(tmp_path):
    path = tmp_path / "file"
    path.write_text("é" * 5)
    assert read_text(path, "it", most=10) == "é" * 5
    with pytest.raises(ConfigError, match="it: expected at most 9 bytes"):
        read_text(path, "it", most=9)


def test_a_pipe_with_a_reader_can_be_written(tmp_path):
    os.mkfifo(tmp_path / "log")
    assert "nobody reads" in output_violation(str(tmp_path / "log"))
    reader = os.open(tmp_path / "log", os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert output_violation(str(tmp_path / "log")) == ""
    finally:
        os.close(reader)


def test_long_messages_are_cut_and_many_are_counted():
    (line,) = clear_lines("x" * 10_000_000)
    assert len(line) < 4200
    assert list(clear_lines("a\x1b\tb\r\u2028c")) == ["a\\x1b\\tb\\r\\u2028c"]
    assert list(clear_lines("x\n" * 60))[-1] == "... and 11 more"


def test_a_job_of_too_many_ranks_makes_no_list_of_them(tmp_path):
    (tmp_path / "x.py").touch()
    with pytest.raises(ConfigError, match="at most 1024"):
        Job(str(tmp_path / "x.py"), num_ranks=10**12, output=OutputOptions(stdout="{rank}")).check({})


def _process(*arguments, **options):
    """A real `smpc`: status, stderr without what a slow machine is told every ten seconds, the most bytes it had, and its user seconds."""
    code = "import sys; from smpc.cli import main; sys.exit(main(sys.argv[1:]))"
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, **options
    )
    with process:
        err = "".join(line for line in process.stderr if not line.endswith(" s so far\n"))
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    return process.returncode, err, usage.ru_maxrss << 10, usage.ru_utime


@pytest.mark.long
@pytest.mark.parametrize(
    "arguments",
    [
        ("simulate", "/dev/zero"),
        pytest.param(("compile", "gpt2.json", *TWO, *IDS), marks=pytest.mark.slow),
        ("run", "-n", "2", "-m", "email.nothing"),
    ],
)
def test_real_processes(folder, arguments):
    status, err, memory, seconds = _process(*arguments, stdout=subprocess.DEVNULL)
    assert (status, len(err.splitlines()), err.startswith("smpc: error: ")) == (2, 1, True), err
    assert memory < 2 << 30
    assert seconds < 30


@pytest.mark.long
def test_a_result_that_cannot_be_written_is_told(folder):
    with open("/dev/full", "w") as full:
        status, err, _, _ = _process("compile", BUILD, *TWO, "--json", stdout=full)
    assert (status, err) == (2, "smpc: error: cannot write the result: No space left on device\n")


def test_a_file_whose_reading_fails():
    with pytest.raises(ConfigError, match="it: cannot read it: Input/output error"):
        read_text("/proc/self/mem", "it")  # nothing is mapped at its beginning


def test_the_documented_bounds_are_those_that_hold():
    text = (REPOSITORY / "docs" / "planner.md").read_text()
    table = text.partition("## Bounds")[2].partition("\n## ")[0]
    whole = (
        numbers.MAX_PIPELINE_RANKS,
        numbers.MAX_PIECES,
        numbers.MAX_RANKS,
        numbers.MAX_WORLD_SIZE,
        numbers.MAX_LOCAL_RANKS,
        numbers.MAX_MICROBATCHES,
        numbers.MAX_STEPS,
        numbers.MAX_SEARCHED_STEPS,
        huggingface._MOST_LAYERS,
        huggingface._MOST_MODULES,
        user_files.MAX_DEPTH,
        user_files.MAX_BITS,
    )
    sizes = (numbers.MAX_INPUT_BYTES, numbers.MAX_MICROBATCH_BYTES, numbers.MAX_MASK_BYTES)
    sizes = [f"{size >> 30} GiB" for size in sizes]
    sizes += [
        f"{size >> 20} MiB" for size in (user_files.MAX_FILE_BYTES, user_files.MAX_PLAN_BYTES, csv_file.MAX_CSV_BYTES)
    ]
    for bound in (*(f"{number:,}" for number in whole), *sizes):
        assert bound in table
