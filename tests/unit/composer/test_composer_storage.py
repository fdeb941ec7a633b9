"""A run's checkpoints in object storage, and planners of a script's own for them."""

import fsspec
import pytest
import torch
from support.object_storage import s3_bucket
from support.trainer_cases import everything, trainer
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from smpc.checkpoint.convert import open_source, write_checkpoint
from smpc.checkpoint.distributed import write_distributed
from smpc.composer import storage
from smpc.composer.checkpoint_readers import FolderReader
from smpc.errors import CheckpointError
from smpc.sharding.dtensors import whole

SHARDED = {"fsdp_config": {"state_dict_type": "sharded", "sharded_ckpt_prefix_dir": "ba{batch}"}}


@pytest.fixture(params=["memory", "s3"])
def url(request, monkeypatch, tmp_path):
    """Object storage in this process's memory, and S3 as a local server speaks it."""
    if request.param == "s3":
        with s3_bucket(monkeypatch) as bucket:
            yield f"{bucket}/{tmp_path.name}/run"
        return
    yield f"memory://{tmp_path.name}/run"
    fsspec.filesystem("memory").store.clear()


def _remote(url):
    return fsspec.core.url_to_fs(url)[0]


@pytest.mark.parametrize("options", [{}, SHARDED], ids=["whole", "sharded"])
@pytest.mark.filterwarnings("ignore")
def test_a_run_in_object_storage(url, options):
    given = {"save_folder": url, "save_interval": "1ba", "save_num_checkpoints_to_keep": 2, "run_name": "r", **options}
    made = trainer(4, **given)
    made.fit()
    newest, before, gone = (
        ("ba4", "ba3", "ba2") if options else ("ep1-ba4-rank0.pt", "ep0-ba3-rank0.pt", "ep0-ba2-rank0.pt")
    )
    remote = _remote(url)
    assert remote.cat_file(f"{url}/latest-rank0.pt.symlink").decode() == newest
    assert [storage.exists(f"{url}/{name}") for name in (newest, before, gone)] == [True, True, False]
    again = trainer(4, **given, autoresume=True)
    assert torch.equal(everything(again), everything(made))
    assert again.state.timestamp == made.state.timestamp
    third = trainer(4, load_path=f"{url}/{before}", **options)
    third.fit()
    assert torch.equal(everything(third), everything(made))
    with pytest.raises(CheckpointError, match="is there already; give save_overwrite=True"):
        made.save_checkpoint(f"{url}/{newest}")
    with pytest.raises(CheckpointError, match="no checkpoint at"):
        trainer(4, load_path=f"{url}/absent", **options)


@pytest.mark.parametrize("options", [{}, SHARDED], ids=["whole", "sharded"])
@pytest.mark.filterwarnings("ignore")
def test_damage_in_object_storage(url, options):
    made = trainer(4, save_folder=url, save_interval="4ba", **options)
    made.fit()
    target, remote = f"{url}/{'ba4' if options else 'ep1-ba4-rank0.pt'}", _remote(url)
    [path] = [name for name in remote.ls(target, detail=False) if name.endswith("distcp")] if options else [target]
    data = remote.cat_file(path)
    remote.pipe_file(path, data[: len(data) // 2])
    with pytest.raises(CheckpointError, match=r"damaged, missing or replaced: .*(distcp|pt)"):
        trainer(4, load_path=target, **options)
    flipped = bytearray(data)
    weight = whole(made.state.model.model.head.weight).detach()
    flipped[data.index(weight.numpy().tobytes())] ^= 4
    remote.pipe_file(path, bytes(flipped))
    with pytest.raises(CheckpointError):
        trainer(4, load_path=target, **options)
    remote.pipe_file(path, data)
    assert torch.equal(everything(trainer(4, load_path=target, **options)), everything(made))
    remote.pipe_file(f"{url}/latest-rank0.pt.symlink", b"../../elsewhere")
    with pytest.raises(
        CheckpointError, match=r"expected the name of a checkpoint beside it, found '\.\./\.\./elsewhere'"
    ):
        trainer(4, load_path=f"{url}/latest-rank0.pt", **options)


@pytest.mark.filterwarnings("ignore")
def test_saving_over_a_checkpoint_in_object_storage(url):
    """The old one stays until the new one is complete; then its files are gone."""
    options = {"save_folder": url, "save_interval": "2ba", "save_overwrite": True, "max_duration": "2ba", **SHARDED}
    trainer(4, **options).fit()
    files = storage._sums_of_stored_files(f"{url}/ba2")
    made = trainer(4, seed=3, **options)
    made.fit()
    assert len(storage._sums_of_stored_files(f"{url}/ba2")) == len(files) == 2
    assert set(storage._sums_of_stored_files(f"{url}/ba2")) & set(files) == {".metadata"}
    assert torch.equal(everything(trainer(4, load_path=f"{url}/ba2", **SHARDED)), everything(made))


@pytest.mark.parametrize("options", [{}, SHARDED], ids=["whole", "sharded"])
@pytest.mark.parametrize("link", [None, b"absent", b"../x"], ids=["none", "dangling", "garbage"])
@pytest.mark.filterwarnings("ignore:.*latest-rank0.pt leads to no checkpoint")
def test_a_link_in_object_storage_that_leads_nowhere(url, options, link):
    given = {"save_folder": url, "save_interval": "1ba", "run_name": "r", **options}
    made = trainer(4, **given)
    made.fit()
    target = f"{url}/latest-rank0.pt.symlink"
    _remote(url).rm(target) if link is None else _remote(url).pipe_file(target, link)
    again = trainer(4, autoresume=True, **given)
    assert again.state.timestamp == made.state.timestamp
    assert torch.equal(everything(again), everything(made))


class Counted:
    calls = 0

    def create_local_plan(self):
        type(self).calls += 1
        return super().create_local_plan()


class Save(Counted, DefaultSavePlanner):
    pass


class Load(Counted, DefaultLoadPlanner):
    def load_bytes(self, read_item, value):
        raise AssertionError("torch's planner would unpickle what it reads")


def test_planners_of_a_scripts_own(tmp_path):
    options = {"fsdp_config": SHARDED["fsdp_config"] | {"save_planner": Save(), "load_planner": Load()}}
    made = trainer(4, save_folder=str(tmp_path), save_interval="2ba", max_duration="2ba", **options)
    made.fit()
    assert Save.calls == 1
    loaded = trainer(4, load_path=str(tmp_path / "ba2"), **options)
    assert Load.calls == 2, "weights, and what the optimizer keeps"
    assert torch.equal(everything(loaded), everything(made))
    assert loaded.state.timestamp == made.state.timestamp


def test_no_planner_reads_what_is_no_tensor(tmp_path, monkeypatch):
    """Also where the metadata say that a weight is something else."""
    made = trainer(4, save_folder=str(tmp_path), save_interval="2ba", max_duration="2ba", **SHARDED)
    made.fit()
    read = FolderReader.__init__.__globals__["FolderFiles"].read_metadata

    def changed(self):
        found = read(self)
        found.state_dict_metadata["state.model.model.head.bias"] = BytesStorageMetadata()
        return found

    monkeypatch.setattr("smpc.composer.checkpoint_readers.FolderFiles.read_metadata", changed)
    options = {"fsdp_config": SHARDED["fsdp_config"] | {"load_planner": Load()}}
    with pytest.raises(CheckpointError, match=r"missing model\.head\.bias"):
        trainer(4, load_path=str(tmp_path / "ba2"), **options)


@pytest.mark.parametrize("options", [{}, SHARDED], ids=["whole", "sharded"])
@pytest.mark.filterwarnings("ignore:.*has no checksums")
def test_conversion_both_ways(tmp_path, options):
    """Into a checkpoint of this library, from which the Trainer takes the weights again."""
    made = trainer(4, save_folder=str(tmp_path), save_interval="2ba", max_duration="2ba", **options)
    made.fit()
    saved, own, back = (str(tmp_path / name) for name in ("ba2" if options else "ep0-ba2-rank0.pt", "own", "back"))
    with open_source(saved) as source:
        assert {(item.kind, item.name) for item in source.items} >= {("model", "model.head.bias")}
        if options:
            moments = {item.name: source.read(item) for item in source.items if item.kind == "optimizer"}
            values = made.state.optimizer.state[made.state.model.model.head.bias]["exp_avg"]
            assert torch.equal(moments["model.head.bias::exp_avg"], whole(values))
        write_checkpoint(source, own)
    with open_source(own) as source:
        write_distributed(source, back)
    loaded = trainer(4, load_path=back, load_weights_only=True)
    for one, other in zip(loaded.state.model.parameters(), made.state.model.parameters(), strict=True):
        assert torch.equal(one, whole(other))
    weights, alone = str(tmp_path / "weights.pt"), str(tmp_path / "alone")
    torch.save(loaded.state.model.state_dict(), weights)
    with open_source(weights) as source:
        write_distributed(source, alone)
    with pytest.raises(CheckpointError, match="does not say how far a run has come; give load_weights_only=True"):
        trainer(4, load_path=alone)
