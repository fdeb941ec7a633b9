"""Scripts that import smdistributed, unmodified, on two real ranks: their losses are those of plain PyTorch on the same data."""

import itertools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import data
import forked_launch
import pytest
import server
import torch
import torch.nn.functional as F
from models import MODELS, Mine, MineConfig
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from smpc.launch.job import Job

HERE = Path(__file__).parent
SMPC = [
    sys.executable,
    "-P",
    "-c",
    "import sys; from smpc.cli import main; sys.exit(main())",
    "run",
    "--console",
    "all",
    "--alias",
    "-n",
]
LIMIT = 240
CLOSE = {"rel": 2e-5, "abs": 1e-6}


def run(script, *arguments, status=0, ranks=2, environ=None, is_forked=True, **parameters):
    """What the ranks reported, by rank and name; the ranks say the same where the script does.

    `is_forked`: the launcher's classes start them in a process that has imported torch; else its command does, as a user would.
    """
    steering = ("SM_HP_MP_PARAMETERS", "SMPC_ALIAS")
    given = os.environ if environ is None else environ
    environ = {name: value for name, value in given.items() if name not in steering} | {"OMP_NUM_THREADS": "1"}
    if parameters:
        environ["SM_HP_MP_PARAMETERS"] = json.dumps(parameters)
    command = [str(HERE / script), *map(str, arguments)]
    found, said, errors = (_forked if is_forked else _started)(ranks, command, environ)
    assert found == status, said[-2000:] + errors[-6000:]
    reports = [{} for _ in range(ranks)]
    for line in said.splitlines():
        if line.startswith('{"rank"'):
            report = json.loads(line)
            reports[report["rank"]].setdefault(report["what"], []).append(report["value"])
    return reports, errors


def _started(ranks, command, environ):
    found = subprocess.run(
        [*SMPC, str(ranks), "--no-prefix", *command],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        env=environ,
        check=False,
    )
    return found.returncode, found.stdout, found.stderr


def _forked(ranks, command, environ):
    context = server.context()
    with tempfile.TemporaryDirectory() as folder:
        driver = context.Process(target=_drive, args=(Path(folder), ranks, command, environ))
        driver.start()
        driver.join(LIMIT)
        if driver.is_alive():
            driver.kill()  # the ranks die with it
            driver.join()
            pytest.fail(f"{command} did not end within {LIMIT} s")
        result = Path(folder, "result")
        logs = "".join(log.read_text() for log in sorted(Path(folder).glob("*.log")))
        assert result.exists(), f"the launcher of {command} ended with {driver.exitcode}: {logs[-6000:]}"
        status, shown = json.loads(result.read_text())
    return status, logs, logs + shown


def _drive(folder, ranks, command, environ):
    os.environ.clear()
    os.environ.update(environ)
    job = Job(command[0], tuple(command[1:]), ranks, variables={"SMPC_ALIAS": "1"})
    (folder / "result").write_text(json.dumps(forked_launch.run(job, folder)[:2]))


# -- MNIST ---------------------------------------------------------------------------------------------------------------


def mnist_layers():
    """The network of mnist.py as one list, with weights drawn in the same order."""
    torch.manual_seed(5)
    return nn.ModuleList([nn.Conv2d(1, 4, 3, 1), nn.Conv2d(4, 8, 3, 1), nn.Linear(8 * 4 * 4, 16), nn.Linear(16, 10)])


def mnist_forward(layers, x):
    first, second, hidden, out = layers
    x = torch.flatten(F.max_pool2d(F.relu(second(F.relu(first(x)))), 2), 1)
    return F.log_softmax(out(F.relu(hidden(x))), 1)


def mnist_in_plain_pytorch(num_replicas, runs=1, steps=4, batch=8):
    """Losses of each run; a second run goes on from the first, on the same batches."""
    layers = mnist_layers()
    optimizer = torch.optim.Adadelta(layers.parameters(), lr=0.5)
    found = []
    for _ in range(runs):
        losses = []
        for images, labels in data.images(steps, batch * num_replicas, 0, 1):
            optimizer.zero_grad()
            loss = F.nll_loss(mnist_forward(layers, images), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        found.append(losses)
    with torch.no_grad():
        test = [
            F.nll_loss(mnist_forward(layers, x), y, reduction="sum") for x, y in data.images(2, batch, 0, 1, seed=99)
        ]
    return found, sum(test).item() / (2 * batch)


@pytest.mark.matrix(1)
@pytest.mark.parametrize(
    ("parameters", "num_replicas"),
    [
        ({"partitions": 2, "microbatches": 4, "ddp": True}, 1),
        ({"pipeline_parallel_degree": 1, "microbatches": 2, "ddp": 1}, 2),
    ],
    ids=["pp 2", "ddp 2"],
)
def test_mnist(parameters, num_replicas):
    (losses,), test = mnist_in_plain_pytorch(num_replicas)
    reports, _ = run("mnist.py", is_forked=num_replicas == 1, **parameters)
    for report in reports:
        assert report["loss"] == pytest.approx(losses, **CLOSE)
        assert report["test loss"] == [pytest.approx(test, **CLOSE)]


def test_mnist_goes_on_from_what_smp_save_saved(tmp_path):
    (first, second), _ = mnist_in_plain_pytorch(1, runs=2)
    parameters = {"partitions": 2, "microbatches": 4}
    reports, _ = run("mnist.py", "--save", tmp_path, **parameters)
    assert reports[0]["loss"] == pytest.approx(first, **CLOSE)
    assert sorted(os.listdir(tmp_path)) == ["net.pt_0_0", "net.pt_1_0"]
    reports, _ = run("mnist.py", "--load", tmp_path, **parameters)
    # The script begins with the learning rate that its scheduler left in the saved groups.
    assert len(reports[0]["loss"]) == len(second)
    assert reports[0]["loss"][0] == pytest.approx(second[0], **CLOSE)


# -- GPT-2 ---------------------------------------------------------------------------------------------------------------

SIZES = {
    "vocab_size": 61,
    "n_positions": 16,
    "n_embd": 16,
    "n_layer": 4,
    "n_head": 4,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def gpt2():
    torch.manual_seed(12345)
    return GPT2LMHeadModel(GPT2Config(**SIZES, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False))


def gpt2_in_plain_pytorch(num_shards, steps=4, start=None):
    """Losses, the loss after them, and the model. `start`: the weights to begin with."""
    model = gpt2()
    if start is not None:
        model.load_state_dict(start)
    decays = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decays}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))
    losses = []
    for ids, _ in data.tokens(steps, 4 * num_shards, 0, 1):
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    with torch.no_grad():
        [(ids, _)] = data.tokens(1, 4, 0, 1, seed=77)
        return losses, model(input_ids=ids, labels=ids).loss.item(), model


GPT2_CASES = {
    "tp 2": (["--tensor_parallel_degree", 2], 2),
    "tp 2 prescaled": (["--tensor_parallel_degree", 2, "--prescaled_batch", 1], 1),
    "pp 2": (["--pipeline_parallel_degree", 2, "--activation_strategy", "group_2"], 1),
    "pp 2 without distributed layers": (["--pipeline_parallel_degree", 2, "--use_distributed_transformer", 0], 1),
    "ddp 2": (["--shard_optimizer_state", 1, "--static_mode", 1], 2),
}


SLOW = ("tp 2 prescaled", "pp 2 without distributed layers")


@pytest.mark.matrix(2)
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow) if case in SLOW else case for case in GPT2_CASES]
)
def test_gpt2(case, tmp_path):
    arguments, num_shards = GPT2_CASES[case]
    losses, test, model = gpt2_in_plain_pytorch(num_shards)
    reports, errors = run("gpt2.py", *arguments, "--export", tmp_path, is_forked=case != "pp 2")
    for report in reports:
        assert report["loss"] == pytest.approx(losses, **CLOSE)
    assert reports[0]["test loss"] == [pytest.approx(test, **CLOSE)]
    saved = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(saved[name], value, rtol=1e-3, atol=1e-5)
    assert ("static_mode" in errors) == (case == "ddp 2")


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [["--pipeline_parallel_degree", 2], ["--tensor_parallel_degree", 2]],
    ids=["pp 2", "tp 2"],
)
def test_gpt2_goes_on_from_a_partial_checkpoint(tmp_path, arguments):
    whole, _ = run("gpt2.py", *arguments)
    first, _ = run("gpt2.py", *arguments, "--checkpoint_dir", tmp_path, "--max_steps", 2)
    assert (tmp_path / "newest").read_text().strip() == "trained_gpt-2steps_partial"
    rest, _ = run("gpt2.py", *arguments, "--checkpoint_dir", tmp_path, "--load_partial", 1)
    assert first[0]["loss"] + rest[0]["loss"] == whole[0]["loss"]
    again, _ = run("gpt2.py", *arguments, "--checkpoint_dir", tmp_path, "--max_steps", 2)  # over what is there
    assert again == first


@pytest.mark.long
def test_gpt2_starts_from_a_full_model(tmp_path):
    run("gpt2.py", "--tensor_parallel_degree", 2, "--checkpoint_dir", tmp_path, "--save_full", 1, "--max_steps", 2)
    weights = torch.load(tmp_path / "trained_gpt-2steps", weights_only=True)
    _, _, model = gpt2_in_plain_pytorch(2, steps=2)
    start = model.state_dict()
    for name, value in weights.items():
        torch.testing.assert_close(value, start[name], rtol=1e-3, atol=1e-5)
    losses, _, _ = gpt2_in_plain_pytorch(1, start=start)
    pipeline = ["--pipeline_parallel_degree", 2, "--checkpoint_dir", tmp_path, "--checkpoint_freq", 9]
    reports, _ = run("gpt2.py", *pipeline, "--load_full", "trained_gpt-2steps")
    assert reports[0]["loss"] == pytest.approx(losses, rel=1e-4)


# -- other families, and a model of one's own -----------------------------------------------------------------------------


def family(name):
    torch.manual_seed(3)
    return (Mine(MineConfig()) if name == "mine" else MODELS[name]()).train()


def family_in_plain_pytorch(name, num_shards, model=None, steps=3):
    """Losses of each step, which train the model, if one is given."""
    model = family(name) if model is None else model
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=0.01, eps=1e-5
    )  # biases of keys have gradients of rounding alone
    losses = []
    for ids, mask in itertools.islice(data.tokens(3, 4 * num_shards, 0, 1), steps):
        optimizer.zero_grad()
        loss = model(input_ids=ids, attention_mask=mask, labels=ids)["loss"]
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


TENSOR_PARALLEL = ["--tensor_parallel_degree", 2]
PIPELINE = ["--partitions", 2]
DEFAULT = {"gptneox": TENSOR_PARALLEL, "t5": PIPELINE}
DEGREES = [(TENSOR_PARALLEL, 2), (PIPELINE, 1), ([], 2)]  # with the number of shards of the data


@pytest.mark.matrix(1)
@pytest.mark.parametrize(
    ("name", "arguments", "num_shards"),
    [
        pytest.param(name, arguments, shards, marks=[] if arguments == DEFAULT.get(name) else pytest.mark.slow)
        for name in (*MODELS, "mine")
        for arguments, shards in DEGREES
    ],
)
def test_families_train_and_go_on(name, arguments, num_shards, tmp_path):
    given = ("--model_type", name, *arguments, "--checkpoints", tmp_path)
    reports, _ = run("families.py", *given)
    expected = family_in_plain_pytorch(name, num_shards)
    for report in reports:
        assert report["loss"] == pytest.approx(expected, rel=2e-5)
        assert report["axes"] == [[0, 1] if arguments == TENSOR_PARALLEL else []]
        assert report["translations"] == [0 if name == "mine" else 1]
    again, _ = run("families.py", *given, "--load", "partial")
    for report, first in zip(again, reports, strict=True):
        assert report["loss"] == first["loss"][1:]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*MODELS, "mine"])
def test_families_start_from_a_full_model(name, tmp_path):
    """Of slices, in stages and in slices; what is saved is plain PyTorch's model after a step."""
    run("families.py", "--model_type", name, *TENSOR_PARALLEL, "--checkpoints", tmp_path)
    model = family(name)
    family_in_plain_pytorch(name, 2, model, steps=1)
    if name != "mine":
        saved = torch.load(tmp_path / "fullmodel.pt", weights_only=True)
        for key, value in model.state_dict().items():
            torch.testing.assert_close(saved[key], value, rtol=1e-3, atol=1e-5)
    for arguments, num_shards in DEGREES[:2]:
        start = family(name)
        start.load_state_dict(model.state_dict())
        expected = family_in_plain_pytorch(name, num_shards, start)
        given = ("--model_type", name, *arguments, "--checkpoints", tmp_path, "--load", "full")
        reports, errors = run("families.py", *given)
        for report in reports:
            assert report["loss"] == pytest.approx(expected, rel=1e-4)
        assert "has no optimizer state: the optimizer begins anew" in errors
