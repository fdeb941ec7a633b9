"""Several ranks save and load together: any topology, and one rank's trouble is everybody's error."""

import dataclasses
import os
import resource
import shutil
import time

import pytest
import torch
import torch.distributed as dist
from checkpoint_harness import TIMEOUT, content, empty, peak_of, run_ranks, shards, state, values_of
from locations import GOLDEN
from safetensors.torch import load_file

from smpc.checkpoint import (
    Alone,
    BackgroundSaver,
    Checkpoint,
    GroupChannel,
    Root,
    Shard,
    StoreChannel,
    load,
    save,
    save_full,
    verify,
)
from smpc.errors import CheckpointError

LAYOUTS = [("dp", 1), ("pp", 2), ("rows", 2), ("columns", 2), ("dp", 2), ("pp", 4), ("pp2tp", 4), ("columns", 4)]


def save_and_load(rank, channel, path, layouts):
    """Save in this job's layouts, then load what all jobs so far have saved in each of them."""
    root = Root(path)
    for layout in layouts:
        save(root, f"{layout}_{channel.size}", content(1, layout, rank, channel.size), channel)
    expected = state(1)
    for tag in root.tags():
        for layout in layouts:
            wanted = empty(shards(expected, layout, rank, channel.size))
            load(root.find(tag), wanted, channel)
            truth = shards(expected, layout, rank, channel.size)
            assert all(torch.equal(a.tensor, b.tensor) for a, b in zip(wanted, truth, strict=True)), (tag, layout)
    return {tag: os.listdir(root.find(tag)) for tag in root.tags()}


def test_what_two_ranks_save_one_loads_bit_equal_and_the_other_way_round(tmp_path):
    path = str(tmp_path / "run")
    save_and_load(0, Alone(), path, ["dp"])
    values_of(run_ranks(2, save_and_load, tmp_path, path, ["pp", "columns"]))
    only_load(0, Alone(), path, ["dp"])
    assert Root(path).tags() == ["dp_1", "pp_2", "columns_2"]


@pytest.mark.slow
def test_what_any_topology_saves_every_other_loads_bit_equal(tmp_path):
    path = str(tmp_path / "run")
    layouts = {size: [layout for layout, ranks in LAYOUTS if ranks == size] for size in (4, 2, 1)}
    save_and_load(0, Alone(), path, layouts[1])
    values_of(run_ranks(2, save_and_load, tmp_path, path, layouts[2]))
    values_of(run_ranks(4, save_and_load, tmp_path, path, layouts[4]))
    values_of(run_ranks(2, only_load, tmp_path, path, layouts[2]))
    only_load(0, Alone(), path, layouts[1])
    assert len(Root(path).tags()) == len(LAYOUTS)


def only_load(rank, channel, path, layouts):
    for tag in Root(path).tags():
        for layout in layouts:
            wanted = empty(shards(state(1), layout, rank, channel.size))
            load(Root(path).find(tag), wanted, channel)
            truth = shards(state(1), layout, rank, channel.size)
            assert all(torch.equal(a.tensor, b.tensor) for a, b in zip(wanted, truth, strict=True)), (tag, layout)


def error_of(function):
    try:
        function()
    except CheckpointError as error:
        return str(error)
    return None


def troubles(rank, channel, path):
    """One trouble after the other, on rank 1 alone where it can be; what each rank was told."""
    root, told = Root(path), {}
    mine = lambda step: content(step, "dp", rank, channel.size, numel=300_000)  # noqa: E731
    save(root, "step_1", mine(1), channel)
    told["exists"] = error_of(lambda: save(root, "step_1", mine(2), channel))
    told["tags"] = error_of(lambda: save(root, f"tag_{rank}", mine(2), channel))
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, limit[1]))  # a disk that fills up, for this rank alone
    told["full"] = error_of(lambda: save(root, "step_2", mine(2), channel))
    saver = BackgroundSaver(channel)
    saver.save(root, "step_2", mine(2))
    told["full in background"] = error_of(saver.wait)
    resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    told["after the error"] = error_of(lambda: saver.save(root, "step_3", mine(3)))
    dist.barrier()
    saver.save(root, "step_4", mine(4))  # back to back, with a barrier of another group between
    dist.barrier()
    saver.save(root, "step_5", mine(5))
    saver.check()
    saver.close()
    contradicting = [Shard.whole("model", "w", torch.zeros(3 + rank))]
    told["contradiction"] = error_of(
        lambda: save(root, "x", dataclasses.replace(mine(1), shards=contradicting), channel)
    )
    half = [Shard.of("model", "w", torch.zeros(1), [3], [rank])]
    told["gap"] = error_of(lambda: save(root, "x", dataclasses.replace(mine(1), shards=half), channel))
    return told


def test_one_rank_in_trouble_is_an_error_on_all_and_nothing_is_published(tmp_path):
    path = str(tmp_path / "run")
    first, second = values_of(run_ranks(2, troubles, tmp_path, path))
    assert first == second
    assert "step_1 exists and is not overwritten" in first["exists"]
    assert "expected the same on every rank, found tag_0, tag_1" in first["tags"]
    for key in ("full", "full in background"):
        assert f"rank 1: cannot write {path}/.step_2." in first[key], first[key]
        assert "File too large" in first[key]
        assert "rank 0:" not in first[key]
    assert first["after the error"] is None
    assert "torch.float32" not in first["contradiction"]
    assert "model w: F32 of shape [3] on rank 0, F32 of shape [4] on rank 1" in first["contradiction"]
    assert "model w: 1 of 3 elements belong to no shard" in first["gap"]
    assert Root(path).tags() == ["step_1", "step_3", "step_4", "step_5"]
    assert sorted(os.listdir(path)) == ["newest", "step_1", "step_3", "step_4", "step_5"]
    for tag, step in (("step_1", 1), ("step_5", 5)):
        with Checkpoint.open(f"{path}/{tag}") as checkpoint:
            assert verify(checkpoint) == []
            assert all(torch.equal(checkpoint.read(*key), tensor) for key, tensor in state(step, 300_000).items())
            written = [checkpoint.manifest.files[f"model_0000{rank}.safetensors"].size for rank in (0, 1)]
            assert min(written) > 0.5 * max(written)  # replicas are written once, by turns


def flip(path):
    with open(path, "r+b") as file:
        file.seek(-1000, os.SEEK_END)
        byte = file.read(1)
        file.seek(-1000, os.SEEK_END)
        file.write(bytes([byte[0] ^ 4]))


def truncate(path):
    os.truncate(path, os.path.getsize(path) - 1)


def empty_file(path):
    os.truncate(path, 0)


def swap(path):
    other = path.replace("optimizer", "model")
    os.rename(path, f"{path}.x")
    os.rename(other, path)
    os.rename(f"{path}.x", other)


def stale(path):
    """The file of another step, of the same size."""
    shutil.copyfile(path.replace("/one/", "/two/"), path)


HARMS = [flip, truncate, empty_file, os.unlink, swap, stale]


def damaged_load(rank, channel, path, golden):
    """One damage after the other, in a copy: what this rank was told, and whether anything was touched."""
    wanted = empty(shards(state(1), "rows", rank, channel.size))
    before = [shard.tensor.clone() for shard in wanted]
    told = []
    for harm in HARMS:
        folder = f"{path}/{harm.__name__}/one"
        if rank == 0:
            shutil.copytree(f"{path}/run", f"{path}/{harm.__name__}")
            harm(f"{folder}/optimizer_00000.safetensors")
        channel.exchange("harmed")
        told.append(error_of(lambda folder=folder: load(folder, wanted, channel)))
        assert all(torch.equal(a, shard.tensor) for a, shard in zip(before, wanted, strict=True)), harm
    if rank == 1:  # this rank alone asks for what is not there
        wanted = [*wanted, Shard.whole("model", "nobody", torch.zeros(2))]
    other = error_of(lambda: load(f"{path}/run/one", wanted, channel))
    rows = Shard.of("model", "w", torch.zeros(2, 3), (4, 3), (2 * rank, 0))  # saved by the first release
    load(golden, [rows], channel, strict=False)
    return told, other, rows.tensor.tolist()


def test_damage_is_named_on_all_ranks_and_nothing_is_touched(tmp_path):
    for step, tag in ((1, "one"), (2, "two")):
        save(Root(tmp_path / "run"), tag, content(step, "dp", 0, 1), Alone())
    golden = GOLDEN / "checkpoints" / "version_1"
    outcomes = values_of(run_ranks(2, damaged_load, tmp_path, str(tmp_path), str(golden)))
    for rank, (told, other, rows) in enumerate(outcomes):
        for harm, text in zip(HARMS, told, strict=True):
            assert f"{tmp_path}/{harm.__name__}/one/optimizer_00000.safetensors: " in text, harm
        assert "missing: model nobody" in other
        assert rows == torch.arange(12.0).view(2, 2, 3)[rank].tolist()


def late(rank, channel, folder):
    """The ranks meet over a store; rank 1 does not come to the second save."""
    begin = time.monotonic()
    store = dist.FileStore(f"{folder}/store", channel.size)
    short = StoreChannel(store, rank, channel.size, TIMEOUT / 10)
    root = Root(f"{folder}/run")
    patient = StoreChannel(dist.PrefixStore("first", store), rank, channel.size, TIMEOUT)
    save(root, "step_1", content(1, "pp", rank, channel.size), patient)
    group = dist.new_group(backend="gloo")
    told = []
    if rank == 0:
        told.append(error_of(lambda: save(root, "step_2", content(2, "pp", rank, channel.size), short)))
        told.append(
            error_of(
                lambda: save(root, "step_2", content(2, "pp", rank, channel.size), GroupChannel(group, TIMEOUT / 10))
            )
        )
    else:
        while not os.path.exists(f"{folder}/done"):
            assert time.monotonic() - begin < 120
            time.sleep(0.02)
    open(f"{folder}/done", "w").close()
    return told


@pytest.mark.long
def test_a_rank_that_does_not_come_is_an_error_in_time(tmp_path):
    told, _ = values_of(run_ranks(2, late, tmp_path, str(tmp_path)))
    assert "rank 1 ended, or did not come within 2 s" in told[0]
    assert "did not come within 2 s" in told[1]
    assert "Rank 1" in told[1] or "Ranks 1" in told[1]
    assert Root(tmp_path / "run").tags() == ["step_1"]
    assert sorted(os.listdir(tmp_path / "run")) == ["newest", "step_1"]


def full(rank, channel, path):
    model = [shard for shard in content(1, "columns", rank, channel.size).shards if shard.kind == "model"]
    mine = dataclasses.replace(content(1, "columns", rank, channel.size), shards=model)
    save_full(path, mine, channel)
    return error_of(lambda: save_full(path, mine, channel))


def test_a_full_export_is_whole_plain_tensors(tmp_path):
    path = str(tmp_path / "out" / "model.safetensors")
    for told in values_of(run_ranks(2, full, tmp_path, path)):
        assert "exists and is not overwritten" in told
    found = load_file(path)
    expected = {name: tensor for (kind, name), tensor in state(1).items() if kind == "model"}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert os.listdir(tmp_path / "out") == ["model.safetensors"]


def two_gigabytes(rank, channel, path, names):
    """Save rows, load columns, and export; memory on top of the rank's own tensors."""
    root, whole = Root(path), (8192, 4096)
    base = content(1, "dp", rank, channel.size)

    def save_rows():
        rows = [torch.full((2048, 4096), float(i)) for i in range(len(names))]
        mine = [Shard.of("model", name, row, whole, (2048 * rank, 0)) for name, row in zip(names, rows, strict=True)]
        held = dataclasses.replace(base, shards=mine)
        return peak_of(lambda: save(root, "one", held, channel)), peak_of(
            lambda: save_full(f"{path}/full", held, channel)
        )

    saving, exporting = save_rows()
    wanted = [Shard.of("model", name, torch.empty(8192, 1024), whole, (0, 1024 * rank)) for name in names]
    for shard in wanted:
        shard.tensor.fill_(-1)
    loading = peak_of(lambda: load(root.find("one"), wanted, channel))
    assert all(torch.equal(s.tensor, torch.full((8192, 1024), float(i))) for i, s in enumerate(wanted))
    return saving, exporting, loading


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_saving_exporting_and_loading_2_gb_need_no_memory_beyond_the_share(tmp_path):
    names = [f"layer{i}" for i in range(16)]  # of 128 MiB each
    outcomes = run_ranks(4, two_gigabytes, tmp_path, str(tmp_path / "run"), names, timeout=800, patience=TIMEOUT * 10)
    for rank, found in enumerate(values_of(outcomes)):
        print(
            f"rank {rank}: saving, exporting, loading need {', '.join(f'{n / 1e6:.0f} MB' for n in found)} beyond the share"
        )
        assert max(found) <= 200e6
