"""Every architecture of Hugging Face with attention that gets small, its sequences shared by two ranks: one process's numbers.

Models run in evaluation mode, as dropout draws other numbers on slices; the loss and every gradient are compared. `outcome` is "right",
"refused: why", "wrong: how", or "left out" for what does not run by itself, has no attention, draws random numbers in evaluation mode,
or differs from itself by rounding. Threads share one generator of random numbers.
"""

import copy
import warnings

import pytest
import survey
from tensor_ranks import run_ranks, tensor_groups

from smpc.context_parallel import shard
from smpc.errors import SmpcError

PARTS = 16
EVERY_DAY = ("BartForConditionalGeneration", "RobertaForMaskedLM", "OPTForCausalLM")
_ATTENDS = ("softmax(", "scaled_dot_product_attention", "ring_attention(", "exchanged_attention(", "causal_rows(")


def train(module, batch):
    loss = survey.loss_of(module(**batch))
    loss.backward()
    owner = module.model if hasattr(module, "rewritten") else module
    return loss.detach(), {name: p.grad.clone() for name, p in owner.named_parameters() if p.grad is not None}


def compared(found, expected):
    """ "right", or what is wrong: by each tensor's largest entry, and by the largest of all for what is zero but for rounding."""
    (loss, gradients), (whole_loss, whole) = found, expected
    if not abs(loss - whole_loss) <= 1e-6 * abs(whole_loss) and not (loss.isnan() and whole_loss.isnan()):
        return f"wrong: the loss is {loss}, not {whole_loss}"
    largest = max((gradient.abs().nan_to_num().max() for gradient in whole.values() if gradient.numel()), default=0)
    for name, gradient in whole.items():
        if not gradient.numel():
            continue
        if name not in gradients:
            if gradient.any():
                return f"wrong: no gradient of {name}"
            continue
        unknown = gradient.isnan() & gradients[name].isnan()
        own, gradient = (value.masked_fill(unknown, 0) for value in (gradients[name], gradient))
        error = (own - gradient).abs().max() / max(gradient.abs().max(), 0.01 * largest)
        if not error <= 1e-5 and own.ne(gradient).any():
            return f"wrong: the gradient of {name} differs by {error:.1e}"
    return "right"


def outcome(name):
    """(outcome, what is computed whole, how many operations are)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        chosen = survey.choose(name, 1)
        if chosen is None:
            return "left out", (), 0
        model, variant = survey.build(name, chosen[0]).eval(), chosen[1]
        batch = survey.inputs(model, variant)
        expected, again = train(copy.deepcopy(model), batch), train(copy.deepcopy(model), batch)
        if expected[0] != again[0]:
            return "left out", (), 0
        groups = tensor_groups(2)
        try:
            modules = [shard(copy.deepcopy(model), batch, group) for group in groups]
        except SmpcError as error:
            return f"refused: {type(error).__name__}: {str(error)[:300]}", (), 0
        if not any(word in modules[0].source for word in _ATTENDS):
            return "left out", (), 0
        results = run_ranks(2, lambda rank: train(modules[rank], batch))
        found = [compared(result, expected) for result in results]
        whole = modules[0].rewritten.whole
        return max(found, key=len), tuple(dict.fromkeys(item.function for item in whole)), sum(i.count for i in whole)


@pytest.mark.long
@pytest.mark.matrix(1)
@pytest.mark.parametrize("name", EVERY_DAY)
def test_architectures(name):
    assert outcome(name)[0] == "right"


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("part", range(PARTS))
def test_every_architecture(part):
    table = {name: outcome(name) for name in survey.names()[part::PARTS]}
    print(
        "\n".join(
            f"{name}: {text}, whole: {count} of {', '.join(kinds)}" for name, (text, kinds, count) in table.items()
        )
    )
    wrong = {name: text for name, (text, *_) in table.items() if text.startswith("wrong")}
    assert not wrong, wrong
