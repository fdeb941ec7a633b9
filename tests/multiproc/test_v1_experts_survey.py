"""Mixtures of experts in transformers that no other test names, divided over two ranks: losses and gradients of one process."""

import pytest
import survey
import torch
from executor_harness import run_workers

import smpc.v1 as smp

MICROBATCHES, LIMIT = 2, 1e-5
NAMES = (
    "AXK1ForCausalLM", "AfmoeForCausalLM", "AriaTextForCausalLM", "BailingHybridForCausalLM", "BeamForCausalLM", "Cohere2MoeForCausalLM",
    "DeepseekV4ForCausalLM", "Dots1ForCausalLM", "Ernie4_5_MoeForCausalLM", "ExaoneMoeForCausalLM", "FlexOlmoForCausalLM",
    "Glm4MoeForCausalLM", "Glm4MoeLiteForCausalLM", "GraniteMoeForCausalLM", "HYV4ForCausalLM",
    "Inkling2ForCausalLM", "InklingForCausalLM", "JambaForCausalLM", "KimiLinearForCausalLM", "Kolibri1ForCausalLM", "LagunaForCausalLM",
    "MellumForCausalLM", "MiMoV2FlashForCausalLM", "MiniMaxForCausalLM", "MiniMaxM2ForCausalLM",
    "Mistral4ForCausalLM", "NemotronHForCausalLM", "OpenAIPrivacyFilterModel", "PhimoeForCausalLM", "Qwen3NextForCausalLM",
    "Qwen3_5MoeForCausalLM", "SolarOpenForCausalLM",
)  # fmt: skip


@smp.step
def train_step(model, batch):
    loss = survey.loss_of(model(**batch))
    model.backward(loss)
    return loss


def batch_of(model, variant, part):
    """Tokens in another order for the second rank."""
    batch = survey.inputs(model, variant)
    return {key: value.flip(1) if part and key in ("input_ids", "labels") else value for key, value in batch.items()}


def build(name, profile, variant):
    """A model in training mode. One that draws random numbers in it, which stages draw from other places of their generators, in evaluation
    mode."""
    model = survey.build(name, profile)
    before = torch.get_rng_state()
    with torch.no_grad():
        model(**batch_of(model, variant, 0))
    draws = not torch.equal(before, torch.get_rng_state())
    model = survey.build(name, profile)  # a run may leave something in it
    return model.eval() if draws else model


def train(rank, folder, cases, degree):
    """By name, this rank's loss and gradients; or what was said."""
    found = {}
    for name, (profile, variant) in cases.items():
        smp.init(
            {"pipeline_parallel_degree": degree, "expert_parallel_degree": 2, "microbatches": MICROBATCHES, "ddp": True}
        )
        module = build(name, profile, variant)
        batch = batch_of(module, variant, smp.rdp_rank())
        model = smp.DistributedModel(module)
        loss = train_step(model, batch).reduce_mean().item()
        own = ((key, p.grad, model.slices.get(key)) for key, p in model.local_named_parameters())
        found[name] = loss, [(key, grad.clone(), part) for key, grad, part in own if grad is not None]
        smp.shutdown()
    return found


def one_process(name, profile, variant):
    model, total = build(name, profile, variant), 0.0
    for part in range(2):
        for batch in survey.split(batch_of(model, variant, part), MICROBATCHES):
            loss = survey.loss_of(model(**batch)) / MICROBATCHES / 2
            loss.backward()
            total += loss.item()
    return total, {key: p.grad for key, p in model.named_parameters() if p.grad is not None}


def complaints(name, own, choice):
    """What is not as in one process, of the results of all ranks."""
    loss, gradients = one_process(name, *choice)
    largest = max(gradient.abs().max() for gradient in gradients.values())
    wrong = [] if sum(each for each, _ in own) / len(own) == pytest.approx(loss, rel=1e-6) else [f"{name}: loss"]
    for key, gradient, part in (item for _, items in own for item in items):
        whole = gradients[key]
        expected = whole if part is None else whole.narrow(part.dim, part.start, gradient.shape[part.dim])
        scale = max(whole.abs().max(), 0.01 * largest)
        error = (gradient - expected).abs().max() / scale if gradient.numel() else 0
        wrong += [] if error <= LIMIT else [f"{name}: gradient of {key} off by {error:.1g}"]
    missing = gradients.keys() - {key for _, items in own for key, *_ in items}
    return wrong + [f"{name}: no gradient of {key}" for key in sorted(missing)]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize("start", range(0, len(NAMES), 6))
def test_experts_of_other_architectures(tmp_path, degree, start):
    chosen = {name: survey.choose(name, MICROBATCHES) for name in NAMES[start : start + 6]}
    cases = {name: choice for name, choice in chosen.items() if choice is not None}
    assert len(cases) == len(chosen), "they all run by themselves"
    found = run_workers(train, 2 * degree, tmp_path, cases, degree)
    wrong = [text for name in cases for text in complaints(name, [each[name] for each in found], cases[name])]
    assert not wrong, "\n".join(wrong)
