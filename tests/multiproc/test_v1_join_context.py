"""`model.join()` beside context parallelism: the training of replicas that have whole sequences, in the same `join`."""

import pytest
import torch
from executor_harness import run_workers
from test_v1_join import evaluate, ids, train
from v1_harness import FOR_A_MICROBATCH, FOR_THE_STEP, MB, WHILE_RUNNING, make_model

import smpc.v1 as smp
from smpc.errors import PeerError, StepError

CASES = {
    "wholes": ((2, 4), {}, {}),
    "no batch at all": ((0, 2), {}, {}),
    "by those that still train": ((4, 2), {}, {"divide_by_initial_world_size": False}),
    "parts for the step": ((2, 4), FOR_THE_STEP, {}),
    "parts for a microbatch": ((3, 1), FOR_A_MICROBATCH, {"divide_by_initial_world_size": False}),
    "parts while running": ((1, 3), WHILE_RUNNING, {}),
    "stages": ((1, 3), {"pipeline_parallel_degree": 2}, {}),
    "stages in parts": (
        (3, 1),
        {"pipeline_parallel_degree": 2, **FOR_THE_STEP},
        {"divide_by_initial_world_size": False},
    ),
}


def start(config):
    smp.init({"pipeline_parallel_degree": 1, "context_parallel_degree": 2, "microbatches": MB, "ddp": True, **config})
    model = smp.DistributedModel(make_model()[0].double())
    return model, smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))


def whose_batches():
    """Ranks of a context-parallel group have the same."""
    return smp.rdp_rank() // smp.cp_size()


def joins(rank, folder, case):
    counts, config, arguments = CASES[case]
    model, optimizer = start(config)
    with model.join(**arguments):
        for step in range(counts[whose_batches()]):
            batch = ids(whose_batches(), step)
            with torch.no_grad():
                evaluate(model, batch)
            train(model, batch)
            optimizer.step()
            optimizer.zero_grad()
    train(model, ids(whose_batches(), 9))  # as if nothing had been
    optimizer.step()
    return model.state_dict()


def in_one_process(counts, divides_by_all):
    model = make_model()[0].double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    steps = [
        [ids(replica, step) for replica, count in enumerate(counts) if step < count] for step in range(max(counts))
    ]
    for batches in [*steps, [ids(replica, 9) for replica in range(2)]]:
        optimizer.zero_grad()
        for part in (part for batch in batches for part in batch.chunk(MB)):
            (model(input_ids=part, labels=part).loss / MB / (2 if divides_by_all else len(batches))).backward()
        optimizer.step()
    return model.state_dict()


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_replicas_of_sequences_in_slices(tmp_path, case):
    counts, config, arguments = CASES[case]
    results = run_workers(joins, 4 * config.get("pipeline_parallel_degree", 1), tmp_path, case)
    expected = in_one_process(counts, arguments.get("divide_by_initial_world_size", True))
    for found in results:
        assert set(found) == set(expected)
        for key, value in found.items():
            torch.testing.assert_close(value, expected[key], rtol=1e-9, atol=1e-10, msg=key)


def parts(rank, folder):
    """Ranks of a group that have not as many batches."""
    model, _ = start({})

    def loop():
        with model.join():
            for step in range((2, 2, 3, 2)[rank]):
                train(model, ids(whose_batches(), step))

    with pytest.raises(
        (StepError, PeerError), match="tensor- and context-parallel ranks of replica 1 some ran out of data"
    ):
        loop()


def test_a_group_is_over_together(tmp_path):
    """They compare their batches before a step: one of them waited for the other's."""
    run_workers(parts, 4, tmp_path)


def sums_others(rank, folder):
    """A replica that is over, and a later program that sums gradients of other parameters."""
    model, _ = start(FOR_THE_STEP)

    def loop():
        with model.join():
            for step in range(1 + whose_batches()):
                if step:
                    runtime = model._pipeline._runtime
                    runtime._programs[0].summed = frozenset({"lm_head.weight"})
                train(model, ids(whose_batches(), step)[:, : 12 - 4 * step])

    with pytest.raises((StepError, PeerError), match="to divide sequences for the same parameters"):
        loop()


@pytest.mark.long
def test_a_program_that_sums_other_gradients_is_not_followed(tmp_path):
    """Replicas that are over would scale gradients as the first program does."""
    run_workers(sums_others, 4, tmp_path)
