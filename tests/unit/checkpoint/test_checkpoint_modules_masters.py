"""fp32 masters in checkpoints of plain modules, and in those that training scripts and plain modules exchange."""

import pytest
import torch
from torch import nn

import smpc.v1 as smp
from smpc.checkpoint import Alone, Root, load_modules, module_content, save
from smpc.errors import CheckpointError


def build(seed, dtype=torch.bfloat16, by_hand=True):
    """A model, and the optimizer of its masters, if it has some."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3)).to(dtype)
    masters = {p: nn.Parameter(p.detach().float()) for p in model.parameters()} if by_hand else {}
    return model, torch.optim.AdamW(masters.values() if by_hand else model.parameters(), lr=0.1), masters


def step(model, optimizer, masters):
    optimizer.zero_grad()
    x = torch.arange(8.0).view(2, 4).to(model[0].weight.dtype)
    model(x).float().square().sum().backward()
    for parameter, master in masters.items():
        master.grad, parameter.grad = parameter.grad.float(), None
    optimizer.step()
    with torch.no_grad():
        for parameter, master in masters.items():
            parameter.copy_(master)


def trained(seed=1):
    job = build(seed)
    step(*job)
    step(*job)
    return job


def same(found, expected):
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def moments(optimizer):
    return [items["exp_avg"] for items in optimizer.state.values()]


@pytest.fixture
def saved(tmp_path):
    """A checkpoint of a bf16 model and its masters, and what was saved."""
    model, optimizer, masters = trained()
    save(Root(str(tmp_path)), "a", module_content(model, optimizer, masters=masters), Alone())
    assert not same(masters.values(), [p.float() for p in model.parameters()])
    return str(tmp_path / "a"), model, optimizer, masters


def test_masters_come_back_bit_by_bit(saved):
    path, model, optimizer, masters = saved
    other = build(2)
    load_modules(path, other[0], other[1], Alone(), masters=other[2])
    assert same(other[0].parameters(), model.parameters())
    assert same(other[2].values(), masters.values())
    assert same(moments(other[1]), moments(optimizer))
    step(*other)
    step(model, optimizer, masters)
    assert same(other[2].values(), masters.values())


def test_the_model_alone_with_its_masters(saved):
    path, model, _, masters = saved
    other = build(2)
    load_modules(path, other[0], None, Alone(), masters=other[2])
    assert same(other[2].values(), masters.values())
    assert same(other[0].parameters(), model.parameters())
    alone = build(3)
    load_modules(path, alone[0], None, Alone())
    assert same(alone[0].parameters(), model.parameters())


def test_fp32_parameters_take_the_masters_and_masters_are_made_where_none_were_saved(saved, tmp_path):
    path, model, optimizer, masters = saved
    wide = build(2, torch.float32, by_hand=False)
    load_modules(path, wide[0], wide[1], Alone())
    assert same(wide[0].parameters(), masters.values())
    assert same(moments(wide[1]), moments(optimizer))
    save(Root(str(tmp_path)), "wide", module_content(wide[0], wide[1]), Alone())
    back = build(4)
    with pytest.raises(CheckpointError, match="ask for a cast"):
        load_modules(str(tmp_path / "wide"), back[0], back[1], Alone(), masters=back[2])
    load_modules(str(tmp_path / "wide"), back[0], back[1], Alone(), masters=back[2], cast=True)
    assert same(back[0].parameters(), model.parameters())
    assert same(back[2].values(), [p.float() for p in model.parameters()])


def test_what_is_no_master_of_the_model_is_refused_before_anything_changes(saved):
    path, *_ = saved
    model, optimizer, masters = build(2)
    before = [p.clone() for p in model.parameters()]
    first = model[0].weight
    for wrong, text in (
        ({nn.Parameter(torch.ones(3)): torch.ones(3)}, r"one of shape \[3\] is that of a tensor that is no parameter"),
        (
            {first: torch.ones(2)},
            r"0\.weight: expected what the parameter is, a Parameter of shape \[6, 4\], found a Tensor",
        ),
    ):
        with pytest.raises(CheckpointError, match=text):
            load_modules(path, model, optimizer, Alone(), masters={**masters, **wrong})
    with pytest.raises(CheckpointError, match="construct the optimizer as it was saved"):
        load_modules(path, model, optimizer, Alone())  # masters in the groups, and nobody says whose
    assert same(before, model.parameters())


@smp.step
def script_step(model, x):
    loss = model(x).square().sum()
    model.backward(loss)
    return loss


def start(seed):
    smp.init({"pipeline_parallel_degree": 1, "bf16": True})
    model = smp.DistributedModel(build(seed)[0].float())
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
    script_step(model, torch.arange(8.0).view(2, 4))
    optimizer.step()
    return model, optimizer


def masters_of(optimizer):
    return {optimizer.parameter_of(master): master for master in optimizer.masters}


def test_scripts_and_plain_modules_exchange_masters(saved, tmp_path):
    path, model, _, masters = saved
    script, optimizer = start(5)
    load_modules(path, script.get_module(), optimizer.optimizer, Alone(), masters=masters_of(optimizer))
    assert same(script.get_module().parameters(), model.parameters())
    assert same(optimizer.masters, masters.values())
    state = optimizer.local_state_dict()["state"]
    assert same([items["master"] for items in state.values()], masters.values())
    smp.save_checkpoint(str(tmp_path / "script"), "b", model=script, optimizer=optimizer)
    smp.shutdown()

    other = build(6)
    (folder,) = [each for each in (tmp_path / "script").iterdir() if each.is_dir()]
    load_modules(str(folder), other[0], other[1], Alone(), masters=other[2])
    assert same(other[2].values(), masters.values())

    script, optimizer = start(7)
    target = tmp_path / "plain" / "c_partial"
    target.parent.mkdir()
    save(Root(str(target.parent)), target.name, module_content(model, saved[2], masters=masters), Alone())
    with pytest.warns(UserWarning, match="was saved on an unknown arrangement of ranks"):
        smp.resume_from_checkpoint(str(target.parent), "c")
    assert same(optimizer.masters, masters.values())
    smp.shutdown()
