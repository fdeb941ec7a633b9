"""The documentation's examples as scripts, with `from composer import Trainer`, under `smpc run --alias`, and with that import
changed; and this repository's example.

What the documentation leaves out (`...`) is filled in; there is no GPU, so `device` is cpu.
"""

import os

import pytest
import warm
from locations import REPOSITORY

LIMIT = 280
MODEL = """
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset
from composer import Trainer
from composer.models import ComposerModel
from composer.utils import dist

class Block (nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, inputs):
        return inputs + torch.tanh(self.linear(inputs))

class BlockRequiringCustomArgs(Block):
    pass

class Model(nn.Module):
    def __init__(self, n_layers):
        super().__init__()
        self.blocks = nn.ModuleList([
            Block() for _ in range(n_layers)
        ])
        self.custom_arg_blocks = nn.ModuleList([
            BlockRequiringCustomArgs() for _ in range(n_layers)
        ])
        self.head = nn.Linear(8, 4)

    def forward(self, inputs):
        for block in (*self.blocks, *self.custom_arg_blocks):
            inputs = block(inputs)
        return self.head(inputs)

    # FSDP Wrap Function
    def fsdp_wrap_fn(self, module):
        if isinstance(module, BlockRequiringCustomArgs):
            return CUSTOM
        return isinstance(module, Block)

    # Activation Checkpointing Function
    def activation_checkpointing_fn(self, module):
        return isinstance(module, Block)


class MyComposerModel(ComposerModel):

    def __init__(self, n_layers):
        super().__init__()
        self.model = Model(n_layers)

    def forward(self, batch):
        return self.model(batch[0])

    def eval_forward(self, batch, outputs=None):
        return outputs if outputs is not None else self.forward(batch)

    def loss(self, outputs, batch):
        return nn.functional.cross_entropy(outputs, batch[1])

torch.manual_seed(0)
dataset = TensorDataset(torch.randn(32, 8), torch.randint(0, 4, (32,)))
sampler = dist.get_sampler(dataset, shuffle=True)
train_dataloader = DataLoader(dataset, batch_size=4, sampler=sampler)
eval_dataloader = DataLoader(dataset, batch_size=4, sampler=dist.get_sampler(dataset))
CUSTOM = True
composer_model = MyComposerModel(n_layers=3)
"""
FIRST = """
fsdp_config = {
    'sharding_strategy': 'FULL_SHARD',
    'cpu_offload': False, # Not supported yet
    'mixed_precision': 'DEFAULT',
    'backward_prefetch': 'BACKWARD_POST',
    'activation_checkpointing': False,
    'activation_cpu_offload': False,
    'verbose': True
}
trainer = Trainer(
    model=composer_model,
    fsdp_config=fsdp_config,
    train_dataloader=train_dataloader, eval_dataloader=eval_dataloader, max_duration='1ep', device='cpu',
)
trainer.fit()
"""
CUSTOM = """
CUSTOM = {
    'process_group': 'node',
    'mixed_precision': 'FULL',
}
trainer = Trainer(
    model=composer_model, fsdp_config={'activation_checkpointing': True},
    train_dataloader=train_dataloader, max_duration='2ba', device='cpu',
)
trainer.fit()
"""
SHARDED = """
fsdp_config = {
    'sharding_strategy': 'FULL_SHARD',
    'state_dict_type': 'sharded',
    'sharded_ckpt_prefix_dir': 'ba{batch}-shards' # will save each set of shards checkpoint to a unique folder based on batch
}
trainer = Trainer(
    model=composer_model,
    max_duration='4ba',
    fsdp_config=fsdp_config,
    save_folder='checkpoints',
    save_interval='2ba',
    train_dataloader=train_dataloader, device='cpu',
)
trainer.fit()
dist.barrier()
trainer = Trainer(
    model=MyComposerModel(n_layers=3),
    max_duration='4ba',
    fsdp_config={
        'sharding_strategy': 'FULL_SHARD',
        'state_dict_type': 'sharded',
    },
    load_path='./checkpoints/ba2-shards', # load_path must be the path to the prefix directory and not to a specific file.
    train_dataloader=train_dataloader, device='cpu',
)
trainer.fit()
"""
ZERO = """
trainer = Trainer(
    model=composer_model,
    train_dataloader=train_dataloader,
    eval_dataloader=eval_dataloader,
    max_duration='160ep',
    device='cpu',
    deepspeed_config={
        "train_batch_size": 8,
        "bf16": {"enabled": True},
    })
trainer.fit(duration='3ba')
"""
END = """
state = trainer.state
print(f"rank {dist.get_global_rank()} of {dist.get_world_size()}: {state.timestamp.batch} batches, loss {state.loss:.4f}", flush=True)
"""


def _run(folder, *arguments):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = warm.run("run", "--console", "all", *arguments, cwd=folder, timeout=LIMIT, env=environment)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.matrix(1)
@pytest.mark.parametrize("alias", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["alias", "imports"])
@pytest.mark.parametrize(
    ("body", "batches"), [(FIRST, 4), (CUSTOM, 2), (SHARDED, 4), (ZERO, 3)], ids=["first", "custom", "sharded", "zero"]
)
def test_the_documentations_examples(tmp_path, body, batches, alias):
    script = MODEL + body + END
    (tmp_path / "script.py").write_text(script if alias else script.replace("from composer", "from smpc.composer"))
    (tmp_path / "composer").mkdir()  # a folder of that name is no package that is installed
    done = _run(tmp_path, *(["--alias"] if alias else []), "-n", "2", "script.py")
    lines = sorted(line for line in done.stdout.splitlines() if " of 2: " in line)
    assert [line.split(", loss")[0] for line in lines] == [
        f"[rank {rank}] rank {rank} of 2: {batches} batches" for rank in range(2)
    ]
    assert len({line.split("loss")[1] for line in lines}) == 1
    if body is FIRST:
        assert "unit model.blocks.2: all ranks, computes in torch.float32" in done.stderr
    if body is SHARDED:
        assert sorted(os.listdir(tmp_path / "checkpoints" / "ba4-shards")) == [
            ".metadata",
            "__0_0.distcp",
            "__1_0.distcp",
        ]


@pytest.mark.slow
def test_the_gpt_learns_and_goes_on(tmp_path):
    script = str(REPOSITORY / "examples" / "trainer_gpt.py")
    first = _run(tmp_path, "-n", "2", script, "--steps", "40", "--save", "run")
    final, without = (
        float(word) for word in first.stdout.split("final loss ")[1].replace(";", "").split() if word[0].isdigit()
    )
    assert final < without
    again = _run(tmp_path, "-n", "1", script, "--steps", "60", "--save", "run", "--resume", "--batch-size", "32")
    assert "batch 50: loss" in again.stdout
    assert "batch 40: loss" not in again.stdout
