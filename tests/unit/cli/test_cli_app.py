"""The command line as a user meets it: what it prints, what it writes, and one clear line for whatever is wrong."""

import hashlib
import json
import os
import subprocess
import sys

import pytest

from smpc.cli import main

pytestmark = pytest.mark.usefixtures("clean_imports")

FACTORIES = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(16, 32)
        self.outer = nn.Linear(32, 16)

    def forward(self, x):
        return x + self.outer(torch.relu(self.inner(x)))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(6)])

    def forward(self, hidden):
        for block in self.blocks:
            hidden = block(hidden)
        return hidden

def build():
    print("noise of the user's code")
    return Net(), torch.zeros(8, 4, 16)

def model():
    return Net()

def raising():
    raise ValueError("no way")

def unfit():
    return Net(), torch.zeros(8, 4, 15)
"""


@pytest.fixture
def factories(tmp_path):
    path = tmp_path / "factories.py"
    path.write_text(FACTORIES)
    return str(path)


@pytest.fixture
def smpc(capsys):
    """Runs the command line in this process; returns status, stdout and stderr."""

    def smpc(*arguments):
        status = main(arguments)
        out, err = capsys.readouterr()
        return status, out, err

    return smpc


def _errors(err):
    lines = [
        line for line in err.splitlines() if not line.endswith(" s so far")
    ]  # what a slow machine is told every ten seconds
    assert all(line.startswith("smpc: error: ") for line in lines), err
    return [line.removeprefix("smpc: error: ") for line in lines]


def test_compile_prints_a_report(smpc, factories):
    status, out, _ = smpc("compile", f"{factories}:build", "-p", "2", "-m", "4")
    assert status == 0
    assert out.startswith("Net: 2 stages on 2 ranks, 4 microbatches\n")
    assert "blocks.0" in out
    assert "rank 1  " in out
    assert "noise" not in out


def test_json_is_the_plan_and_nothing_else(smpc, factories):
    status, out, err = smpc("compile", f"{factories}:build", "-p", "3", "-m", "4", "--pipeline", "simple", "--json")
    assert (status, err) == (0, "noise of the user's code\n")
    plan = json.loads(out)
    assert [(stage["index"], stage["rank"]) for stage in plan["stages"]] == [(0, 0), (1, 1), (2, 2)]
    assert sum(stage["num_parameters"] for stage in plan["stages"]) == 6 * (16 * 32 + 32 + 32 * 16 + 16)
    assert plan["schedule"]["name"] == "simple"
    assert plan["schedule"]["num_microbatches"] == 4
    assert {"memory_weight", "bottleneck", "lower_bound", "gap"} <= set(plan["objective"])
    assert {
        "modules",
        "parameter_bytes",
        "activation_bytes_per_microbatch",
        "peak_memory_bytes",
        "forward_flops",
        "cost",
    } <= set(plan["stages"][0])
    assert plan["edges"]
    assert len(plan["fingerprint"]) == 64


def test_output_folder_has_plan_programs_and_schedule_byte_for_byte(smpc, factories, tmp_path):
    command = ("compile", f"{factories}:build", "-m", "4", "--json")
    digests = []
    for name in ("first", "second"):
        folder = tmp_path / "deep" / name
        status, out, _ = smpc(*command, "-p", "2", "--out", str(folder))
        assert status == 0
        files = sorted(path.name for path in folder.iterdir())
        assert files == [
            "plan.json",
            "rank_0.py",
            "rank_1.py",
            "report.html",
            "schedule.txt",
            "timeline.json",
        ]
        assert (folder / "plan.json").read_text() == out
        digests.append([hashlib.sha256((folder / file).read_bytes()).hexdigest() for file in files])
    assert digests[0] == digests[1]
    for rank in range(2):
        source = (tmp_path / "deep" / "first" / f"rank_{rank}.py").read_text()
        compile(source, "program", "exec")
        assert "def forward" in source
    assert "SEND e" in (tmp_path / "deep" / "first" / "schedule.txt").read_text()


def test_programs_of_an_earlier_larger_plan_are_removed(smpc, factories, tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "rank_9.py").write_text("the user's own: there is no plan here")
    smpc("compile", f"{factories}:build", "-p", "3", "-m", "4", "--json", "--out", str(folder))
    assert (folder / "rank_9.py").exists()
    (folder / "rank_x.py").write_text("the user's own")
    smpc("compile", f"{factories}:build", "-p", "2", "-m", "4", "--json", "--out", str(folder))
    assert sorted(path.name for path in folder.iterdir()) == [
        "plan.json",
        "rank_0.py",
        "rank_1.py",
        "rank_x.py",
        "report.html",
        "schedule.txt",
        "timeline.json",
    ]


def test_inputs_by_shape(smpc, factories):
    given = ("--input", "hidden=float32[8,4,16]", "-p", "2", "-m", "4", "--json")
    _, by_shape, _ = smpc("compile", f"{factories}:model", *given)
    _, by_factory, _ = smpc("compile", f"{factories}:build", "-p", "2", "-m", "4", "--json")
    assert json.loads(by_shape)["stages"] == json.loads(by_factory)["stages"]


def test_hugging_face_config(smpc, tmp_path):
    path = tmp_path / "config.json"
    fields = {"model_type": "gpt2", "n_layer": 4, "n_embd": 16, "n_head": 2, "vocab_size": 32, "n_positions": 16}
    path.write_text(json.dumps({**fields, "bos_token_id": 0, "eos_token_id": 0, "tie_word_embeddings": False}))
    status, out, err = smpc("compile", str(path), "--input", "input_ids=int64[8,16]", "-p", "4", "-m", "2", "--json")
    assert status == 0, err
    plan = json.loads(out)
    assert plan["model_class"].endswith("GPT2LMHeadModel")
    assert len(plan["stages"]) == 4


def test_options_win_over_the_config_file(smpc, factories, tmp_path):
    config = tmp_path / "smp.json"
    config.write_text(
        json.dumps({"partitions": 3, "microbatches": 2, "pipeline": "simple", "memory_weight": 0.25, "ddp": True})
    )
    status, out, err = smpc("compile", f"{factories}:build", "--config", str(config), "-m", "4", "--json")
    assert status == 0, err
    plan = json.loads(out)
    assert len(plan["stages"]) == 3
    assert (plan["schedule"]["name"], plan["schedule"]["num_microbatches"]) == ("simple", 4)
    assert plan["objective"]["memory_weight"] == 0.25


def test_the_device_of_the_config_file_counts(smpc, factories, tmp_path):
    config = tmp_path / "smp.json"
    config.write_text(json.dumps({"partitions": 2, "device": "a100"}))
    by_file = smpc("compile", f"{factories}:build", "--config", str(config), "--json")
    by_options = smpc(
        "compile", f"{factories}:build", "-p", "2", "--memory-weight", "0.8", "--device", "a100", "--json"
    )
    h100 = smpc("compile", f"{factories}:build", "--config", str(config), "--device", "h100", "--json")
    assert by_file == by_options != h100
    assert by_file[0] == h100[0] == 0
    config.write_text(json.dumps({"partitions": 2, "device": "a1000"}))
    assert smpc("compile", f"{factories}:build", "--config", str(config), "--json")[0] == 2


def test_settings_without_effect_are_named(smpc, factories, tmp_path):
    config = tmp_path / "smp.json"
    config.write_text(json.dumps({"partitions": 2, "static_mode": True}))
    status, _, err = smpc("compile", f"{factories}:build", "--config", str(config), "--json")
    assert status == 0
    assert "smpc: warning: static_mode: True has no effect here" in err


def test_tensor_parallel_layouts_are_shown_and_written(smpc, factories, tmp_path):
    status, out, _ = smpc("compile", f"{factories}:build", "-p", "2", "-t", "2", "--out", str(tmp_path / "out"))
    assert status == 0
    text = (tmp_path / "out" / "tensor_parallel.txt").read_text()
    assert text.startswith("tensor parallel: 2 ranks, ")
    assert out.endswith(text)
    assert "from smpc.executor import tensor_ops" in (tmp_path / "out" / "rank_0.py").read_text()


def test_tensor_parallelism_of_the_config_file_counts(smpc, factories, tmp_path):
    config = tmp_path / "smp.json"
    config.write_text(json.dumps({"pipeline_parallel_degree": 2, "tensor_parallel_degree": 2, "ddp": True}))
    by_file = smpc("compile", f"{factories}:build", "--config", str(config), "--json")
    by_options = smpc("compile", f"{factories}:build", "-p", "2", "-t", "2", "--memory-weight", "0.8", "--json")
    whole = smpc("compile", f"{factories}:build", "--config", str(config), "-t", "1", "--json")
    assert by_file == by_options != whole
    assert by_file[0] == whole[0] == 0


def test_styles_in_the_config_file_are_a_plan(smpc, factories, tmp_path):
    config, styles = tmp_path / "smp.json", tmp_path / "styles.json"
    keys = {"pipeline_parallel_degree": 2, "tensor_parallel_degree": 2, "ddp": True, "prescaled_batch": True}

    def compiled(plan):
        config.write_text(json.dumps({**keys, "tensor_parallel_plan": plan}))
        return smpc("compile", f"{factories}:build", "--config", str(config), "--out", str(tmp_path / "out"))

    plan = {"blocks.*.inner": "colwise", "blocks.*.outer": "rowwise"}
    styles.write_text(json.dumps(plan))
    by_dict, by_file = compiled(plan), compiled(str(styles))
    assert by_dict == by_file
    assert by_dict[0] == 0
    assert "all_reduce P -> R" in by_dict[1]
    for wrong, says in (
        (
            {"blocks.*.left": "colwise"},
            "'blocks.*.left': expected the name of a module or parameter, found none that fits",
        ),
        ({"blocks.*.inner": "diagonal"}, "'blocks.*.inner': expected a style of colwise, "),
        ({"blocks.*.inner": 1}, "tensor_parallel_plan: expected str: str, found 'blocks.*.inner': 1"),
    ):
        status, _, err = compiled(wrong)
        assert status != 0
        assert says in err


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["{factories}:build"], ["-p/--pipeline-parallel-degree: required"]),
        (["{factories}:build", "-p", "0"], ["pipeline_parallel_degree: expected at least 1, found 0"]),
        (["{factories}:build", "-p", "two"], ["Invalid value for '-p'"]),
        (["{factories}:build", "-p", "2", "-m", "3"], ["batch size 8 (axis 0) is not divisible by microbatches = 3"]),
        (["{factories}:build", "-p", "2", "-m", "9"], ["is not divisible by microbatches = 9"]),
        (["{factories}:build", "-p", "90"], ["expected at most as many stages as modules, found 90 stages"]),
        (["{factories}:build", "-p", "2", "-t", "0"], ["tensor_parallel_degree: expected at least 1, found 0"]),
        (
            ["{factories}:build", "-p", "2", "-t", "2", "--tensor-parallel-plan", "x"],
            ["tensor_parallel_plan: expected"],
        ),
        (["{factories}:build", "-p", "2", "--tensor-parallel-plan", "x.json"], ["--tensor-parallel-plan 'x.json'"]),
        (
            ["{factories}:build", "-p", "2", "-t", "2", "--tensor-parallel-outputs", "x"],
            ["tensor_parallel_outputs: expected names among"],
        ),
        (
            ["{factories}:build", "-p", "2", "--tensor-parallel-plan", "huggingface"],
            ["tensor_parallel_plan and tensor_parallel_outputs have no effect"],
        ),
        (
            ["{factories}:build", "-p", "2", "--pipeline", "x", "-m", "0"],
            ["microbatches: expected at", "pipeline: exp"],
        ),
        (["{factories}:build", "-p", "2", "--memory-weight", "1.5"], ["memory_weight: expected from 0.0 to 1.0"]),
        (["{factories}:build", "-p", "2", "--active-microbatches", "0"], ["active_microbatches: expected at least 1"]),
        (["{factories}:raising", "-p", "2"], ["raising raised ValueError: no way ({factories}:32)"]),
        (["{factories}:unfit", "-p", "2"], ["RuntimeError: "]),
        (["{factories}:model", "-p", "2"], ["add --input NAME=DTYPE[d0,d1]"]),
        (["{factories}:model", "-p", "2", "--input", "hiden=float32[8,4,16]"], ["did you mean 'hidden'?"]),
        (["{factories}:model", "-p", "2", "--input", "hidden=float33[8]"], ["unknown dtype 'float33'"]),
        (["{factories}:model", "-p", "2", "--input", "hidden", "--input", "x=3"], ["expected NAME=", "expected NAME="]),
        (["missing.py:build", "-p", "2"], ["file 'missing.py' does not exist"]),
        (["missing.json", "-p", "2"], ["no such file"]),
        (["{factories}:build", "--config", "missing.json"], ["missing.json: cannot read it"]),
        (["{factories}:build", "-p", "2", "--out", "{factories}/out"], ["factories.py' is not a folder"]),
        (["{factories}:build", "-p", "2", "--bad"], ["No such option: --bad"]),
        ([], ["Missing argument 'target'."]),
    ],
)
def test_bad_compile_is_one_line_for_each_violation(smpc, factories, arguments, says):
    status, out, err = smpc("compile", *(argument.format(factories=factories) for argument in arguments))
    noise = "noise of the user's code\n"
    found = _errors(err.removeprefix(noise))
    assert (status, out) == (2, "")
    assert len(found) == len(says), err
    for line, expected in zip(found, says, strict=True):
        assert expected.format(factories=factories) in line


def test_misspelt_config_key_has_the_closest_name(smpc, factories, tmp_path):
    config = tmp_path / "smp.json"
    config.write_text('{"pipeline_parallel_degree": 2, "microbatchs": 2}')
    status, out, err = smpc("compile", f"{factories}:build", "--config", str(config))
    assert (status, out) == (2, "")
    assert _errors(err) == [f"Unrecognized config parameter microbatchs; did you mean microbatches? ({config})"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["-n", "0", "{factories}"], "-n: expected at least 1 rank, found 0"),
        (["-n", "2", "missing.py"], "script 'missing.py' does not exist"),
        (["-n", "x", "{factories}"], "Invalid value for '-n'"),
        (["-n", "2"], "Missing argument 'script'."),
    ],
)
def test_bad_run_starts_nothing(smpc, factories, arguments, says):
    status, out, err = smpc("run", *(argument.format(factories=factories) for argument in arguments))
    assert (status, out) == (2, "")
    (line,) = _errors(err)
    assert says in line


def test_path_that_is_no_utf8_is_shown_escaped(smpc):
    status, _, err = smpc("compile", b"/no/\xff\xfe.py:build".decode(errors="surrogateescape"), "-p", "2")
    assert status == 2
    assert r"\udcff\udcfe.py" in err


def test_debugging_shows_the_cause(smpc, factories, monkeypatch):
    monkeypatch.setenv("SMPC_DEBUG", "1")
    status, _, err = smpc("compile", f"{factories}:raising", "-p", "2")
    assert status == 2
    assert err.startswith("Traceback (most recent call last):")
    assert 'raise ValueError("no way")' in err


def test_help_version_and_environment(smpc):
    for arguments in ((), ("--help",), ("-h",)):
        status, out, _ = smpc(*arguments)
        assert status == 0
        assert all(command in out for command in ("compile", "run", "env"))
    status, out, _ = smpc("compile", "--help")
    assert status == 0
    assert "--pipeline-parallel" in out
    status, out, _ = smpc("--version")
    assert (status, out.split()[0]) == (0, "smpc")
    status, out, _ = smpc("env")
    names = [line.split()[0] for line in out.splitlines()]
    assert status == 0
    assert {"smpc", "torch", "python", "platform", "devices", "backends", "solvers", "transformers"} <= set(names)


@pytest.mark.parametrize("arguments", [("nonsense",), ("--nonsense",)])
def test_unknown_commands_are_errors(smpc, arguments):
    status, _, err = smpc(*arguments)
    assert status == 2
    assert len(_errors(err)) == 1


@pytest.mark.slow
def test_reports_have_the_same_bytes_whatever_the_hash_seed(factories, tmp_path):
    digests = []
    for seed in ("1", "2"):
        folder = tmp_path / seed
        script = "import sys; from smpc.cli import main; sys.exit(main())"
        options = ["-p", "2", "-m", "4", "--out", str(folder)]
        command = [sys.executable, "-c", script, "compile", f"{factories}:build", *options]
        done = subprocess.run(
            command, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        digests.append({path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()})
    assert digests[0] == digests[1]
    assert {"report.html", "timeline.json"} <= digests[0].keys()


def test_plot_is_a_png(smpc, factories, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "plot.png"
    status, _, err = smpc("compile", f"{factories}:build", "-p", "2", "-m", "4", "--plot", str(path))
    assert status == 0, err
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("name", "says"),
    [("plot.jpeg", "ends in .png"), ("missing/plot.png", "missing' does not exist"), (".png", "ends in .png")],
)
def test_a_plot_that_cannot_be_written_is_known_before_the_model_is_built(smpc, factories, tmp_path, name, says):
    status, out, err = smpc("compile", f"{factories}:build", "-p", "2", "--plot", str(tmp_path / name))
    assert (status, out) == (2, "")
    (line,) = _errors(err)
    assert says in line


def test_a_plot_without_matplotlib_is_one_line(smpc, factories, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # how Python marks what cannot be imported
    status, out, err = smpc("compile", f"{factories}:build", "-p", "2", "--plot", str(tmp_path / "plot.png"))
    assert (status, out) == (2, "")
    (line,) = _errors(err)
    assert "pip install 'smpc[plot]'" in line


def test_an_output_folder_in_a_place_that_takes_none_is_one_line(smpc, factories):
    # /proc takes no new folders, not even root's
    status, out, err = smpc("compile", f"{factories}:build", "-p", "2", "-m", "4", "--out", "/proc/smpc")
    assert (status, out) == (2, "")
    (line,) = _errors(err.removeprefix("noise of the user's code\n"))
    assert "/proc" in line


def test_a_process_ends_as_python_ends_it_but_keeps_its_modules(tmp_path):
    """Functions of atexit are called, whenever they were registered, threads are waited for, and all that was written is there."""
    script = """
import atexit, sys, tempfile, threading, time
atexit.register(print, "registered before")
from smpc.cli import main
class Kept:
    def __del__(self): print("taken apart")
kept = Kept()
kept_file = open("kept.txt", "w")
kept_file.write(sys.argv[1])
temporary = tempfile.NamedTemporaryFile(dir=".")
shown = threading.Event()  # else "a thread" may come before what the command prints, where that takes long
threading.Thread(target=lambda: (shown.wait(), time.sleep(0.3), print("a thread"))).start()
atexit.register(print, "registered last")
import smpc.cli.app as app
end = app._end_of_app
app._end_of_app = lambda status: (shown.set(), end(status))
sys.exit(main())
"""
    for arguments, status in ((["--version"], 0), (["nothing"], 2)):
        ended = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, cwd=tmp_path)
        assert ended.returncode == status, ended.stderr
        assert ended.stdout.splitlines()[-3:] == ["a thread", "registered last", "registered before"]
        assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("kept.txt", arguments[0])]
    assert ended.stderr.startswith("smpc: error:")
