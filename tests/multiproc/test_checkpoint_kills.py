"""Random kills while a checkpoint is saved: the newest whole one always loads bit-equal, none is lost or mixed.

A run saves two checkpoints and is killed in a third save. Drawn from a printed seed: 2 or 4 ranks, in the foreground or in the background,
a new step, the first step of all, a forced save of the last step, or pruning; who dies, and whether the others die with it; and the point:
a call of the checkpoint code into C (counted in a rehearsal), or a time. Then another job reads, cleans up and saves again.
"""

import os
import random
import shutil
import signal
import time
import warnings

import pytest
import torch
from checkpoint_harness import KillAt, content, run_ranks, shards, state, values_of

from smpc.checkpoint import Alone, BackgroundSaver, Checkpoint, Root, load, save, verify
from smpc.checkpoint.format.draft_content import VALUES

LAYOUTS = {2: ["pp", "rows", "dp"], 4: ["pp", "columns", "pp2tp", "dp"]}
SEED = int(os.environ.get("SMPC_KILL_SEED", "20240"))
REHEARSED = {}


def draw(seed):
    pick = random.Random(seed)
    size = pick.choice([2, 4])
    case = {
        "size": size,
        "layout": pick.choice(LAYOUTS[size]),
        "background": pick.random() < 0.5,
        "variant": pick.choice(["new", "first", "forced", "keep"]),
        "victim": pick.choice([0, pick.randrange(size)]),  # rank 0 publishes, so it dies more often
        "all_die": pick.random() < 0.4,
        "by_time": pick.random() < 0.3,
    }
    return case, pick.random()


def job(rank, channel, path, case, point):
    """Two saves and a third one, in which the victim dies at `point`. Returns how many calls and seconds the third took."""
    root, size = Root(path), channel.size
    if case["variant"] != "first":
        for step in (1, 2):
            save(root, f"step_{step}", content(step, case["layout"], rank, size), channel)
    tag = "step_2" if case["variant"] == "forced" else "step_3"
    settings = {"force": case["variant"] == "forced", "keep": 2 if case["variant"] == "keep" else None}
    third = content(3, case["layout"], rank, size)
    kill = KillAt(point if rank == case["victim"] else None)
    channel.exchange("ready")
    if rank == case["victim"]:
        with open(os.path.join(os.path.dirname(path), "armed"), "w"):
            pass
        kill.arm()
    begin = time.monotonic()
    if case["background"]:
        saver = BackgroundSaver(channel)
        saver.save(root, tag, third, **settings)
        for shard in third.shards:
            shard.tensor.fill_(-1)  # training goes on
        saver.wait()
        saver.close()
    else:
        save(root, tag, third, channel, **settings)
    kill.disarm()
    return kill.count, time.monotonic() - begin


def rehearse(case, folder):
    """How many calls and seconds the third save takes the victim."""
    key = (case["size"], case["layout"], case["background"], case["variant"], case["victim"])
    if key not in REHEARSED:
        place = folder / "rehearsal"
        place.mkdir()
        outcomes = run_ranks(case["size"], job, place, str(place / "run"), case, None)
        REHEARSED[key] = values_of(outcomes)[case["victim"]]
    return REHEARSED[key]


def check_one_run(seed, folder):
    case, fraction = draw(seed)
    calls, seconds = rehearse(case, folder)
    point = None if case["by_time"] else int(fraction * calls)
    path = str(folder / "run")

    def during(processes):
        victim = processes[case["victim"]]
        if case["by_time"]:
            while not (folder / "armed").exists():
                assert victim.is_alive() or (folder / "armed").exists()
                time.sleep(0.001)
            time.sleep(fraction * seconds)
            victim.kill()
        if case["all_die"]:
            victim.join(60)
            for process in processes:
                process.kill()

    begin = time.monotonic()
    outcomes = run_ranks(case["size"], job, folder, path, case, point, during=during)
    took = time.monotonic() - begin
    victim = outcomes[case["victim"]]
    assert case["by_time"] or victim.exitcode == -signal.SIGKILL, (case, victim)
    for rank, outcome in enumerate(outcomes):
        if rank != case["victim"] and outcome.error is not None and not case["all_die"]:
            assert "CheckpointError" in outcome.classes, outcome  # it hears of the death, and does not hang
    published = check(path, case)
    go_on(path, case, published)
    return case, point, took, published


def check(path, case):
    """Everything that can be seen is whole and bit-equal. Returns whether the third save is."""
    root = Root(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        newest = root.newest()
    steps = {tag: read_step(root.find(tag)) for tag in root.tags()}
    third = "step_2" if case["variant"] == "forced" else "step_3"
    published = steps.get(third) == 3
    if case["variant"] == "first":
        assert steps in ({}, {"step_3": 3})
    elif case["variant"] == "forced":
        assert steps in ({"step_1": 1, "step_2": 2}, {"step_1": 1, "step_2": 3})
    else:
        assert steps in (
            {"step_1": 1, "step_2": 2},
            {"step_1": 1, "step_2": 2, "step_3": 3},
            *([{"step_2": 2, "step_3": 3}] if case["variant"] == "keep" else []),
        )
    assert newest == (third if published else None if case["variant"] == "first" else "step_2")
    return published


def read_step(folder):
    """The step that a checkpoint holds, every tensor of which is as it was."""
    with Checkpoint.open(folder) as checkpoint:
        step = checkpoint.metadata["step"]
        assert verify(checkpoint) == []
        expected = state(step)
        assert set(expected) == {key for key in checkpoint.entries if key[0] != VALUES}
        for (kind, name), tensor in expected.items():
            assert torch.equal(checkpoint.read(kind, name), tensor)
        assert torch.equal(checkpoint.user()["epoch"][1], torch.tensor([step]))
        for rank in range(checkpoint.manifest.world_size):
            assert torch.equal(checkpoint.rank_state(rank)["rng"], torch.full((4,), rank))
    return step


def go_on(path, case, published):
    """The next job: loads, saves, and leaves nothing of the dead one's."""
    root = Root(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        newest = root.newest()
        if newest is not None:
            wanted = shards(state(0), "dp", 0, 1)
            load(root.find(newest), wanted, Alone())
            step = 3 if published else 2
            assert all(torch.equal(shard.tensor, state(step)[shard.kind, shard.name]) for shard in wanted)
        save(root, "step_4", content(4, "dp", 0, 1), Alone())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert root.newest() == "step_4"
    assert not [name for name in os.listdir(path) if name.startswith(".")]
    assert read_step(root.find("step_4")) == 4
    if newest is not None:
        assert read_step(root.find(newest)) == (3 if published else 2)


@pytest.mark.matrix(2)
@pytest.mark.parametrize("number", range(6))
def test_a_random_kill(number, tmp_path):
    print(f"seed {SEED + number}", draw(SEED + number))
    print(check_one_run(SEED + number, tmp_path))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("piece", range(6))
def test_300_random_kills(piece, tmp_path):
    first = SEED + 1000 + 50 * piece
    published = 0
    longest = 0.0
    for seed in range(first, first + 50):
        folder = tmp_path / str(seed)
        folder.mkdir()
        try:
            _, _, took, done = check_one_run(seed, folder)
        except BaseException:
            print(f"seed {seed}", draw(seed))
            raise
        published += done
        longest = max(longest, took)
        shutil.rmtree(folder)
    print(f"50 kills from seed {first}: {published} after publication, longest run {longest:.1f} s")
    assert 2 < published < 48  # kills hit both sides
