"""Hugging Face's Trainer of transformers 4.30, which calls `smp.init()` while it is imported; the model, steps and files are its own."""

import argparse
import functools

import data
import smdistributed.modelparallel.torch as smp
import torch
import transformers
from models import MODELS


class Arguments(transformers.TrainingArguments):
    """The Trainer's own choice of a device is a GPU."""

    @functools.cached_property
    def _setup_devices(self):
        self.distributed_state, self._n_gpu = None, 1
        return torch.device("cpu")


class Reports(transformers.TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        for name in ("loss", "eval_loss"):
            if name in logs:
                data.report(name, logs[name])


def samples(seed, number):
    [(ids, mask)] = data.tokens(1, number, 0, 1, seed=seed)
    return [{"input_ids": row, "attention_mask": seen, "labels": row} for row, seen in zip(ids, mask, strict=True)]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", type=str)
    parser.add_argument("--resume", type=int, default=0)
    parser.add_argument("--max_steps", type=int, default=4)
    parser.add_argument("--fp16", type=int, default=0)
    args, _ = parser.parse_known_args()
    torch.manual_seed(3)
    with smp.model_creation(tensor_parallelism=smp.tp_size() > 1):
        model = MODELS["gpt2"]()
    training = Arguments(
        args.output_dir,
        max_steps=args.max_steps,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        learning_rate=0.01,
        lr_scheduler_type="constant",
        optim="adamw_torch",
        data_seed=7,
        logging_steps=1,
        save_steps=2,
        fp16=args.fp16 > 0,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(
        model, training, train_dataset=samples(1, 32), eval_dataset=samples(2, 8), callbacks=[Reports()]
    )
    trainer.train(resume_from_checkpoint=True if args.resume else None)
    trainer.evaluate()


if __name__ == "__main__":
    main()
