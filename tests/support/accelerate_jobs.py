"""A training loop of accelerate's as its pages have it, with small models: plain, or as a pipeline on the ranks of a test."""

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DataLoaderConfiguration
from hugging_face_jobs import Data, build
from torch.utils.data import DataLoader

import smpc.v1 as smp
from smpc.integrations.accelerate import PipelineAccelerator


class Rows(Data):
    """24 samples, all of whose labels count: batches of 8, of which two are an update and the third, an epoch's last, is one alone."""

    def __len__(self):
        return 24

    def __getitem__(self, index):
        row = super().__getitem__(index)
        return row if self.name in ("vit", "bert") else {**row, "labels": row["input_ids"]}


class Counter:
    """What a script registers for its checkpoints."""

    def __init__(self):
        self.number = 0

    def state_dict(self):
        return {"number": self.number}

    def load_state_dict(self, state):
        self.number = state["number"]


def start(pipeline, **options):
    """The accelerator, and the function that trains on one batch."""
    AcceleratorState._reset_state(reset_partial_state=False)
    GradientState._reset_state()
    if pipeline is None:
        accelerator = Accelerator(cpu=True, **options)
    else:
        smp.init(pipeline)
        accelerator = PipelineAccelerator(**options)

    def train_step(model, batch):
        loss = model(**batch).loss
        accelerator.backward(loss)
        return loss

    return accelerator, train_step if pipeline is None else smp.step(train_step)


def train(name, folder, pipeline=None, dropout=0.0, resume=False, shuffle=True, **options):
    """What the script sees of every batch of two epochs, or of the second one: loss, norm, rate; and the weights."""
    accelerator, train_step = start(pipeline, gradient_accumulation_steps=2, **options)
    model = build(name, dropout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)
    torch.manual_seed(3)
    loader = DataLoader(Rows(name), batch_size=8, shuffle=shuffle)
    scheduler, loader, optimizer, model = accelerator.prepare(scheduler, loader, optimizer, model)
    counter, seen = Counter(), []
    accelerator.register_for_checkpointing(counter)
    if resume:
        accelerator.load_state(str(folder))
    while counter.number < 2:
        for batch in loader:
            with accelerator.accumulate(model):
                loss = train_step(model, batch).item()
                norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            mean = accelerator.reduce(torch.tensor(loss), "mean").item()
            seen.append([mean, norm.item(), scheduler.get_last_lr()[0], accelerator.sync_gradients])
        counter.number += 1
        if pipeline is not None and counter.number == 1:
            accelerator.save_state(str(folder))
    weights = {key: value.clone() for key, value in accelerator.get_state_dict(model).items()}
    return {"seen": seen, "weights": weights}


# accelerate draws the order of samples otherwise where there are several processes.
SPLIT = {"dataloader_config": DataLoaderConfiguration(split_batches=True), "shuffle": False}
