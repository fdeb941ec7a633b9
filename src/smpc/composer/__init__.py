"""A small Trainer over the parts of smpc, for scripts that are written for one: the loop, and the six things that need its owner.

    trainer = Trainer(model=model, optimizers=AdamW(model.parameters()), train_dataloader=loader, max_duration="2ep", fsdp_config={})
    trainer.fit()

    trainer          arguments, `fit`, `eval`, `save_checkpoint`
    model            ComposerModel: forward, loss, eval_forward
    duration         `4ba`, `160ep`: how long, how often; the Timestamp
    microbatches     cuts batches; a mean over samples, however they are cut
    batch_step       one batch on all ranks: microbatches, automatic sizes, averages
    checkpoint       files of a run: whole or sharded, resumed on any number of ranks

All it does is public in the parts: `smpc.dist`, `smpc.fsdp`. `smpc.composer.utils.dist` is `smpc.dist`.
"""

from smpc.composer.checkpoint import State
from smpc.composer.duration import Timestamp
from smpc.composer.model import ComposerModel
from smpc.composer.trainer import Trainer

__all__ = ["ComposerModel", "State", "Timestamp", "Trainer"]
