"""Training for a long time on two ranks while sequence lengths and batch sizes change: nothing grows, and no bit differs.

SMPC_SOAK_SECONDS says for how long, twenty minutes by default. Every length and batch size has a program of its own, and there are more of
them than programs are kept: each step either finds its program or compiles it again in the place of another.
"""

import gc
import linecache
import os
import threading
import time

import pytest
import torch
from executor_harness import Launch
from transformers import GPT2Config, GPT2LMHeadModel

import smpc.v1 as smp

SECONDS = float(os.environ.get("SMPC_SOAK_SECONDS", "1200"))
MB = 2
BOUND = 6
LONGEST = 24
NUM_SAMPLES = 16
MEBIBYTE = 1 << 20
_GROWTH = 8 * MEBIBYTE  # of the median of a quarter of all samples against that of an earlier quarter


def make_model():
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=LONGEST, bos_token_id=0, eos_token_id=1,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, tie_word_embeddings=False,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


@smp.step
def train_step(model, ids):
    loss = model(input_ids=ids, labels=ids).loss
    model.backward(loss)
    return loss


@smp.step
def evaluate(model, ids):
    return model(input_ids=ids, labels=ids).loss


def batch(step):
    generator = torch.Generator().manual_seed(step)
    length = int(torch.randint(4, LONGEST + 1, (), generator=generator))
    size = MB * int(torch.randint(1, 3, (), generator=generator))
    return torch.randint(3, 64, (size, length), generator=generator)


class Eager:
    """The same training in one process."""

    def __init__(self):
        self.model = make_model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)

    def losses(self, ids, training):
        found = []
        with torch.set_grad_enabled(training):
            for part in ids.chunk(MB):
                loss = self.model(input_ids=part, labels=part).loss
                found.append(loss.detach())
                if training:
                    (loss / MB).backward()
        if training:
            self.optimizer.step()
            self.optimizer.zero_grad()
        return found


def sample(model, step):
    """What this process holds."""
    gc.collect()
    with open("/proc/self/statm") as statm:
        resident = int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return {
        "step": step,
        "resident": resident,
        "handles": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "python threads": threading.active_count(),
        "programs": len(model._pipeline.programs.entries),
        "sources": sum(name.startswith("<smpc stage") for name in linecache.cache),
        "objects": len(gc.get_objects()),
    }


def soak(rank, folder, seconds):
    smp.init({"pipeline_parallel_degree": 2, "microbatches": MB, "program_cache_size": BOUND})
    model = smp.DistributedModel(make_model())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-3))
    eager = Eager() if rank == 0 else None
    samples, step, started, num_different, num_losses = [], 0, time.monotonic(), 0, 0
    while True:
        elapsed = smp.allgather(time.monotonic() - started, smp.WORLD)[0]
        if elapsed > seconds * len(samples) / NUM_SAMPLES:
            samples.append(sample(model, step))
            print(samples[-1], flush=True)
        if elapsed > seconds:
            break
        ids, training = batch(step), step % 4 != 3
        given = ids if rank == 0 else torch.empty(0)
        if training:
            losses = train_step(model, given).outputs
            optimizer.step()
            optimizer.zero_grad()
        else:
            with torch.no_grad():
                losses = evaluate(model, given).outputs
        if eager is not None:
            expected = eager.losses(ids, training)
            num_losses += len(expected)
            num_different += sum(not torch.equal(a, b) for a, b in zip(losses, expected, strict=True))
        step += 1
    smp.shutdown()
    return samples, num_losses, num_different


def median(values):
    return sorted(values)[len(values) // 2]


def check(folder, seconds):
    launch = Launch(soak, 2, folder, seconds)
    for rank, (status, log) in enumerate(launch.wait(seconds + 240)):
        assert status == 0, f"rank {rank} ended with {status}:\n{log}"
    for rank in range(2):
        samples, num_losses, num_different = torch.load(folder / f"{rank}.pt", weights_only=False)
        print(f"rank {rank}: {num_losses} losses, {num_different} differ", *samples, sep="\n")
        assert (num_losses > 0) == (rank == 0)
        assert num_different == 0
        settled = samples[NUM_SAMPLES // 4 :]  # by then all formats have been met, and the cache is full
        quarter = NUM_SAMPLES // 4
        # Most of all samples: the number of threads goes up and down by one.
        for key in ("handles", "threads", "python threads", "programs", "sources"):
            assert max(s[key] for s in settled[-quarter:]) <= max(s[key] for s in settled[:-quarter]), key
        assert max(s["programs"] for s in samples) == BOUND >= max(s["sources"] for s in samples)
        objects = [median([s["objects"] for s in part]) for part in (settled[:quarter], settled[-quarter:])]
        assert objects[1] < 1.05 * objects[0], objects
        early = median([s["resident"] for s in settled[:quarter]])
        late = median([s["resident"] for s in settled[-quarter:]])
        assert late - early < _GROWTH, (
            f"{early / MEBIBYTE:.1f} MiB in the second quarter, {late / MEBIBYTE:.1f} in the last"
        )


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 300)
def test_nothing_grows_and_no_loss_differs(tmp_path):
    check(tmp_path, SECONDS)
