"""Predicted against living bytes of training scripts: every combination of degrees, sharding, precision and recomputation.

What the plan of a script predicts of each rank is compared with the bytes that live there in its second step and in the optimizer's step
after it: parameters, gradients, buckets of replicas, optimizer state, activations, messages.
"""

import itertools

import pytest
import torch
import transformers
from executor_harness import run_workers

import smpc.v1 as smp

SAMPLES, LENGTH, VOCABULARY = 16, 64, 1024
MESSAGE = SAMPLES // 4 * LENGTH * 128 * 4  # bytes between two stages, of one microbatch in fp32
SHARDING = {
    "whole": {},
    "optimizer state": {"shard_optimizer_state": True},
    "all": {"fully_shard": True},
    "shards of 2": {"sharded_data_parallel_degree": 2},
}
AUTO = {"tensor_parallel_plan": "auto", "prescaled_batch": True}


def cases(world):
    """(pipeline degree, tensor degree, what replicas divide, dtype, whether blocks are computed again), with a pipeline."""
    for pipeline, tensor in itertools.product((2, 4), (1, 2)):
        if world % (pipeline * tensor) == 0:
            kinds = ("whole", "optimizer state", "all") if world > pipeline * tensor else ("whole",)
            yield from itertools.product((pipeline,), (tensor,), kinds, ("fp32", "bf16"), (False, True))


def settings(pipeline, tensor, sharding, dtype, _):
    found = {"pipeline_parallel_degree": pipeline, "tensor_parallel_degree": tensor, "microbatches": 4, "ddp": True}
    found |= {"bf16": True} if dtype == "bf16" else {}
    return found | (AUTO if tensor > 1 else {}) | SHARDING[sharding]


def make():
    torch.manual_seed(0)
    sizes = {"n_layer": 4, "n_embd": 128, "n_head": 4, "n_positions": LENGTH, "vocab_size": VOCABULARY}
    config = transformers.GPT2Config(**sizes, use_cache=False, bos_token_id=0, eos_token_id=0)
    return transformers.GPT2LMHeadModel(config).train()


@smp.step
def train_step(model, ids):
    loss = model(input_ids=ids, labels=ids).loss
    model.backward(loss)
    return loss


def make_mixture():
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 4, "num_attention_heads": 4}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 4}
    config = transformers.MixtralConfig(**sizes, **experts, vocab_size=VOCABULARY, use_cache=False)
    return transformers.MixtralForCausalLM(config).train()


def run(rank, folder, chosen):
    """By case (rank, predicted bytes, measured bytes) of all ranks."""
    return [measured(config, again) for config, again in chosen]


def measured(config, again):
    """(rank, predicted bytes, measured bytes) of all ranks."""
    smp.init(config)
    with_experts = config.get("expert_parallel_degree", 1) > 1
    module = make_mixture() if with_experts else make()
    model = smp.DistributedModel(module)
    blocks = module.model.layers if with_experts else module.transformer.h
    for block in blocks if again else ():
        smp.set_activation_checkpointing(block)
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters()))
    ids = torch.randint(VOCABULARY, (SAMPLES, LENGTH)) if smp.pp_rank() == 0 else torch.empty(0, dtype=torch.int64)
    for number in range(3):
        if number == 1:
            model.observe(1)  # memory in this step, times in the next one
        optimizer.zero_grad()
        train_step(model, ids)
        optimizer.step()
    lines = [line for line in model.report().lines if line.what.endswith("peak")]
    smp.shutdown()
    return [(line.what, line.predicted, line.measured) for line in lines]


def check(folder, world, chosen):
    """All of `chosen` in one job: pairs of a configuration and whether blocks are computed again."""
    wrong = []
    for (config, again), lines in zip(chosen, run_workers(run, world, folder, chosen)[0], strict=True):
        assert len(lines) == world
        for what, predicted, measured in evened(lines) if "expert_parallel_degree" in config else lines:
            # What has been sent is held until it has arrived: whether the last message has, by the peak, is chance.
            is_near = 0.95 * measured <= predicted <= 1.05 * measured + MESSAGE
            how = f"{config}, {'with' if again else 'without'} recomputation, {what}"
            print(f"{predicted / measured - 1:+.1%} {how}")
            wrong += [] if is_near else [f"{how}: predicted {predicted:,}, measured {measured:,}"]
    assert not wrong, "\n".join(wrong)


def evened(lines):
    """With the average of the ranks of each stage: predictions take all experts to get as many tokens, and these routers are random."""
    stages = [what.partition("(")[2] for what, *_ in lines]
    for stage in dict.fromkeys(stages):
        rows = [line for line, own in zip(lines, stages, strict=True) if own == stage]
        assert len({predicted for _, predicted, _ in rows}) == 1
        yield f"ranks of ({stage}", rows[0][1], sum(measured for *_, measured in rows) / len(rows)


def tried(chosen):
    return [(settings(*case), case[-1]) for case in chosen]


def test_replicas_and_tensor_ranks(tmp_path):
    """Both were 6 to 11% off: buckets were not predicted, and what ranks of a host share for small collectives was counted."""
    check(tmp_path, 4, tried([(2, 1, "whole", "fp32", False), (2, 2, "whole", "bf16", True)]))


@pytest.mark.slow
@pytest.mark.parametrize("start", range(0, len(list(cases(4))), 6))
def test_four_ranks(tmp_path, start):
    check(tmp_path, 4, tried(list(cases(4))[start : start + 6]))


@pytest.mark.slow
def test_two_ranks(tmp_path):
    check(tmp_path, 2, tried(cases(2)))


@pytest.mark.matrix(3)
@pytest.mark.parametrize("again", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("sharding", SHARDING)
@pytest.mark.parametrize("kind", ["context", "expert", "replica"])
def test_ranks_that_share_sequences_or_experts(tmp_path, kind, sharding, dtype, again):
    """Of experts the plan counted a third of what they keep, and buckets that they do not have: -22%."""
    if kind == "context" and sharding == "shards of 2":
        pytest.skip("parts over 2 x 2 ranks of each stage take 8 ranks, and are those of `all`")
    config = settings(2, 1, sharding, dtype, None)
    if kind != "replica":
        config[f"{kind}_parallel_degree"] = 2
    check(tmp_path, 4, [(config, again)])


@pytest.mark.parametrize("dtype", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_experts_in_parts_beside_sequences_without_a_pipeline(tmp_path, dtype):
    """Two ranks have the same experts, and divide them; the plan had them whole on each: 17% too much, 28% in bf16."""
    config = settings(1, 1, "all", dtype, None) | {"context_parallel_degree": 2, "expert_parallel_degree": 2}
    check(tmp_path, 4, [(config, True)])
