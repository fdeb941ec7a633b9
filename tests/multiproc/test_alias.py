"""Scripts that import `smdistributed.modelparallel.torch` or `torch.sagemaker`: `smpc.alias`, `smpc run --alias`, and SMPC_ALIAS."""

import importlib
import json
import os
import shutil
import socket
import subprocess
import sys

import installed
import pytest
import warm

from smpc.aliasing import TARGETS

LIMIT = 240
PARAMETERS = json.dumps({"partitions": 2, "microbatches": 2, "ddp": False})
# Two ranks of a pipeline, configured by the environment alone, as Hugging Face's Trainer starts them.
TRAIN = """
import smdistributed.modelparallel.torch as smp
import torch
from smdistributed.modelparallel import __version__
from smdistributed.modelparallel.torch.nn import FusedLayerNorm

def numbers(worker_id):
    import smdistributed.modelparallel.torch as again
    torch.manual_seed(again.size.__name__ == "size")

@smp.step
def train(model, x):
    loss = model(x).square().mean()
    model.backward(loss)
    return loss

if __name__ == "__main__":
    smp.init()
    spawned = {"num_workers": 1, "multiprocessing_context": "spawn", "worker_init_fn": numbers}
    loader = torch.utils.data.DataLoader(torch.ones(4, 8), batch_size=4, **(spawned if smp.rank() == 0 else {}))
    torch.manual_seed(1)
    model = smp.DistributedModel(torch.nn.Sequential(torch.nn.Linear(8, 8), FusedLayerNorm(8), torch.nn.Linear(8, 8)))
    for x in loader:
        loss = train(model, x).reduce_mean().item()
    print(f"rank {smp.rank()} of {smp.pp_size()} loss {loss:.6f} version {__version__}", flush=True)
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    return installed.install(tmp_path_factory.mktemp("installed"))


def environment(**changes):
    steering = ("PYTHONPATH", "SMPC_ALIAS", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME")
    plain = {name: value for name, value in os.environ.items() if name not in steering}
    return {**plain, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "SM_HP_MP_PARAMETERS": PARAMETERS, **changes}


def run(command, folder, status=0, **changes):
    found = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        cwd=folder,
        env=environment(**changes),
    )
    assert found.returncode == status, found.stdout + found.stderr
    return found


@pytest.fixture
def train(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(TRAIN)
    return path


def check_losses(text):
    lines = sorted(line[line.rindex("rank ") :] for line in text.splitlines() if " loss " in line)
    assert [line.split(" loss ")[0] for line in lines] == ["rank 0 of 2", "rank 1 of 2"], text
    assert len({line.split(" loss ")[1] for line in lines}) == 1, text


@pytest.mark.matrix(1)
@pytest.mark.parametrize("launcher", ["smpc", "torchrun", "mpirun"])
def test_an_unmodified_script_trains_under_every_launcher_spawned_workers_included(launcher, python, train):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    if launcher == "smpc":
        check_losses(
            run([python.parent / "smpc", "run", "--console", "all", "--alias", "-n", "2", train], train.parent).stdout
        )
    elif launcher == "torchrun":
        command = [python, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", port, train]
        check_losses(run(command, train.parent, SMPC_ALIAS="1").stdout)
    else:
        if shutil.which("mpirun") is None:
            pytest.skip("needs Open MPI")
        mpirun = [
            "mpirun",
            "--allow-run-as-root",
            "--oversubscribe",
            "-n",
            "2",
            "-x",
            "SMPC_ALIAS",
            "-x",
            "SM_HP_MP_PARAMETERS",
        ]
        check_losses(run([*mpirun, python, "-u", train], train.parent, SMPC_ALIAS="1", MASTER_PORT=port).stdout)


def script(tmp_path, text):
    (tmp_path / "script.py").write_text(text)
    return tmp_path / "script.py"


def test_without_the_variable_nothing_is_there(python, tmp_path):
    found = run([python, script(tmp_path, "import smdistributed.modelparallel.torch")], tmp_path, status=1)
    assert "No module named 'smdistributed'" in found.stderr


@pytest.mark.long
def test_importing_starts_nothing_and_every_module_has_its_spec(python, tmp_path):
    text = f"""
import importlib, importlib.util, sys
for name in {[name for name in TARGETS if not name.startswith("torch.")]}:
    assert importlib.util.find_spec(name).name == name, name
    assert importlib.import_module(name).__spec__ is importlib.util.find_spec(name), name
assert "torch" not in sys.modules and "smpc.v1" not in sys.modules
assert importlib.util.find_spec("smdistributed.modelparallel.torch.unknown") is None
assert importlib.util.find_spec("smdistributed.dataparallel") is None
import smdistributed.modelparallel.torch as smp, smdistributed.modelparallel as package, torch.distributed
assert package.torch is smp and package.__version__ == smp.__version__
assert not smp.is_initialized() and not torch.distributed.is_initialized()
"""
    assert run([python, script(tmp_path, text)], tmp_path, SMPC_ALIAS="1").stderr == ""


@pytest.mark.matrix(1)
@pytest.mark.parametrize(("body", "where"), [("", "__init__.py"), (None, "smdistributed")])
def test_a_package_that_is_really_installed_wins_and_is_told(python, tmp_path, body, where):
    package = tmp_path / "smdistributed" / "modelparallel"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("mine = True\n")
    if body is not None:
        (tmp_path / "smdistributed" / "__init__.py").write_text(body)
    text = """
import smdistributed.modelparallel, importlib.util
assert smdistributed.modelparallel.mine
assert importlib.util.find_spec("smdistributed.modelparallel.torch") is None
"""
    found = run([python, script(tmp_path, text)], tmp_path, SMPC_ALIAS="1")
    assert "smdistributed.modelparallel is installed" in found.stderr
    assert where in found.stderr
    found = run([python, script(tmp_path, f"import smpc\nsmpc.alias()\n{text}")], tmp_path)
    assert found.stderr.count("modelparallel is installed") == 1


def test_another_part_of_the_namespace_stays_what_it_is(tmp_path):
    (tmp_path / "smdistributed" / "dataparallel").mkdir(parents=True)
    (tmp_path / "smdistributed" / "dataparallel" / "__init__.py").write_text("mine = True\n")
    text = """
import smpc; smpc.alias()
import smdistributed.dataparallel, smdistributed.modelparallel.torch as smp
assert smdistributed.dataparallel.mine and smp.size
"""
    found = warm.python(script(tmp_path, f"import warnings; warnings.simplefilter('error')\n{text}"), LIMIT)
    assert (found.returncode, found.stderr) == (0, "")


def test_a_name_that_is_missing_is_named_with_where_to_look(tmp_path):
    text = "from smpc import alias; alias(); import smdistributed.modelparallel.torch as s; s.nope"
    found = warm.python(script(tmp_path, text), LIMIT)
    assert found.returncode == 1
    assert "has no 'nope'; docs/coming_from_smp.md" in found.stderr


def test_every_target_is_a_module_and_star_imports_its_names(tmp_path):
    code = f"""
import importlib, smpc, types, warnings
warnings.simplefilter("error")
smpc.alias(); smpc.alias()
for name, target in {dict(TARGETS)!r}.items():
    if target is not None:
        wanted, found = importlib.import_module(target), importlib.import_module(name)
        assert set(dir(wanted)) <= set(dir(found))
        own = [name for name in getattr(wanted, '__all__', ()) if not isinstance(getattr(wanted, name), types.ModuleType)]
        assert all(getattr(found, name) is getattr(wanted, name) for name in own)
from smdistributed.modelparallel.torch import *
import smpc.v1
assert DistributedModel is smpc.v1.DistributedModel
"""
    found = warm.python(script(tmp_path, code), LIMIT)
    assert (found.returncode, found.stderr) == (0, "")
    assert "smdistributed" not in sys.modules
    assert importlib.util.find_spec("smdistributed") is None
