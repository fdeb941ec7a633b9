"""Damaged full checkpoints of training scripts: every rank is told, by the same text, before anything of the job is touched."""

import hashlib
import os
import random
import shutil
import warnings

import pytest
import torch
from checkpoint_jobs import Job, resume
from executor_harness import run_workers
from test_v1_checkpoint_full import start_gpt2
from v1_harness import feed, train_step

import smpc.v1 as smp
from smpc.cli import main
from smpc.errors import CheckpointError

SEED = int(os.environ.get("SMPC_FLIP_SEED", "240"))


def digest(model, optimizer):
    """Of everything in this rank's memory that resuming may change."""
    found = hashlib.sha256()
    for tensor in [*model.local_parameters(), *model.get_module().buffers()]:
        found.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    inner = getattr(optimizer, "optimizer", optimizer)
    for parameter in (each for group in inner.param_groups for each in group["params"]):
        for key, value in sorted(inner.state.get(parameter, {}).items()):
            data = (
                value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
                if torch.is_tensor(value)
                else repr(value).encode()
            )
            found.update(key.encode() + data)
    found.update(torch.get_rng_state().numpy().tobytes() + repr(random.getstate()).encode())
    return found.hexdigest()


def flip(path, bit):
    with open(path, "r+b") as file:
        file.seek(bit // 8)
        (byte,) = file.read(1)
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))


def files_of(path, tag):
    """The model's files and what was saved beside it; texts for others (config.json) are not read."""
    found = [path / tag] if (path / tag).is_file() else sorted((path / tag).glob("*.safetensors"))
    return found + [
        each for each in sorted((path / f"user_content_{tag}").rglob("*")) if each.is_file() and each.name != "newest"
    ]  # a marker that nobody asks


def flips(rank, folder, path, tag, start, form, count, seed):
    """Resume after every flip, and undo it. Returns what was not told."""
    model, optimizer, trained = start()
    trained()
    options = {"model": model, "optimizer": optimizer, "user_content": {"step": torch.ones(3)}, "full_format": form}
    smp.save_checkpoint(str(path), tag, partial=False, **options)
    trained()
    before, pick, wrong = digest(model, optimizer), random.Random(seed), []
    for _ in range(count):
        files = files_of(path, tag)
        file = pick.choice(files)
        bit = pick.randrange(8 * file.stat().st_size)
        if rank == 0:
            flip(file, bit)
        smp.barrier()
        try:
            resume(path, tag=tag, partial=False)
            wrong.append(f"{file.relative_to(path)}, bit {bit}: loaded")
        except CheckpointError as error:
            texts = smp.allgather(str(error), smp.WORLD)
            if len(set(texts)) > 1 or file.name not in texts[0]:
                wrong.append(f"{file.relative_to(path)}, bit {bit}: {texts}")
        if digest(model, optimizer) != before:
            wrong.append(f"{file.relative_to(path)}, bit {bit}: something has changed")
        smp.barrier()
        if rank == 0:
            flip(file, bit)
        smp.barrier()
    content, _ = resume(path, tag=tag, partial=False)
    assert torch.equal(content["step"], torch.ones(3)), "undone, it loads"
    assert digest(model, optimizer) != before
    return wrong


def start_job():
    job = Job((1, 2, 1))
    return job.model, job.optimizer, lambda: job.steps(0)


def start_hugging_face():
    model, optimizer, data = start_gpt2(1)

    def trained():
        optimizer.zero_grad()
        train_step(model, feed(data[0]), 1.0)
        optimizer.step()

    return model, optimizer, trained


FLIPPED = pytest.mark.parametrize(
    ("start", "form"),
    [(start_job, "torch"), (start_job, "safetensors"), (start_hugging_face, "safetensors")],
)


@pytest.mark.matrix(1)
@FLIPPED
def test_flipped_bits_of_full_checkpoints_are_told(tmp_path, start, form):
    assert run_workers(flips, 2, tmp_path, tmp_path / "run", "whole", start, form, 8, 1) == [[], []]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@FLIPPED
def test_240_flipped_bits_of_full_checkpoints_are_told(tmp_path, start, form):
    print(f"SMPC_FLIP_SEED={SEED}: 80 flips")
    assert run_workers(flips, 2, tmp_path, tmp_path / "run", "whole", start, form, 80, SEED) == [[], []]


# The marker, and folders that were renamed --------------------------------------------------------------------------


def resumed(path, **options):
    """The step that comes back, or the error's first line; and the warnings."""
    try:
        content, texts = resume(path, partial=False, **options)
    except CheckpointError as error:
        return str(error), []
    return None if content is None else content["step"], texts


def markers(rank, folder, path):
    job = Job((1, 1, 1))
    for step in (1, 2, 3):
        job.steps(step)
        job.save(path, f"s{step}", partial=False, user_content={"step": step})
    (path / "s0").write_bytes((path / "s1").read_bytes())  # a copy is no checkpoint of that name
    found = {"whole": resumed(path)}
    for name, data in (
        ("missing", None),
        ("empty", b""),
        ("garbage", b"\xff\x00\x1b[31m"),
        ("dangling", b"s9\n"),
        ("older", b"s1\n"),
    ):
        (path / "newest_full").unlink(missing_ok=True)
        if data is not None:
            (path / "newest_full").write_bytes(data)
        found[name] = resumed(path)
    (path / "newest_full").unlink()
    os.mkfifo(path / "newest_full")
    found["pipe"] = resumed(path)
    flip(path / "s3", 100 * 8)
    found["damaged header"] = resumed(path)
    os.truncate(path / "s2", 1000)
    found["truncated"] = resumed(path)
    shutil.rmtree(path / "user_content_s1")
    found["nothing whole"] = resumed(path)
    found["elsewhere"] = resumed(path / "none")
    return found


def test_the_newest_full_checkpoint_is_found_without_its_marker(tmp_path):
    (found,) = run_workers(markers, 1, tmp_path, tmp_path / "run")
    assert {key: step for key, (step, _) in found.items() if key not in ("nothing whole", "elsewhere")} == {
        **dict.fromkeys(("whole", "missing", "empty", "garbage", "dangling", "older", "pipe"), 3),
        "damaged header": 2,
        "truncated": 1,
    }
    assert found["whole"][1] == []
    for key, said in (
        ("missing", "nothing"),
        ("garbage", r"\x1b[31m"),
        ("dangling", "'s9'"),
        ("older", "'s1'"),
        ("pipe", "nothing"),
    ):
        assert any(f"names {said}" in text or said in text for text in found[key][1]), found[key]
        assert any("not s3, the last whole checkpoint" in text for text in found[key][1])
    assert any(text.startswith(f"ignored: {tmp_path / 'run' / 's3'}: ") for text in found["damaged header"][1])
    assert found["nothing whole"][0].startswith(f"{tmp_path / 'run'}: none of the full checkpoints there is whole")
    assert found["elsewhere"][0] is None
    assert any("training starts anew" in text for text in found["elsewhere"][1])


def renamed(rank, folder, path):
    job = Job((1, 1, 1))
    for step in (1, 2):
        job.steps(step)
        job.save(path, f"s{step}", partial=False, user_content={"step": step})

    def exchange(one, other):
        (path / one).rename(path / "aside")
        (path / other).rename(path / one)
        (path / "aside").rename(path / other)

    found = []
    before = digest(job.model, job.optimizer)
    exchange("s1", "s2")
    found += [resumed(path, tag="s1")[0], resumed(path, tag="s1", load_optimizer=False)[0], resumed(path)[0]]
    exchange("user_content_s1", "user_content_s2")  # all of both: still not what the names say
    found += [resumed(path, tag="s1")[0]]
    exchange("s1", "s2")  # the models are right again, their content is not
    found += [resumed(path, tag="s1")[0]]
    assert digest(job.model, job.optimizer) == before
    exchange("user_content_s1", "user_content_s2")
    assert [resumed(path, tag=tag)[0] for tag in ("s1", "s2")] == [1, 2]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        os.rename(path / "s1", path / "best")
        found.append(resumed(path, tag="best", load_optimizer=False)[0])
        assert main(["checkpoint", "convert", str(path / "best"), str(path / "mine"), "--to", "full"]) == 0
        found.append(smp.resume_from_checkpoint(str(path), tag="mine", partial=False, load_optimizer=False))
    return found


def test_full_checkpoints_that_were_renamed_or_exchanged_are_refused(tmp_path):
    (found,) = run_workers(renamed, 1, tmp_path, tmp_path / "run")
    run = tmp_path / "run"
    assert found[0].startswith(
        f"{run / 's1'}: it was saved as s2, so it was renamed, copied or exchanged with another; rename it to s2"
    )
    assert found[1] == found[0]
    assert found[2].startswith(f"{run}: none of the full checkpoints there is whole")
    assert found[3] == found[0]
    assert f"it does not belong to {run / 's1'}, which is of another save" in found[4]
    assert found[5].startswith(f"{run / 'best'}: it was saved as s1")
    assert found[6] is None  # converted, it is a model of its own


def partials(rank, folder, path):
    """What a partial checkpoint has besides model and optimizer is verified first, too: random state, user content."""
    job = Job((1, 2, 1))
    job.steps(0)
    job.save(path, "a", user_content={"step": torch.ones(3)})
    job.steps(1)
    wrong, before = [], digest(job.model, job.optimizer)
    files = sorted((path / "a_partial").iterdir())
    pick = random.Random(2)
    for file in files:
        for bit in [pick.randrange(8 * file.stat().st_size) for _ in range(2)]:
            if rank == 0:
                flip(file, bit)
            smp.barrier()
            try:
                smp.resume_from_checkpoint(str(path), "a")
                wrong.append(f"{file.name}, bit {bit}: loaded")
            except CheckpointError as error:
                texts = smp.allgather(str(error), smp.WORLD)
                wrong += [] if len(set(texts)) == 1 and file.name in texts[0] else [f"{file.name}, bit {bit}: {texts}"]
            if digest(job.model, job.optimizer) != before:
                wrong.append(f"{file.name}, bit {bit}: something has changed")
            smp.barrier()
            if rank == 0:
                flip(file, bit)
            smp.barrier()
    return wrong


def test_flipped_bits_of_partial_checkpoints_change_nothing(tmp_path):
    assert run_workers(partials, 2, tmp_path, tmp_path / "run") == [[], []]
