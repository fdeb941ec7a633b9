"""Every architecture of Hugging Face that gets small, trained on two real ranks: the numbers of one process, or an error that says why."""

import warnings

import pytest
import survey
import torch
from executor_harness import Launch

import smpc.v1 as smp

STEPS, MB, PARTS = 3, 2, 16
EVERY_DAY = ("ViTForImageClassification", "Gemma3ForConditionalGeneration", "MambaForCausalLM", "Wav2Vec2ForCTC")


def train(rank, folder, name, profile, variant):
    warnings.simplefilter("ignore")
    smp.init({"pipeline_parallel_degree": 2, "microbatches": MB})
    module = survey.build(name, profile)
    batch = survey.split(survey.inputs(module, variant), MB)
    torch.manual_seed(1)
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-2))

    @smp.step
    def step(model, index):
        loss = survey.loss_of(model(**batch[int(index[0])]))
        model.backward(loss)
        return loss

    losses, gradients = [], {}
    for number in range(STEPS):
        optimizer.zero_grad()
        losses += [loss.item() for loss in step(model, torch.arange(MB)).outputs]
        if number == 0:
            named = {key.removeprefix("module."): p for key, p in model.local_named_parameters()}
            gradients = {key: None if p.grad is None else p.grad.clone() for key, p in named.items()}
        optimizer.step()
    return losses, gradients


def reference(name, profile, variant, seed=1):
    module = survey.build(name, profile)
    batch = survey.split(survey.inputs(module, variant), MB)
    torch.manual_seed(seed)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-2)
    losses, gradients = [], {}
    for number in range(STEPS):
        optimizer.zero_grad()
        for part in batch:
            loss = survey.loss_of(module(**part))
            (loss / MB).backward()
            losses.append(loss.item())
        if number == 0:
            gradients = {key: None if p.grad is None else p.grad.clone() for key, p in module.named_parameters()}
        optimizer.step()
    return losses, gradients


def compared(expected, ranks):
    """ "right", or what is wrong: bits, but for what several ranks hold, and losses after that was trained on."""
    losses, gradients = expected
    held = [key for _, found in ranks for key in found]
    shared = {key for key in held if held.count(key) > 1}
    differing = set()
    for found, own in ranks:
        for key, gradient in own.items():
            wanted = gradients[key]
            if wanted is None or gradient is None:
                assert_none = wanted is None or not wanted.any()
                if not assert_none:
                    return f"no gradient of {key}"
            elif not torch.equal(gradient, wanted):
                differing.add(key)
                error = (gradient - wanted).abs().max() / wanted.abs().max()
                if key not in shared or error > 1e-5:
                    return f"the gradient of {key} differs by {error:.1e}"
        if found[:MB] != losses[:MB]:
            return f"the first losses are {found[:MB]}, not {losses[:MB]}"
        if found != losses and not (differing and torch.allclose(torch.tensor(found), torch.tensor(losses), rtol=1e-4)):
            return f"the losses are {found}, not {losses}"
    missing = [key for key, gradient in gradients.items() if gradient is not None and key not in held]
    return f"no rank has {missing}" if missing else "right"


def outcome(name, folder):
    """ "left out", "right", "refused: why" or "wrong: how"."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        chosen = survey.choose(name, MB)
        if chosen is None:
            return "left out"
        expected = reference(name, *chosen)
        if expected[0] != reference(name, *chosen, seed=2)[0]:
            return "left out"  # it draws random numbers: each rank has its own
    folder.mkdir()
    results = Launch(train, 2, folder, name, *chosen).wait()
    if any(status != 0 for status, _ in results):
        errors = [line for _, log in results for line in log.splitlines() if line.startswith("smpc.errors.")]
        is_told = errors and all(status == 1 for status, _ in results)
        return f"refused: {errors[0]}" if is_told else f"wrong: {[(status, log[-600:]) for status, log in results]}"
    found = compared(expected, [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)])
    return found if found == "right" else f"wrong: {found}"


def assert_right(chosen, folder, least):
    table = {name: outcome(name, folder / name) for name in chosen}
    print("\n".join(f"{name}: {text}" for name, text in table.items()))
    wrong = {name: text for name, text in table.items() if text.startswith("wrong")}
    assert not wrong, wrong
    tried = [text for text in table.values() if text != "left out"]
    assert tried.count("right") >= least * len(tried), [text for text in tried if text != "right"]


@pytest.mark.long
@pytest.mark.matrix(1)
@pytest.mark.parametrize("name", EVERY_DAY)
def test_architectures(name, tmp_path):
    assert outcome(name, tmp_path / name) == "right"


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("part", range(PARTS))
def test_every_architecture(part, tmp_path):
    assert_right(survey.names()[part::PARTS], tmp_path, 0.9)
