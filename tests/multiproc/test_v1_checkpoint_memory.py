"""Memory of state dicts and checkpoints of a model of 2 GB on 4 ranks: a rank's share, and one tensor."""

import warnings

import pytest
import torch
from checkpoint_harness import peak_of
from executor_harness import Launch
from torch import nn

import smpc.v1 as smp

LAYERS, BYTES = 16, 128 << 20


@smp.step
def evaluate(model, x):
    return model(x).sum()


def start():
    smp.init({"pipeline_parallel_degree": 4, "microbatches": 1, "checkpoint_timeout": 300.0})
    sizes = [(4096, 8192), (8192, 4096)] * (LAYERS // 2)
    module = nn.Sequential(*(nn.utils.skip_init(nn.Linear, *size, bias=False) for size in sizes))
    with torch.no_grad():
        for number, parameter in enumerate(module.parameters()):
            parameter.fill_(number)
    model = smp.DistributedModel(module)
    evaluate(model, torch.ones(1, 4096))
    return model


def gather_and_load(rank, folder, path):
    model = start()
    own = sum(parameter.nbytes for parameter in model.local_parameters())
    options = {"model": model, "user_content": {"step": 1}}
    again = {"load_optimizer": False, "strict": True}

    def load_local():
        model.load_state_dict(model.local_state_dict())

    peaks = {
        "state_dict(gather_to_rank0=True)": peak_of(lambda: model.state_dict(gather_to_rank0=True)),
        "load_state_dict": peak_of(load_local),
        "save": peak_of(lambda: smp.save_checkpoint(str(path), "a", **options)),
        "save full": peak_of(lambda: smp.save_checkpoint(str(path), "b", partial=False, **options)),
        "resume": peak_of(lambda: smp.resume_from_checkpoint(str(path), **again)),
        "resume full": peak_of(lambda: smp.resume_from_checkpoint(str(path), partial=False, **again)),
    }
    for name, parameter in model.local_named_parameters():
        assert bool((parameter == int(name.split(".")[0])).all())
    return own, peaks


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_gathering_saving_and_loading_2_gb_need_one_tensor_beside_the_share(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ended = Launch(gather_and_load, 4, tmp_path, tmp_path / "run").wait(500)
    assert [status for status, _ in ended] == [0] * 4, ended
    results = [torch.load(tmp_path / f"{rank}.pt") for rank in range(4)]
    for rank, (own, peaks) in enumerate(results):
        print(
            f"rank {rank}, {own / 1e6:.0f} MB:",
            *(f"{name} {peak / 1e6:.0f} MB" for name, peak in peaks.items()),
            sep="\n  ",
        )
        assert own == LAYERS * BYTES // 4
        wanted = LAYERS * BYTES if rank == 0 else 0  # rank 0 asks for all
        assert peaks.pop("state_dict(gather_to_rank0=True)") <= wanted + 200e6
        assert max(peaks.values()) <= 200e6
