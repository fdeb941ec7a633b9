"""Every Python block of README and docs runs, in the order of its page, on the ranks that it needs."""

import os
import re

import pytest
import torch.distributed as dist
import warm
from documented import PAGES, all_blocks
from documented_worlds import WORLDS, fresh
from executor_harness import run_workers
from hugging_face_jobs import as_rank

import smpc.v1 as smp

LIMIT = 280.0  # seconds for a job
# Complete scripts, which a launcher runs: the pages' own blocks, and what else those need.
SCRIPTS = {
    "docs/getting_started.md": "",
    "docs/from_other_libraries.md": """
import torch
import torch.distributed as dist
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, ids):
        hidden = self.embedding(ids)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return hidden.square().mean()


def make_model():
    torch.manual_seed(0)
    return Net()


ids = torch.arange(128).reshape(16, 8) % 50
""",
}
ELSEWHERE = {
    "docs/hugging_face.md": "test_integrations_huggingface.py",
    "docs/lightning.md": "test_integrations_lightning.py",
}


def python(page):
    return [block for block in all_blocks(page) if block.language == "python"]


def follow(rank, folder, pages, world_size):
    """Run pages one after the other; how many blocks of each were run."""
    as_rank(rank, world_size)
    ran = {}
    for page in pages:
        own = folder / page.replace("/", "_")
        if rank == 0:
            own.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        os.chdir(own)
        names, found = fresh(), python(page)
        world = WORLDS[page][1](names)
        print(f"-- {page}", flush=True)
        for block in found:
            next(world)
            block.run(names)
        assert next(world, "over") == "over", f"{page}: its world expects more blocks"
        ran[page] = len(found)
        if smp.is_initialized():
            smp.shutdown()
    return ran


def check(ranks, tmp_path):
    pages = [page for page, (needed, _) in WORLDS.items() if needed == ranks]
    for ran in run_workers(follow, ranks, tmp_path, pages, ranks):
        assert ran == {page: len(python(page)) for page in pages}


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_blocks_run(ranks, tmp_path):
    check(ranks, tmp_path)
    assert ranks in {needed for needed, _ in WORLDS.values()}


def test_every_page_with_python_is_run_somewhere():
    assert {page for page in PAGES if python(page)} == {*WORLDS, *SCRIPTS, *ELSEWHERE}


def launch(page, folder, numbers):
    """The loss of each rank after each block of these that has one, by the block's number. One job runs them."""
    told = "\nif 'loss' in globals():\n    print('after', {}, float(loss), flush=True)\n"
    script = folder / "page.py"
    blocks = python(page)
    script.write_text(SCRIPTS[page] + "".join(blocks[number].text + told.format(number) for number in numbers))
    found = warm.run("run", "-n", "2", "--console", "all", str(script), cwd=folder, timeout=LIMIT)
    assert found.returncode == 0, found.stdout + found.stderr
    losses = {}
    for number, loss in re.findall(r"after (\d+) ([\d.e-]+)", found.stdout):
        losses.setdefault(int(number), []).append(float(loss))
    return losses


def test_getting_started_is_a_script(tmp_path):
    losses = launch("docs/getting_started.md", tmp_path, range(len(python("docs/getting_started.md"))))
    assert sorted(losses) == [2, 3]
    assert losses[2][0] == losses[2][1] < 2.4


@pytest.mark.slow
def test_other_libraries_have_the_losses_of_their_replacements(tmp_path):
    # Two jobs, each with one `init_process_group`: torch's second one in a process may read the first one's addresses.
    jobs = (range(1), range(1, 4))
    assert sum(map(len, jobs)) == len(python("docs/from_other_libraries.md"))
    found = [launch("docs/from_other_libraries.md", tmp_path, numbers) for numbers in jobs]
    ddp, pipeline, fsdp, sharded = [losses for job in found for losses in job.values()]
    assert pipeline == pytest.approx([sum(ddp) / 2] * 2, rel=1e-5), (
        "two ranks with a batch each, or one pipeline with both"
    )
    assert sorted(sharded) == pytest.approx(sorted(fsdp), rel=1e-5)
