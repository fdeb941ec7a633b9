"""Hugging Face's Trainer of transformers 4.30.2, the real package, on two real ranks: its losses equal plain PyTorch's."""

import json
import subprocess
import sys

import pytest
import releases
from test_scripts import HERE, LIMIT, run

RELEASE = "4.30.2"
COMMON = {"partitions": 1, "microbatches": 2, "ddp": True}
# What the job is configured with, and how many shards of the data there are.
CASES = {
    "pp 2": ({"partitions": 2}, 1),
    "tp 2": ({"tensor_parallel_degree": 2}, 2),
    "ddp 2": ({"shard_optimizer_state": True}, 2),
    "sdp 2": ({"sharded_data_parallel_degree": 2}, 2),
}
ROUNDED = {"abs": 6e-5}  # as the Trainer writes losses


def environment():
    """As SageMaker's container sets it. Its Trainer reads its own files of random state with pickle; accelerate would look for a GPU."""
    return {
        **releases.environment(RELEASE),
        "SM_FRAMEWORK_PARAMS": json.dumps({"sagemaker_mpi_enabled": True}),
        "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1",
        "ACCELERATE_USE_CPU": "true",
    }


def in_plain_pytorch(num_shards):
    command = [sys.executable, str(HERE / "plain_trainer.py"), str(num_shards)]
    found = subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT, env=releases.environment(RELEASE), check=False
    )
    assert found.returncode == 0, found.stderr
    return [float(line) for line in found.stdout.split()]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("case", CASES)
def test_it_trains_evaluates_saves_and_goes_on(tmp_path, case):
    degrees, num_shards = CASES[case]

    def train(folder, *arguments):
        given = ("--output_dir", tmp_path / folder, *arguments)
        reports, _ = run("trainer.py", *given, environ=environment(), is_forked=False, **{**COMMON, **degrees})
        return reports[0]

    *losses, after = in_plain_pytorch(num_shards)
    whole = train("whole")
    assert whole["loss"] == pytest.approx(losses, **ROUNDED)
    assert whole["eval_loss"] == [pytest.approx(after, rel=2e-5)]
    first = train("parts", "--max_steps", 2)
    assert (tmp_path / "parts" / "checkpoint-2" / "pytorch_model.bin").is_file()
    rest = train("parts", "--resume", 1)
    assert first["loss"] + rest["loss"] == whole["loss"]
    assert rest["eval_loss"] == pytest.approx(whole["eval_loss"], rel=1e-6)
