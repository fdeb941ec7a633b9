"""Saving and loading state dicts in one process, beside torch.distributed.checkpoint; hostile and damaged files; object storage."""

import copy
import os
import pickle
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.object_storage import s3_bucket
from torch import nn

from smpc.errors import CheckpointError, UsageError
from smpc.v2.checkpoint.utils import SORT_BY_LAST_INT, limit_num_subdirs
from smpc.v2.distributed.checkpoint.async_utils import AsyncCallsQueue
from smpc.v2.distributed.checkpoint.filesystem import DistributedFileSystemReader, DistributedFileSystemWriter
from smpc.v2.distributed.checkpoint.s3_filesystem import (
    S3ClientConfig,
    format_s3_path,
    is_s3_uri,
    parse_s3_uri,
    retry_with_jitter,
)
from smpc.v2.distributed.checkpoint.state_dict_loader import load
from smpc.v2.distributed.checkpoint.state_dict_saver import (
    PyTorchDistSaveShardedStrategy,
    async_save,
    maybe_finalize_async_calls,
    save,
)
from smpc.v2.distributed.checkpoint.state_dict_utils import SMStateDictType, init_optim_state, sm_state_dict_type


def trained(seed):
    """A state dict with tensors, an optimizer's state, a scalar tensor and plain values."""
    torch.manual_seed(seed)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (seed + 1))
    model(torch.randn(2, 4)).square().mean().backward()
    optimizer.step()
    plain = {"epoch": seed, "names": ["a", f"b{seed}"], "rate": 0.5 * seed, "nothing": None}
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scale": torch.tensor(2.0 * seed),
        **plain,
    }


def same(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return a == b


def plain_load(state, folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=folder)
    return state


@pytest.mark.parametrize("kind", ["save", "async_save"])
def test_what_is_saved_is_read_by_us_and_by_torch(kind, tmp_path):
    wanted = trained(1)
    given = copy.deepcopy(wanted)
    if kind == "save":
        save(given, checkpoint_id=tmp_path / "c")
    else:
        queue = AsyncCallsQueue()
        async_save(given, checkpoint_id=tmp_path / "c", queue=queue)
        given["model"]["weight"].zero_()  # what is saved is what was there when it was called
        assert queue.maybe_finalize_async_calls(blocking=True) == [0]
        queue.close()
    found = trained(2)
    load(found, checkpoint_id=tmp_path / "c")
    assert same(found, wanted)
    assert same(plain_load(trained(3), tmp_path / "c"), wanted)


def test_what_torch_saves_is_read(tmp_path):
    wanted = trained(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(wanted, checkpoint_id=tmp_path)
    found = trained(2)
    load(found, checkpoint_id=str(tmp_path))
    assert same(found, wanted)


def test_a_checkpoint_is_replaced_and_leaves_nothing(tmp_path):
    save(trained(1), checkpoint_id=tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    save(trained(2), checkpoint_id=tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert len(names) == 3
    assert names[0] == ".metadata"
    assert names[2] == "notes.txt"
    found = trained(3)
    load(found, checkpoint_id=tmp_path)
    assert same(found, trained(2))


def test_a_save_that_fails_leaves_the_older_one(tmp_path, monkeypatch):
    save(trained(1), checkpoint_id=tmp_path)

    def fail(*args, **kwargs):
        raise OSError(28, "No space left on device", "somewhere")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(CheckpointError, match="No space left on device"):
        save({"model": {"weight": torch.ones(4)}}, checkpoint_id=tmp_path)
    queue = AsyncCallsQueue()
    async_save({"model": {"weight": torch.ones(4)}}, checkpoint_id=tmp_path, queue=queue)
    with pytest.raises(CheckpointError, match=r"background failed.*No space left"):
        queue.maybe_finalize_async_calls(blocking=True)
    assert queue.get_num_unfinalized_calls() == 0
    monkeypatch.undo()
    queue.close()
    found = trained(3)
    load(found, checkpoint_id=tmp_path)
    assert same(found, trained(1))
    assert len(list(tmp_path.iterdir())) == 2


def test_the_default_queue_gives_indices(tmp_path):
    before = maybe_finalize_async_calls()
    assert before == []
    async_save(trained(1), checkpoint_id=tmp_path / "1")
    async_save(trained(2), checkpoint_id=tmp_path / "2", sharded_strategy=PyTorchDistSaveShardedStrategy())
    done = maybe_finalize_async_calls(blocking=True)
    assert done == [done[0], done[0] + 1]
    assert maybe_finalize_async_calls(blocking=False) == []


def test_hooks_writers_and_readers_of_ones_own(tmp_path):
    calls = []
    writer = DistributedFileSystemWriter(tmp_path, [lambda: calls.append("pre")], [lambda: calls.append("post")])
    save(trained(1), storage_writer=writer)
    assert calls == ["pre", "post"]
    found = trained(2)
    load(found, storage_reader=DistributedFileSystemReader(tmp_path))
    assert same(found, trained(1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": trained(4)["model"]}, storage_writer=writer)
    other = {"model": trained(2)["model"]}
    load(other, storage_reader=dcp.FileSystemReader(tmp_path))
    assert same(other["model"], trained(4)["model"])


def test_a_missing_key_is_a_key_error(tmp_path):
    save({"model": trained(1)["model"]}, checkpoint_id=tmp_path)
    with pytest.raises(KeyError, match=r"the checkpoint has no epoch; it has model.weight, model.bias"):
        load({"model": trained(1)["model"], "epoch": 0}, checkpoint_id=tmp_path)
    with pytest.raises(CheckpointError, match=r"does not fit: Size mismatch"):
        load({"model": {"weight": torch.ones(7)}}, checkpoint_id=tmp_path)
    with pytest.raises(CheckpointError, match=r"no checkpoint in .*nothing: nothing is there"):
        load({}, checkpoint_id=tmp_path / "nothing")


def test_neither_id_nor_storage_is_a_value_error():
    with pytest.raises(ValueError, match="expected a checkpoint_id or a storage_writer"):
        save({})
    with pytest.raises(ValueError, match="expected a checkpoint_id or a storage_reader"):
        load({})
    with pytest.raises(ValueError, match="sharded_strategy: expected None"):
        async_save({}, checkpoint_id="x", sharded_strategy=("zarr", 1))


class Evil:
    def __reduce__(self):
        return os.mkdir, (os.environ["SMPC_TEST_EVIL"],)


def test_nothing_that_a_file_names_is_run(tmp_path, monkeypatch):
    monkeypatch.setenv("SMPC_TEST_EVIL", str(tmp_path / "evil"))
    (tmp_path / "metadata").mkdir()
    (tmp_path / "metadata" / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(CheckpointError, match="refused"):
        load({"x": torch.ones(1)}, checkpoint_id=tmp_path / "metadata")
    save({"x": Evil()}, checkpoint_id=tmp_path / "value")
    with pytest.raises(CheckpointError, match="such are never unpickled"):
        load({"x": None}, checkpoint_id=tmp_path / "value")
    assert not (tmp_path / "evil").exists()


def test_damage_is_found(tmp_path):
    save({"x": torch.arange(1000.0)}, checkpoint_id=tmp_path)
    (data,) = tmp_path.glob("*.distcp")
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"damaged|checksum"):
        load({"x": torch.zeros(1000)}, checkpoint_id=tmp_path)
    data.write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match="truncated"):
        load({"x": torch.zeros(1000)}, checkpoint_id=tmp_path)
    data.unlink()
    with pytest.raises(CheckpointError, match=r"is missing, though .metadata names it"):
        load({"x": torch.zeros(1000)}, checkpoint_id=tmp_path)


def test_the_local_state_is_that_of_the_module(tmp_path):
    model = nn.BatchNorm1d(3)
    wanted = copy.deepcopy(model.state_dict())
    with sm_state_dict_type(model, SMStateDictType.SM_LOCAL_STATE_DICT):
        found = model.state_dict()
        assert same(found, dict(wanted))
        model.load_state_dict({name: value + 1 for name, value in found.items()})
        with pytest.raises(CheckpointError, match="weight: expected a part of shape"):
            model.load_state_dict({**found, "weight": torch.ones(2)})
    assert same(dict(model.state_dict()), {name: value + 1 for name, value in wanted.items()})


def test_an_optimizer_has_its_state_before_its_first_step():
    model = nn.Linear(2, 2)
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.3)
    init_optim_state(optimizer)
    assert same(dict(model.state_dict()), dict(before))
    assert optimizer.state[model.weight]["exp_avg"].shape == (2, 2)
    assert optimizer.param_groups[0]["lr"] == 0.3
    assert model.weight.grad is None


def test_the_newest_folders_stay(tmp_path):
    for name in ("step_9", "step_10", "step_11", "other"):
        (tmp_path / name).mkdir()
    assert limit_num_subdirs(tmp_path, 2, SORT_BY_LAST_INT, regex=r"step_\d+") == ["step_9"]
    assert sorted(os.listdir(tmp_path)) == ["other", "step_10", "step_11"]
    with pytest.raises(UsageError, match="at least 1"):
        limit_num_subdirs(tmp_path, 0)


def test_names_of_objects():
    assert parse_s3_uri("s3://bucket/run/step_1") == ("bucket", "run/step_1")
    assert format_s3_path("bucket", "run") == "s3://bucket/run"
    assert [is_s3_uri(each) for each in ("s3://b/k", "/b/k", "gs://b/k")] == [True, False, False]
    with pytest.raises(UsageError, match="expected s3://bucket/key"):
        parse_s3_uri("/bucket")
    with pytest.raises(UsageError, match="part_size"):
        S3ClientConfig(part_size=1)
    assert S3ClientConfig().part_size == 64 * 1024 * 1024


def test_busy_storage_is_tried_again():
    tries = []

    @retry_with_jitter(max_attempts=3, base_delay=0.0)
    def flaky(succeeds_at):
        tries.append(1)
        if len(tries) < succeeds_at:
            raise OSError("busy")
        return len(tries)

    assert flaky(3) == 3
    tries.clear()
    with pytest.raises(OSError, match="busy"):
        flaky(4)


def test_a_url_without_its_package_says_what_to_install(tmp_path):
    with pytest.raises(CheckpointError, match="use a folder, or install the fsspec package"):
        save({}, checkpoint_id="nowhere://bucket/x")


@pytest.fixture
def s3(monkeypatch):
    with s3_bucket(monkeypatch) as bucket:
        yield f"{bucket}/run"


@pytest.mark.filterwarnings("ignore")
def test_object_storage(s3):
    wanted = trained(1)
    save(trained(2), checkpoint_id=f"{s3}/step_1", s3_region="us-east-1")
    queue = AsyncCallsQueue()
    async_save(wanted, checkpoint_id=f"{s3}/step_1", s3client_config=S3ClientConfig(part_size=5 << 20), queue=queue)
    queue.close()
    found = trained(3)
    load(found, checkpoint_id=f"{s3}/step_1")
    assert same(found, wanted)
    assert same(plain_load(trained(4), f"{s3}/step_1"), wanted)
    with pytest.raises(CheckpointError, match="no checkpoint in s3://bucket/run/step_2"):
        load({}, checkpoint_id=f"{s3}/step_2")
