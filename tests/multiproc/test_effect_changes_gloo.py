"""What scripts change between steps, on ranks that are processes: all make the same change, and a step equals one process's."""

import dataclasses
import os
import random

import effect_changes
import effect_runs
import pytest
import torch
from effect_base import EFFECTS, WIDTH
from effect_changes import MAY_BE_REFUSED, STEPS, random_changing
from effect_runs import MICROBATCHES
from executor_harness import run_workers

import smpc.v1 as smp
from smpc.errors import SmpcError

KINDS = ("sets_mode", "freezes", "writes_parameter", "adds_attribute")
NUM_CASES = 4
pytestmark = [
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated"),  # torch says so of itself, in forward mode
]


@smp.step
def train_step(model, x):
    output = model(x)
    model.backward((output * torch.arange(1.0, WIDTH + 1, dtype=output.dtype)).sum())
    return output


def cases_from(first, number):
    """Without what draws random numbers, which every rank does by itself."""
    found = []
    for seed in range(first, first + 100 * number):
        case = dataclasses.replace(random_changing(seed), kinds=KINDS)
        if not any(EFFECTS[name].alone for name in case.names if name in EFFECTS) and len(found) < number:
            found.append(case)
    return found


def train_case(case):
    """What a rank knows after every step of what it holds, why it went no further, "" if it did, and the parameters of several stages."""
    smp.init({"pipeline_parallel_degree": 2, "microbatches": MICROBATCHES, "program_cache_size": 64})
    before, module = effect_runs.settings(), case.model()
    effect_runs.seed_everything(case.seed + 1)
    found, reason, shared = [], "", ()
    try:
        model = smp.DistributedModel(module)
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5))
        (x,), _ = case.batch()
        for number in range(STEPS):
            case.change(module, number)
            optimizer.zero_grad()
            outputs = [output.detach().clone() for output in train_step(model, x).outputs]
            results = {f"output {m}": output for m, output in enumerate(outputs)}
            own = dict(model.local_named_parameters())
            results |= {f"gradient of {n}": None if p.grad is None else p.grad.clone() for n, p in own.items()}
            optimizer.step()
            shared += tuple(item.name for item in model._predicted().shared_parameters)
            found.append(results | {f"parameter {name}": p.detach().clone() for name, p in own.items()})
    except SmpcError as error:
        reason = str(error)
    effect_runs.restore(before)
    smp.shutdown()
    return found, reason, shared


def train_cases(rank, _, cases):
    return [train_case(case) for case in cases]


def check_cases(folder, cases):
    """No step on any rank is wrong; returns how many cases went to the end."""
    by_rank, num_equal = run_workers(train_cases, 2, folder, cases), 0
    for number, case in enumerate(cases):
        expected, failure = effect_changes.eager(case)
        effect_runs.restore((True, torch.float32))
        assert failure is None, case
        for found, reason, shared in (of_rank[number] for of_rank in by_rank):
            for step, (theirs, ours) in enumerate(zip(expected, found, strict=False)):
                wrong = effect_runs.differences({name: theirs[name] for name in ours}, ours, shared)
                assert not wrong, f"{case}, step {step}: {wrong}"
            assert len(found) == STEPS or any(text in reason for text in MAY_BE_REFUSED.values()), f"{case}: {reason}"
        num_equal += len(by_rank[0][number][0]) == STEPS
    return num_equal


@pytest.mark.long
def test_random_changes_on_real_ranks(tmp_path):
    assert check_cases(tmp_path, cases_from(0, NUM_CASES)) > NUM_CASES // 2


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_many_random_changes_on_real_ranks(tmp_path):
    first = int(os.environ.get("SMPC_CHANGES_FIRST", random.SystemRandom().randrange(10**9)))
    number = int(os.environ.get("SMPC_CHANGES_RANKS", "60"))
    print(f"SMPC_CHANGES_FIRST={first} SMPC_CHANGES_RANKS={number}")
    print(check_cases(tmp_path, cases_from(first, number)), "equal")
