"""The gallery: ten models of Hugging Face at published sizes, planned while the site is built, with their reports.

Models are made on the device "meta", which allocates nothing. Sizes are those of the published configurations.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

import smpc
from smpc.report.format import format_bytes, format_time

RANKS, MICROBATCHES = 4, 8
FILES = ("report.html", "schedule.txt", "plan.json")
HEAD = f"""# Gallery

Ten models of Hugging Face, each planned for {RANKS} H100 with {MICROBATCHES} microbatches while this site was built:
no weight was allocated, and no GPU was there. Times are predicted from datasheets; ratios matter, not
seconds. A report has the timeline and memory of every rank, and the module tree coloured by stage.

| model | parameters | batch | largest peak of a rank | step | bubble | no plan is better by more than | |
| --- | --- | --- | --- | --- | --- | --- | --- |
"""
TAIL = """
The code of the first:

```python
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import smpc

with torch.device("meta"):
    model = GPT2LMHeadModel(GPT2Config(n_embd=1600, n_layer=48, n_head=25))
ids = torch.zeros(8, 1024, dtype=torch.int64)
plan = smpc.partition(model, {"input_ids": ids, "labels": ids}, pipeline_parallel_degree=4, microbatches=8)
plan.save("gpt2-xl")
```
"""


@dataclass(frozen=True)
class Entry:
    """A model: its class and configuration in transformers, arguments of the latter, and names and shapes of the inputs."""

    title: str
    model: str
    config: str
    sizes: Mapping[str, Any]
    inputs: Mapping[str, tuple[int, ...]]

    @property
    def name(self) -> str:
        """The title as a folder."""
        return self.title.lower().replace(" ", "-")

    def build(self) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
        """The model without memory, and a batch of zeros."""
        with torch.device("meta"):
            module = getattr(transformers, self.model)(getattr(transformers, self.config)(**self.sizes))
        return module, {
            name: torch.zeros(shape, dtype=torch.float32 if len(shape) > 2 else torch.int64)
            for name, shape in self.inputs.items()
        }


def _text(length: int = 1024, batch: int = 8) -> dict[str, tuple[int, ...]]:
    return {"input_ids": (batch, length), "labels": (batch, length)}


def _decoder(hidden: int, inner: int, layers: int, heads: int, groups: int, vocabulary: int) -> dict[str, int]:
    return {
        "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": groups, "vocab_size": vocabulary,
    }  # fmt: skip


ENTRIES = (
    Entry("GPT-2 XL", "GPT2LMHeadModel", "GPT2Config", {"n_embd": 1600, "n_layer": 48, "n_head": 25}, _text()),
    Entry("Llama 3.1 8B", "LlamaForCausalLM", "LlamaConfig", _decoder(4096, 14336, 32, 32, 8, 128256), _text()),
    Entry("Mistral 7B", "MistralForCausalLM", "MistralConfig", _decoder(4096, 14336, 32, 32, 8, 32000), _text()),
    Entry("Qwen3 8B", "Qwen3ForCausalLM", "Qwen3Config", _decoder(4096, 12288, 36, 32, 8, 151936), _text()),
    Entry("Gemma 2 9B", "Gemma2ForCausalLM", "Gemma2Config",
          {**_decoder(3584, 14336, 42, 16, 8, 256000), "head_dim": 256}, _text()),
    Entry("OLMoE 1B-7B", "OlmoeForCausalLM", "OlmoeConfig", _decoder(2048, 1024, 16, 16, 16, 50304), _text()),
    Entry("BERT large", "BertForMaskedLM", "BertConfig",
          {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}, _text(512, 32)),
    Entry("T5 3B", "T5ForConditionalGeneration", "T5Config",
          {"d_model": 1024, "d_kv": 128, "d_ff": 16384, "num_layers": 24, "num_heads": 32, "decoder_start_token_id": 0}, _text(512)),
    Entry("ViT huge", "ViTForImageClassification", "ViTConfig",
          {"hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 16, "patch_size": 14,
           "num_labels": 1000},
          {"pixel_values": (64, 3, 224, 224), "labels": (64,)}),
    Entry("Whisper large", "WhisperForConditionalGeneration", "WhisperConfig",
          {"d_model": 1280, "encoder_layers": 32, "decoder_layers": 32, "encoder_attention_heads": 20, "decoder_attention_heads": 20,
           "encoder_ffn_dim": 5120, "decoder_ffn_dim": 5120},
          {"input_features": (8, 80, 3000), "labels": (8, 128)}),
)  # fmt: skip


def pages(entries: Sequence[Entry] = ENTRIES) -> dict[str, str]:
    """The page in Markdown, and the files of every plan, by their paths in the site."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    files, rows = {}, []
    for entry in entries:
        module, batch = entry.build()
        plan = smpc.partition(module, batch, pipeline_parallel_degree=RANKS, microbatches=MICROBATCHES)
        with tempfile.TemporaryDirectory() as folder:
            plan.save(folder)
            files |= {f"gallery/{entry.name}/{name}": (Path(folder) / name).read_text() for name in FILES}
        rows.append(_row(entry, module, plan))
    return {"gallery.md": HEAD + "\n".join(rows) + "\n" + TAIL, **files}


def _row(entry: Entry, module: torch.nn.Module, plan: smpc.Plan) -> str:
    links = ", ".join(f"[{name.partition('.')[0]}](gallery/{entry.name}/{name})" for name in FILES)
    shape = " x ".join(map(str, next(iter(entry.inputs.values()))))
    cells = (
        entry.title,
        f"{sum(p.numel() for p in module.parameters()) / 1e9:.2f} billion",
        shape,
        format_bytes(max(stage.peak_memory_bytes for stage in plan.stages)),
        format_time(plan.schedule.step_time),
        f"{plan.schedule.bubble_fraction:.1%}",
        f"{plan.objective.gap:.2%}",
        links,
    )
    return "| " + " | ".join(cells) + " |"
