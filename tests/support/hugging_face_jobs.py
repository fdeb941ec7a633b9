"""Small models and data for Hugging Face's Trainer, and its training of them: plain, or as a pipeline on the ranks of a test."""

import os

import torch
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
)

VOCABULARY = 97
WATCHED = ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_sum", "eval_number", "train_loss", "total_flos")
SMALL = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32}


class Plain(torch.nn.Module):
    """A script's own module, without a configuration."""

    def __init__(self):
        super().__init__()
        self.embedding, self.inner = torch.nn.Embedding(VOCABULARY, 16), torch.nn.Linear(16, 16)
        self.head = torch.nn.Linear(16, 5)

    def forward(self, input_ids, labels=None):
        logits = self.head(self.inner(self.embedding(input_ids)).relu().mean(1))
        loss = None if labels is None else torch.nn.functional.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits}


def build(name, dropout=0.0):
    torch.manual_seed(0)
    if name == "plain":
        return Plain()
    if name == "lora":
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], lora_dropout=dropout)
        return get_peft_model(build("llama"), config)
    if name in ("gpt2", "own loss"):
        drops = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
        sizes = {"vocab_size": VOCABULARY, "n_positions": 32, "n_embd": 16, "n_layer": 3, "n_head": 2}
        return GPT2LMHeadModel(GPT2Config(**sizes, **drops, bos_token_id=0, eos_token_id=0))
    if name == "llama":
        return LlamaForCausalLM(LlamaConfig(**SMALL, vocab_size=VOCABULARY, num_key_value_heads=1))
    drops = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    if name == "vit":
        return ViTForImageClassification(ViTConfig(**SMALL, **drops, image_size=8, patch_size=4, num_labels=5))
    if name == "masked":  # its loss is a mean over the tokens of a batch that are masked
        return BertForMaskedLM(BertConfig(**SMALL, **drops, vocab_size=VOCABULARY))
    # Its loss is a mean of squares, which does not know how many items all batches of an update have.
    return BertForSequenceClassification(
        BertConfig(**SMALL, **drops, vocab_size=VOCABULARY, num_labels=1, problem_type="regression")
    )


class Data(Dataset):
    """26 samples: the last batch of an epoch has 2, which four microbatches do not divide."""

    def __init__(self, name):
        self.name = name

    def __len__(self):
        return 26

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        if self.name == "vit":
            return {"pixel_values": torch.randn(3, 8, 8, generator=generator), "labels": index % 5}
        ids = torch.randint(1, VOCABULARY, (12,), generator=generator)
        if self.name == "plain":
            return {"input_ids": ids, "labels": index % 5}
        if self.name == "bert":
            return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": float(index % 3)}
        labels = ids.clone()
        labels[: index % 7] = -100  # microbatches have different numbers of items
        return {"input_ids": ids, "labels": labels}


def arguments(folder, **options):
    return TrainingArguments(
        **{
            "output_dir": str(folder), "per_device_train_batch_size": 8, "per_device_eval_batch_size": 8,
            "gradient_accumulation_steps": 2, "num_train_epochs": 3, "learning_rate": 1e-2, "warmup_steps": 2,
            "weight_decay": 0.1, "max_grad_norm": 0.5, "logging_steps": 1, "eval_strategy": "steps", "eval_steps": 3,
            "save_steps": 3, "report_to": [], "disable_tqdm": True, "seed": 3, "use_cpu": True,
            "dataloader_pin_memory": False, **options,
        }
    )  # fmt: skip


def with_own_loss(base):
    """A trainer that takes the model's own loss, as scripts do, without the number of items."""

    class OwnLoss(base):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            outputs = model(**inputs)
            return (outputs.loss, outputs) if return_outputs else outputs.loss

    return OwnLoss


def measure(prediction):
    return {"sum": float(abs(prediction.predictions).sum()), "number": len(prediction.predictions)}


class Seen(TrainerCallback):
    """What a script's own callback is told, on every rank."""

    def __init__(self):
        self.logged = 0

    def on_log(self, args, state, control, **kwargs):
        self.logged += state.is_world_process_zero


def train(name, folder, pipeline=None, dropout=0.0, resume=None, **options):
    """Losses and what else is logged, by step, and the weights after training."""
    seen = Seen()
    given = {
        "model": build(name, dropout), "args": arguments(folder, **options), "train_dataset": Data(name),
        "eval_dataset": Data(name), "compute_metrics": measure, "callbacks": [seen],
    }  # fmt: skip
    own = with_own_loss if name == "own loss" else lambda base: base
    if pipeline is None:
        trainer = own(Trainer)(**given)
    else:
        from smpc.integrations.huggingface import PipelineTrainer

        trainer = own(PipelineTrainer)(pipeline, **given)
    trainer.train(resume_from_checkpoint=resume)
    watched = {*WATCHED, "step"} - (
        {"total_flos"} if name == "plain" else set()
    )  # the Trainer counts none in plain modules
    logged = [{key: line[key] for key in line if key in watched} for line in trainer.state.log_history]
    weights = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    return {"logged": logged, "weights": weights, "seen": seen.logged}


def as_rank(rank, world_size):
    """What a launcher says to a rank."""
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0",
    }  # fmt: skip
    torch.distributed.barrier()
