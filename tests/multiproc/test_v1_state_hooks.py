"""Hooks of submodules on state dicts: what a job of several ranks saves and loads is what the module in one process would."""

import warnings

import pytest
import torch
from executor_harness import run_workers
from torch import nn

import smpc.v1 as smp
from smpc.errors import CheckpointError


class Block(nn.Module):
    """Saves its weight under the name of an older version as well, and its norm; loads either, and counts what it loads."""

    def __init__(self, distributed):
        super().__init__()
        with smp.tensor_parallelism(distributed):
            self.inner = nn.Linear(8, 8)
        self.optional = nn.Parameter(torch.ones(8))
        self.calls = []
        self.register_state_dict_pre_hook(lambda module, prefix, keep_vars: module.calls.append("before saving"))
        self.register_state_dict_post_hook(Block.add)
        self.register_load_state_dict_pre_hook(Block.take)
        self.register_load_state_dict_post_hook(Block.loaded)

    def add(self, state, prefix, metadata):
        state[f"{prefix}norm"] = state[f"{prefix}inner.weight"].norm()
        state[f"{prefix}old"] = state.pop(f"{prefix}inner.weight")

    def take(self, state, prefix, metadata, strict, missing, unexpected, errors):
        if "refuse" in state:
            errors.append(f"{prefix}: refused")
        if metadata.get("version") is None:
            unexpected.append(f"{prefix}of no version")
        state.pop(f"{prefix}norm", None)
        if f"{prefix}old" in state:
            state[f"{prefix}inner.weight"] = state.pop(f"{prefix}old")

    def loaded(self, keys):
        self.calls.append((tuple(keys.missing_keys), tuple(keys.unexpected_keys)))
        keys.missing_keys[:] = [key for key in keys.missing_keys if not key.endswith("optional")]

    def forward(self, x):
        return torch.tanh(self.inner(x)) * self.optional


class Model(nn.Module):
    """Blocks on two stages; the root's hook after saving gives another dict."""

    def __init__(self, distributed=False):
        super().__init__()
        self.first, self.second, self.last = Block(distributed), Block(distributed), nn.Linear(8, 8)
        self._register_state_dict_hook(
            lambda module, state, prefix, metadata: with_metadata({**state, "more": 1}, state._metadata)
        )
        self.register_load_state_dict_pre_hook(lambda module, state, *rest: state.pop("more", None))

    def forward(self, x):
        return self.last(self.second(self.first(x)))


def make(seed, distributed=False):
    torch.manual_seed(seed)
    return Model(distributed)


@smp.step
def train_step(model, x):
    loss = model(x).square().mean()
    model.backward(loss)
    return loss


def with_metadata(state, metadata):
    state = type(metadata)(state)
    state._metadata = metadata
    return state


def outcome(load, state, **options):
    """What loading returns, or the kinds of keys that it complains of."""
    try:
        found = load(state, **options)
    except (RuntimeError, CheckpointError) as error:
        text = str(error)
        return [name in text for name in ("last.bias", "strange", "optional", "of no version", "refused")]
    return list(found.missing_keys), list(found.unexpected_keys)


def changed(state, change):
    new = with_metadata(dict(state), state._metadata)
    del new["more"]
    if change == "no optional":
        del new["first.optional"]
    if change == "no bias":
        del new["last.bias"], new["second.optional"]
    if change == "strange":
        new["second.strange"] = new["strange"] = torch.ones(1)
    if change == "no metadata":
        return dict(new)
    if change == "refused":
        new["first.refuse"] = 1
    return new


CHANGES = ["none", "no optional", "no bias", "strange", "no metadata", "refused"]


def job(rank, folder, tp, plain_state, plain_outcomes):
    degrees = {"tensor_parallel_degree": 2, "ddp": True} if tp else {}
    smp.init({"pipeline_parallel_degree": 1 if tp else 2, "microbatches": 2, "checkpoint_timeout": 30.0, **degrees})
    model = smp.DistributedModel(make(2, distributed=tp))
    train_step(model, torch.ones(4, 8))
    state = with_metadata(plain_state, plain_state["_metadata"])
    del state["_metadata"]
    model.load_state_dict(state)
    found = model.state_dict()
    wrong = [key for key in {**found, **state} if not same(found.get(key), state.get(key))]
    assert list(found) == list(state)
    assert found._metadata == state._metadata
    blocks = [module for module in model.module.modules() if isinstance(module, Block)]
    assert [block.calls[-2:] for block in blocks] == [[((), ()), "before saving"]] * 2
    for change in CHANGES:
        for strict in (True, False):
            own = outcome(model.load_state_dict, changed(state, change), strict=strict)
            if own != plain_outcomes[change, strict]:
                wrong.append((change, strict, own))
    model.load_state_dict(state)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        smp.save_checkpoint(str(folder.parent / "run"), "a", model=model, optimizer=optimizer)
        before = [len(block.calls) for block in blocks]
        smp.resume_from_checkpoint(str(folder.parent / "run"), tag="a")
    assert [len(block.calls) for block in blocks] == [count + 1 for count in before]
    told = [str(each.message) for each in caught if "register_load_state_dict_pre_hook" in str(each.message)]
    assert len(told) == 1
    assert told[0].startswith("Model, first, second: ")
    wrong += [key for key, value in model.state_dict().items() if not same(value, state[key])]
    smp.shutdown()
    return wrong


def same(a, b):
    return torch.equal(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else a == b


@pytest.mark.parametrize("tp", [False, True])
def test_hooks_do_what_they_do_in_one_process(tmp_path, tp):
    smp.init({"pipeline_parallel_degree": 1})
    plain = make(1)
    smp.shutdown()
    state = plain.state_dict()
    assert list(state)[:4] == ["first.optional", "first.inner.bias", "first.norm", "first.old"]
    outcomes = {
        (change, strict): outcome(plain.load_state_dict, changed(state, change), strict=strict)
        for change in CHANGES
        for strict in (True, False)
    }
    assert outcomes["none", True] == outcomes["no optional", True] == ([], [])
    assert outcomes["no bias", True] == [True, False, False, False, False]
    assert outcomes["strange", False] == ([], ["strange", "second.strange"])
    folder = tmp_path / "job"
    folder.mkdir()
    given = {**state, "_metadata": state._metadata}
    for found in run_workers(job, 2, folder, tp, given, outcomes):
        assert found == []
