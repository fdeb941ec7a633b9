"""The same input gives the same bytes whatever order Python gives to sets: a process for each hash seed."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys

import pytest
from locations import SUPPORT

# Everything that is written about a model in 3 stages, and a search. Golden bytes are those of larger models, under any hash seed.
WRITTEN = """
import sys, warnings
warnings.simplefilter("ignore")
sys.path.insert(0, {tests!r})
import torch, smpc
from smpc.compile import compile_model
from smpc.report.page import render_page
from smpc.report.perfetto import perfetto_json
layers = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(6)))
model, batch = layers, torch.zeros(4, 8)
if not {small}:
    import zoo
    model, batch = zoo.build("t5")
found = compile_model(model, batch, pipeline_parallel_degree=3, microbatches=4)
write = sys.stdout.write
write(found.trace.to_json() + found.plan.to_json() + found.schedule_text())
write("".join(found.rank_source(rank) for rank in range(3)))
write(render_page(found) + perfetto_json(found.plan, found.timeline()))
write(smpc.search(layers, torch.zeros(4, 8), world_size=2).to_json())
"""
LIMITED = """
model, batch = zoo.build("unet")
settings = dict(pipeline_parallel_degree=2, microbatches=4)
peak = max(stage.peak_memory_bytes for stage in smpc.partition(model, batch, memory_weight=1.0, **settings).stages)
write(smpc.partition(model, batch, memory_weight=0.0, memory_limit=int(1.02 * peak), **settings).to_json())
"""


def digest(seed: int, is_small: bool) -> str:
    """Of the bytes of a small model, or of a tied encoder-decoder and a U-Net with a memory limit."""
    script = WRITTEN.format(tests=str(SUPPORT), small=is_small) + ("" if is_small else LIMITED)
    environment = {**os.environ, "PYTHONHASHSEED": str(seed), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, cwd="/", timeout=500)
    assert done.returncode == 0, done.stderr.decode()
    assert len(done.stdout) > (50_000 if is_small else 100_000)
    return hashlib.sha256(done.stdout).hexdigest()


@pytest.mark.long
@pytest.mark.parametrize(
    ("seeds", "is_small"),
    [
        (range(1, 3), True),
        pytest.param(range(1, 24), False, marks=[pytest.mark.slow, pytest.mark.timeout(3000)]),
    ],
    ids=["few", "many"],
)
def test_the_same_bytes_under_every_hash_seed(seeds, is_small):
    assert len({digest(seed, is_small) for seed in seeds}) == 1
