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
SHARDING = {"whole": {}, "optimizer state": {"shard_optimizer_state": True}, "all": {"fully_shard": True}}


def cases(world):
    """(pipeline degree, tensor degree, what replicas divide, dtype, whether blocks are computed again), with a pipeline."""
    for pipeline, tensor in itertools.product((2, 4), (1, 2)):
        if world % (pipeline * tensor) == 0:
            kinds = SHARDING if world > pipeline * tensor else ("whole",)
            yield from itertools.product((pipeline,), (tensor,), kinds, ("fp32", "bf16"), (False, True))


def settings(pipeline, tensor, sharding, dtype, _):
    found = {"pipeline_parallel_degree": pipeline, "tensor_parallel_degree": tensor, "microbatches": 4, "ddp": True}
    found |= {"bf16": True} if dtype == "bf16" else {}
    found |= {"tensor_parallel_plan": "auto", "prescaled_batch": True} if tensor > 1 else {}
    return found | SHARDING[sharding]


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


def run(rank, folder, chosen):
    """By case (rank, predicted bytes, measured bytes) of all ranks."""
    found = []
    for case in chosen:
        smp.init(settings(*case))
        module = make()
        model = smp.DistributedModel(module)
        for block in module.transformer.h if case[-1] else ():
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
        found.append([(line.what, line.predicted, line.measured) for line in lines])
        smp.shutdown()
    return found


def check(folder, world, chosen):
    for case, lines in zip(chosen, run_workers(run, world, folder, chosen)[0], strict=True):
        assert len(lines) == world
        for what, predicted, measured in lines:
            # What has been sent is held until it has arrived: whether the last message has, by the peak, is chance.
            assert 0.95 * measured <= predicted <= 1.05 * measured + MESSAGE, f"{case}, {what}"


def test_replicas_and_tensor_ranks(tmp_path):
    """Both were 6 to 11% off: buckets were not predicted, and what ranks of a host share for small collectives was counted."""
    check(tmp_path, 4, [(2, 1, "whole", "fp32", False), (2, 2, "whole", "bf16", True)])


@pytest.mark.slow
@pytest.mark.parametrize("start", range(0, len(list(cases(4))), 6))
def test_four_ranks(tmp_path, start):
    check(tmp_path, 4, list(cases(4))[start : start + 6])


@pytest.mark.slow
def test_two_ranks(tmp_path):
    check(tmp_path, 2, list(cases(2)))
