"""Every combination of degrees trains as one process does: losses, all gradients, four steps of AdamW, with uneven padding.

A case is (pipeline degree, tensor degree, what tensor ranks split, sharding, schedule, whether each tensor rank has samples of its own).
Sharding: "no", "all" (`fully_shard`), or a `sharded_data_parallel_degree`.
"""

import pytest
import torch
import transformers
from executor_harness import run_workers

import smpc.v1 as smp

FOUR = [
    (1, 2, "modules", "all", "", True),
    (1, 2, "auto", 2, "", False),
    (1, 1, "", 2, "", False),
    (2, 1, "", "all", "zb-v", False),
    (1, 2, "auto", "all", "", False),
    (1, 2, "modules", 2, "", True),
    (1, 1, "", 4, "", False),
    (2, 1, "", 2, "1f1b", False),
    (2, 1, "", "all", "zb-h1", False),
    (1, 2, "modules", "all", "", False),
    (1, 1, "", "all", "", False),
    (2, 1, "", "all", "1f1b", False),
    (2, 1, "", "all", "interleaved-1f1b", False),
    (2, 1, "", "all", "list", False),
    (1, 2, "auto", "no", "", False),
    (1, 2, "modules", "no", "", True),
    (2, 2, "modules", "no", "1f1b", True),
]
STEPS, SAMPLES, MB, LENGTH, VOCABULARY = 4, 16, 2, 6, 32


def make():
    torch.manual_seed(1)
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_layer=2, n_embd=32, n_head=4, vocab_size=VOCABULARY, n_positions=LENGTH,
            resid_pdrop=0, attn_pdrop=0, embd_pdrop=0, use_cache=False, bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip
    model.eval()  # there is no dropout, and masks are not random
    return model.train()


def batches():
    """Samples of different lengths: the rest of each is padding, which has no labels."""
    generator = torch.Generator().manual_seed(3)
    for _ in range(STEPS):
        ids = torch.randint(1, VOCABULARY, (SAMPLES, LENGTH), generator=generator)
        lengths = torch.randint(2, LENGTH + 1, (SAMPLES, 1), generator=generator)
        mask = (torch.arange(LENGTH) < lengths).long()
        mask[:, -1:] *= torch.arange(SAMPLES)[:, None] % 2  # never all ones
        yield ids, mask, ids.masked_fill(mask == 0, -100)


def optimizer_of(model):
    # Where a gradient is nothing but rounding errors, Adam would make steps of them without so large an eps.
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)


def alone(num_parts):
    """One process over the samples of all ranks; the losses of a step are averaged over ranks and microbatches."""
    model = make()
    optimizer = optimizer_of(model)
    losses, grads = [], {}
    for step, batch in enumerate(batches()):
        optimizer.zero_grad()
        parts = zip(*(tensor.chunk(num_parts * MB) for tensor in batch), strict=True)
        each = [model(input_ids=ids, attention_mask=mask, labels=labels).loss for ids, mask, labels in parts]
        loss = sum(each) / len(each)
        loss.backward()
        losses.append(loss.item())
        if step == 0:
            grads = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        optimizer.step()
    return losses, grads, model.state_dict()


@smp.step
def train_step(model, ids, mask, labels):
    loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
    model.backward(loss)
    return loss


def settings(pp, tp, splits, sharding, schedule, own):
    found = {"pipeline_parallel_degree": pp, "tensor_parallel_degree": tp, "microbatches": MB, "ddp": True}
    if tp > 1:
        found |= {"prescaled_batch": not own, "tensor_parallel_plan": splits}
    if sharding == "all":
        found["fully_shard"] = True
    elif sharding != "no":
        found |= {"sharded_data_parallel_degree": sharding, "sdp_gradient_clipping": 0.0}
    return found | ({"schedule": schedule} if pp > 1 else {})


def to_hugging_face(values):
    """Names and shapes of the model's own."""
    for _, translate in (pair[::-1] for pair in smp.state.module_manager.translate_functions):
        values = translate(values)
    return values


def run(rank, folder, cases):
    found = []
    for case in cases:
        smp.init(settings(*case))
        _, tp, splits, *_, own = case
        is_split = tp > 1 and splits == "modules"
        with smp.tensor_parallelism(is_split):
            module = make()
        model = smp.DistributedModel(module)
        optimizer = smp.DistributedOptimizer(optimizer_of(model))
        num_parts = smp.dp_size() if own else smp.rdp_size()
        part = smp.dp_rank() if own else smp.rdp_rank()
        losses, grads = [], {}
        for step, batch in enumerate(batches()):
            optimizer.zero_grad()
            loss = train_step(model, *(tensor.chunk(num_parts)[part] for tensor in batch)).reduce_mean()
            losses.append(torch.stack(smp.allgather(loss, smp.DP_GROUP)).double().mean().item())
            optimizer.step()
            if step == 0:
                grads = {name: 10 * items["exp_avg"] for name, items in optimizer.state_dict()["state"].items()}
        values = model.state_dict()
        if is_split:
            grads = to_hugging_face({**{name: v for name, v in values.items() if name not in grads}, **grads})
            values = to_hugging_face(values)
        found.append((num_parts, losses, grads, values))
        smp.shutdown()
    return found


def check(world, folder, cases):
    for results in run_workers(run, world, folder, cases):
        for case, (num_parts, losses, grads, values) in zip(cases, results, strict=True):
            expected_losses, expected_grads, expected_values = alone(num_parts)
            assert losses == pytest.approx(expected_losses, rel=2e-6), case
            for name, gradient in expected_grads.items():
                torch.testing.assert_close(
                    grads[name], gradient, rtol=1e-5, atol=1e-6, msg=lambda m, n=name, c=case: f"{c} {n}: {m}"
                )
            for name, value in expected_values.items():
                torch.testing.assert_close(
                    values[name], value, rtol=1e-5, atol=2e-6, msg=lambda m, n=name, c=case: f"{c} {n}: {m}"
                )


def test_two_ranks(tmp_path):
    check(2, tmp_path, [(1, 1, "", "all", "", False)])


@pytest.mark.long
def test_four_ranks(tmp_path):
    check(4, tmp_path, FOUR[:2])


@pytest.mark.slow
def test_four_ranks_in_all_ways(tmp_path):
    check(4, tmp_path, FOUR[2:])
