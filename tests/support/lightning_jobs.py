"""Small LightningModules and their training: plain, or as a pipeline on the ranks of a test."""

import lightning
import torch
from hugging_face_jobs import Data, build
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from smpc.integrations.lightning import PipelineStrategy

# What a batch's losses are means over: causal language models predict all labels but the first.
COUNTS = dict.fromkeys(("gpt2", "llama"), lambda batch: (batch["labels"][:, 1:] != -100).sum())


class Module(lightning.LightningModule):
    """A model of Hugging Face; validation has numbers, and predictions have rows."""

    def __init__(self, name, dropout=0.0):
        super().__init__()
        self.model = build(name, dropout)
        self.logged = []

    def training_step(self, batch, batch_idx):
        loss = self.model(**batch).loss
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("batch", float(batch_idx), prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        found = self.model(**batch)
        self.log_dict({"val_loss": found.loss})
        self.log("val_size", found.logits.abs().mean(), batch_size=len(found.logits))  # rows, not labels
        return found.loss

    def predict_step(self, batch, batch_idx):
        return self.model(**batch).logits

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


class Seen(lightning.Callback):
    """The numbers that callbacks see."""

    def __init__(self):
        self.lines, self.norms = [], []

    def on_before_optimizer_step(self, trainer, module, optimizer):
        grads = [p.grad for p in module.parameters() if p.numel() and p.grad is not None]
        self.norms.append(len(grads) > 0)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.lines.append({name: float(value) for name, value in sorted(trainer.callback_metrics.items())})
        self.lines[-1]["output"] = float(outputs["loss"])


def train(name, folder, pipeline=None, dropout=0.0, resume=None, **options):
    """What callbacks saw by batch, the weights, and predictions."""
    torch.manual_seed(0)
    seen = Seen()
    strategy = "auto" if pipeline is None else PipelineStrategy(pipeline, count=COUNTS.get(name))
    trainer = lightning.Trainer(
        **{
            "strategy": strategy, "accelerator": "cpu", "devices": 1, "max_epochs": 3, "accumulate_grad_batches": 2,
            "gradient_clip_val": 0.5, "logger": False, "enable_progress_bar": False, "enable_model_summary": False,
            "default_root_dir": str(folder), "num_sanity_val_steps": 0, **options,
            "callbacks": [seen, ModelCheckpoint(str(folder), save_top_k=-1, filename="{epoch}")],
        }
    )  # fmt: skip
    module = Module(name, dropout)
    loaders = DataLoader(Data(name), batch_size=8, shuffle=True), DataLoader(Data(name), batch_size=8)
    trainer.fit(module, *loaders, ckpt_path=resume)
    predicted = torch.cat(trainer.predict(module, loaders[1]))
    state = trainer.strategy.lightning_module_state_dict()
    weights = {key: value.clone() for key, value in state.items()}
    return {"lines": seen.lines, "weights": weights, "predicted": predicted, "epoch": trainer.current_epoch}
