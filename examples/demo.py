"""The whole way in a few minutes: plan, train on two pipeline ranks, save, sample, and prove that no bit changed.

make demo
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
from gpt2 import SEQUENCE_LENGTH, build, make_model
from rich.console import Console
from text import load_text, unigram_entropy

HERE = Path(__file__).parent
OUTPUT = HERE.parent / "demo-output"
SMPC = str(Path(sys.executable).parent / "smpc")
console = Console()


def run(*arguments: str) -> None:
    """Runs one command and stops the demo if it fails."""
    console.print(f"\n$ smpc {' '.join(arguments)}", style="bold", highlight=False, markup=False)
    status = subprocess.run([SMPC, *arguments], check=False).returncode
    if status:
        sys.exit(status)


def sample(checkpoint: Path, prompt: bytes, num_bytes: int) -> bytes:
    """Text drawn from the trained model, byte by byte."""
    model = make_model()
    model.load_state_dict(torch.load(checkpoint, weights_only=True)["model"])
    model.eval()
    generator = torch.Generator().manual_seed(0)
    ids = torch.tensor([list(prompt)])
    with torch.no_grad():
        for _ in range(num_bytes):
            logits = model(input_ids=ids[:, -SEQUENCE_LENGTH:]).logits[0, -1]
            drawn = torch.multinomial(torch.softmax(logits / 0.7, dim=-1), 1, generator=generator)
            ids = torch.cat([ids, drawn[None]], dim=1)
    return bytes(ids[0, len(prompt) :].tolist())


def main() -> None:
    OUTPUT.mkdir(exist_ok=True)
    checkpoint = OUTPUT / "gpt2.pt"
    text = load_text()
    entropy = unigram_entropy(text)
    num_parameters = sum(p.numel() for p in build()[0].parameters())
    console.print(
        f"GPT-2 with {num_parameters:,} parameters; {len(text):,} bytes of Python's standard library, "
        f"unigram entropy {entropy:.3f} nats per byte",
        highlight=False,
    )
    run("compile", f"{HERE / 'gpt2.py'}:build", "-p", "2", "-m", "4")
    run("run", "-n", "2", str(HERE / "train_gpt2.py"), "--steps", "120", "--checkpoint", str(checkpoint))
    console.print(f"(unigram entropy was {entropy:.3f})", highlight=False)
    prompt = b"def "
    drawn = sample(checkpoint, prompt, 200)
    console.print("\n200 bytes from the trained model:", style="bold")
    console.print((prompt + drawn).decode("utf-8", errors="replace"), markup=False, highlight=False)
    run("run", "-n", "2", str(HERE / "parity.py"))


if __name__ == "__main__":
    main()
