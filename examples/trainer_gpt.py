"""Trains a small GPT on Python's standard library with smpc.composer's Trainer, sharded over the ranks.

smpc run -n 2 examples/trainer_gpt.py --steps 40
smpc run -n 2 examples/trainer_gpt.py --steps 80 --save /tmp/gpt --resume      goes on from the newest checkpoint, on any number of ranks
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from text import load_text, unigram_entropy
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from smpc import dist
from smpc.composer import ComposerModel, State, Trainer

WIDTH, HEADS, LAYERS, LENGTH = 64, 4, 2, 64


class Block(nn.Module):
    """Attention to what came before, and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """[samples, length, width] to the same."""
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(self.first(x)).chunk(3, dim=-1))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.down(functional.gelu(self.up(self.second(x))))


class GPT(nn.Module):
    """Bytes to the logits of the bytes that follow."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)

    def forward(self, ids: Tensor) -> Tensor:
        """[samples, length] to [samples, length, 256]."""
        x = self.token(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def fsdp_wrap_fn(self, module: nn.Module) -> bool:
        return isinstance(module, Block)


class Language(ComposerModel):
    """What the Trainer trains."""

    def __init__(self) -> None:
        super().__init__()
        self.model = GPT()

    def forward(self, batch: Tensor) -> Tensor:
        return self.model(batch[:, :-1])

    def loss(self, outputs: Any, batch: Tensor) -> Tensor:
        return functional.cross_entropy(outputs.flatten(0, 1), batch[:, 1:].flatten())


class Excerpts(Dataset[Tensor]):
    """Excerpts of LENGTH + 1 bytes that follow one another."""

    def __init__(self, text: Tensor) -> None:
        self._text = text

    def __len__(self) -> int:
        return (len(self._text) - 1) // LENGTH

    def __getitem__(self, index: int) -> Tensor:
        return self._text[index * LENGTH : (index + 1) * LENGTH + 1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=16, help="samples on each rank")
    parser.add_argument("--save", help="a folder for sharded checkpoints")
    parser.add_argument("--resume", action="store_true", help="go on from the newest one there")
    args = parser.parse_args()

    def show(state: State) -> None:
        if dist.get_global_rank() == 0 and state.timestamp.batch % 10 == 0:
            print(f"batch {state.timestamp.batch}: loss {state.loss:.4f} nats per byte", flush=True)

    torch.manual_seed(0)
    model, text = Language(), load_text(1_000_000)
    excerpts = Excerpts(text)
    loader = DataLoader(excerpts, args.batch_size, sampler=dist.get_sampler(excerpts, shuffle=True), drop_last=True)
    trainer = Trainer(
        model=model,
        optimizers=torch.optim.AdamW(model.parameters(), lr=3e-3),
        train_dataloader=loader,
        max_duration=f"{args.steps}ba",
        precision="fp32",
        fsdp_config={"state_dict_type": "sharded"},
        callbacks=show,
        run_name="gpt",
        save_folder=args.save,
        save_interval="20ba",
        autoresume=args.resume,
        seed=1,
    )
    trainer.fit()
    if dist.get_global_rank() == 0:
        print(f"final loss {trainer.state.loss:.4f} nats per byte; without context {unigram_entropy(text):.4f}")


if __name__ == "__main__":
    main()
