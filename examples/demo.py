"""The whole way in a few minutes: plan, train on two pipeline ranks, save, sample, and prove that no bit changed.

make demo
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
import webbrowser
from pathlib import Path

import torch
from gpt2 import SEQUENCE_LENGTH, VOCABULARY_SIZE, build, make_model
from rich.console import Console
from text import Words, load_words, unigram_entropy

HERE = Path(__file__).parent
OUTPUT = HERE.parent / "demo-output"
SMPC = str(Path(sys.executable).parent / "smpc")
console = Console()


def run(*arguments: str) -> None:
    """Runs one command and stops the demo if it fails."""
    console.print(f"\n$ smpc {' '.join(arguments)}", style="bold", highlight=False, markup=False)
    sys.stdout.flush()
    status = subprocess.run([SMPC, *arguments], check=False).returncode
    if status:
        sys.exit(status)


def sample(checkpoint: Path, words: Words, prompt: str, num_words: int) -> str:
    """Text drawn from the trained model, word by word."""
    model = make_model()
    model.load_state_dict(torch.load(checkpoint, weights_only=True)["model"])
    model.eval()
    generator = torch.Generator().manual_seed(0)
    ids = words.encode(prompt)
    with torch.no_grad():
        for _ in range(num_words):
            logits = model(input_ids=torch.tensor([ids[-SEQUENCE_LENGTH:]])).logits[0, -1]
            ids.append(int(torch.multinomial(torch.softmax(logits / 0.6, dim=-1), 1, generator=generator)))
    text = words.decode(ids)
    return text[: text.rfind(".") + 1]


def main() -> None:
    started = time.perf_counter()
    OUTPUT.mkdir(exist_ok=True)
    checkpoint, plan = OUTPUT / "gpt2.pt", OUTPUT / "plan"
    words = load_words(VOCABULARY_SIZE)
    entropy = unigram_entropy(words.ids)
    num_parameters = sum(p.numel() for p in build()[0].parameters())
    console.print(
        f"GPT-2 with {num_parameters:,} parameters; {len(words.ids):,} words from the documentation of Python's standard library, "
        f"unigram entropy {entropy:.3f} nats per word",
        highlight=False,
    )
    run("compile", f"{HERE / 'gpt2.py'}:build", "-p", "2", "-m", "4", "--out", str(plan))
    train = (str(HERE / "train_gpt2.py"), "--measure", "--checkpoint", str(checkpoint))
    run("run", "-n", "2", "--report", *train)
    console.print(f"(unigram entropy was {entropy:.3f})", highlight=False)
    console.print("\nSentences from the trained model:", style="bold")
    for prompt in ("Return the", "If the", "This method"):
        text = sample(checkpoint, words, prompt, 60)
        print(textwrap.fill(text, 78, initial_indent="  ", subsequent_indent="  "), flush=True)
    run("run", "-n", "2", str(HERE / "parity.py"))
    page = plan / "report.html"
    console.print(
        f"\n{time.perf_counter() - started:.0f} s. The plan to explore: {page.resolve().as_uri()}", highlight=False
    )
    if sys.stdout.isatty():
        webbrowser.open(page.resolve().as_uri())


if __name__ == "__main__":
    main()
