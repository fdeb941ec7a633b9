"""Checkpoints that change hands between the Trainer and plain PyTorch, optimizer included, through this library's form."""

import json

import pytest
import torch
from support.trainer_cases import classifier, dataset, everything
from torch import distributed
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

from smpc.checkpoint.channel import Alone
from smpc.checkpoint.convert import open_source, write_checkpoint
from smpc.checkpoint.distributed import write_distributed
from smpc.checkpoint.folder.folders import Root
from smpc.checkpoint.modules import load_modules, module_content
from smpc.checkpoint.save import save
from smpc.composer import Trainer
from smpc.errors import CheckpointError

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*has no checksums"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]
SHARDED = {"fsdp_config": {"state_dict_type": "sharded"}}
BATCH = dataset().tensors


def _optimizer(model):
    head = {"params": model.model.head.parameters(), "lr": 0.1, "betas": (0.8, 0.99)}
    return torch.optim.AdamW([{"params": model.model.blocks.parameters()}, head], lr=0.01)


def _trained(count, model=None, optimizer=None):
    """One process of plain PyTorch."""
    model = model or classifier()
    optimizer = optimizer or _optimizer(model)
    for _ in range(count):
        optimizer.zero_grad()
        model.loss(model(BATCH), BATCH).backward()
        optimizer.step()
    return model, optimizer


def _values(model, optimizer):
    parameters = list(model.parameters())
    moments = [value for parameter in parameters for _, value in sorted(optimizer.state[parameter].items())]
    return torch.cat([tensor.detach().reshape(-1).float() for tensor in (*parameters, *moments)])


def _trainer(**options):
    model = classifier()
    options = {"max_duration": "2ba", "device": "cpu", "train_dataloader": [BATCH], **options}
    return Trainer(model=model, optimizers=_optimizer(model), **options)


@pytest.mark.parametrize("options", [{}, SHARDED], ids=["whole", "sharded"])
def test_what_the_trainer_saves_goes_on_in_plain_pytorch(tmp_path, options):
    made = _trainer(**options)
    made.fit()
    made.save_checkpoint(str(tmp_path / "theirs"))
    with open_source(tmp_path / "theirs") as source:
        write_checkpoint(source, tmp_path / "ours")
    model = classifier()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    optimizer = torch.optim.AdamW([dict(group, lr=1.0) for group in _optimizer(model).param_groups])
    load_modules(str(tmp_path / "ours"), model, optimizer, Alone())
    assert [(group["lr"], group["betas"]) for group in optimizer.param_groups] == [
        (0.01, (0.9, 0.999)),
        (0.1, (0.8, 0.99)),
    ]
    assert torch.equal(_values(model, optimizer), _values(*_trained(2)))
    assert torch.equal(_values(*_trained(1, model, optimizer)), _values(*_trained(3)))


@pytest.mark.parametrize("options", [{}, SHARDED], ids=["replicas", "sharded"])
@pytest.mark.parametrize("source", ["ours", "torch"])
def test_what_plain_pytorch_saves_goes_on_in_the_trainer(tmp_path, options, source):
    model, optimizer = _trained(2)
    if source == "ours":
        save(Root(tmp_path), "ours", module_content(model, optimizer), Alone())
        with open_source(tmp_path / "ours") as opened:
            write_distributed(opened, tmp_path / "theirs")
    else:
        state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
        save_distributed(state, checkpoint_id=tmp_path / "theirs", no_dist=True)
    with pytest.warns(UserWarning, match="does not say how far a run has come: it begins at batch 0"):
        made = _trainer(load_path=str(tmp_path / "theirs"), max_duration="1ba", **options)
    assert torch.equal(everything(made), _values(model, optimizer))
    made.fit()
    assert torch.equal(everything(made), _values(*_trained(3)))
    assert [group["lr"] for group in made.state.optimizer.param_groups] == [0.01, 0.1]


def test_masters_are_the_weights(tmp_path):
    model, _ = _trained(1)
    masters = {parameter: parameter.detach().clone() for parameter in model.parameters()}
    half = classifier().bfloat16()
    half.load_state_dict(model.state_dict())
    own = dict(zip(half.parameters(), masters.values(), strict=True))
    optimizer = torch.optim.AdamW(own.values())
    for master in own.values():
        master.grad = torch.ones_like(master)
    optimizer.step()
    save(Root(tmp_path), "ours", module_content(half, optimizer, masters=own), Alone())
    with open_source(tmp_path / "ours") as opened:
        write_distributed(opened, tmp_path / "theirs")
    model = classifier()
    optimizers = torch.optim.AdamW(model.parameters())
    with pytest.warns(UserWarning, match="begins at batch 0"):
        made = Trainer(model=model, optimizers=optimizers, device="cpu", load_path=str(tmp_path / "theirs"))
    for parameter, master in zip(model.parameters(), own.values(), strict=True):
        assert torch.equal(parameter, master)
        found = made.state.optimizer.state[parameter]
        assert sorted(found) == ["exp_avg", "exp_avg_sq", "step"]
        assert torch.equal(found["exp_avg"], optimizer.state[master]["exp_avg"])


def test_other_groups_are_refused(tmp_path):
    made = _trainer()
    made.fit("1ba")
    path = made.save_checkpoint(str(tmp_path / "a.pt"))
    model = classifier()
    turned = torch.optim.AdamW([{"params": model.model.head.parameters()}, {"params": model.model.blocks.parameters()}])
    with pytest.raises(
        CheckpointError, match=r"expected group 0 to have the parameters.* differ in model.blocks.0.down"
    ):
        Trainer(model=model, optimizers=turned, device="cpu", load_path=path)


def test_a_file_whose_optimizer_is_damaged(tmp_path):
    made = _trainer()
    made.fit("1ba")
    path = made.save_checkpoint(str(tmp_path / "a.pt"))
    found = torch.load(path, weights_only=True)
    for damage in ({"plain": "{"}, {"plain": json.dumps({"groups": [1]})}, {"optimizers": {"AdamW": 3}}):
        torch.save({"state": found["state"] | damage}, path)
        with pytest.raises(CheckpointError, match="the optimizer is not as a Trainer writes it"):
            open_source(path)


@pytest.mark.parametrize(
    "options", [{}, SHARDED, {"fsdp_config": {"sync_module_states": True, "load_monolith_rank0_only": True}}]
)
def test_what_is_not_there_is_told_before_any_group_is_made(tmp_path, options):
    with pytest.raises(CheckpointError, match=r"load_path: no checkpoint at .*absent"):
        _trainer(load_path=tmp_path / "absent", **options)
    (tmp_path / "link").symlink_to("away")
    with pytest.raises(CheckpointError, match=r"no checkpoint at .*link, which leads to .*away"):
        _trainer(load_path=str(tmp_path / "link"), **options)
    assert not distributed.is_initialized()
