"""Jobs of one and several ranks that train in half precision, and what plain PyTorch computes in their place."""

import torch
from torch import nn

import smpc.v1 as smp

MB, SAMPLES, WIDTH, CLASSES = 2, 16, 16, 16
LR = 0.01


class Model(nn.Module):
    """Linear layers and a buffer; the output is multiplied by `gain`.

    If asked for, the middle layers are distributed, and the first and the last one, which are on different stages, share their weight.
    """

    def __init__(self, distributed=False):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        with smp.tensor_parallelism(distributed):
            self.up = nn.Linear(WIDTH, 4 * WIDTH)
            self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.last = nn.Linear(WIDTH, CLASSES)
        if distributed:
            self.last.weight = self.first.weight
        self.register_buffer("damp", torch.tensor([0.5]))

    def forward(self, x, gain):
        hidden = torch.relu(self.first(x))
        hidden = hidden + self.damp * self.down(torch.tanh(self.up(hidden)))
        return self.last(self.norm(hidden)) * gain


def make_model(distributed=False):
    torch.manual_seed(7)
    return Model(distributed)


def batch(step, replica=0):
    generator = torch.Generator().manual_seed(1000 * replica + step)
    x = torch.randn(SAMPLES, WIDTH, generator=generator)
    return x, torch.randint(0, CLASSES, (SAMPLES,), generator=generator)


def gain_at(step, huge=()):
    """The factor of the outputs: in the steps `huge` one that makes fp16 overflow forwards, so at any loss scale."""
    return torch.full((SAMPLES, 1), 1e6 if step in huge else 1.0)


@smp.step
def train_step(model, x, gain, targets):
    output = model(x, gain)
    assert output.dtype is torch.float32
    loss = nn.functional.cross_entropy(output, targets)
    model.backward(loss)
    return loss


def optimizer_of(parameters, name="AdamW"):
    return getattr(torch.optim, name)(parameters, lr=LR, **({"eps": 1e-5} if "Adam" in name else {}))


class Job:
    """One rank of a job, after smp.init."""

    def __init__(
        self,
        topology=(1, 1, 1),
        config=None,
        optimizer=optimizer_of,
        distributed=False,
        module=None,
        model_options=None,
        **options,
    ):
        pp, tp, rdp = topology
        degrees = {"pipeline_parallel_degree": pp, "tensor_parallel_degree": tp, "ddp": tp * rdp > 1}
        smp.init({**degrees, "microbatches": MB, "checkpoint_timeout": 60.0, **(config or {})})
        module = make_model(distributed) if module is None else module()
        self.model = smp.DistributedModel(module, **(model_options or {}))
        self.optimizer = smp.DistributedOptimizer(optimizer(self.model.parameters()), **options)

    def forward_backward(self, step, huge=()):
        self.optimizer.zero_grad()
        x, targets = batch(step, smp.dp_rank())
        return train_step(self.model, x, gain_at(step, huge), targets).reduce_mean()

    def step(self, step, huge=(), max_norm=None):
        loss = self.forward_backward(step, huge)
        norm = None if max_norm is None else self.optimizer.clip_master_grads(max_norm)
        self.optimizer.step()
        return loss, norm


def whole(job):
    """The model and optimizer state of the whole model, copied; call it on all ranks."""
    optimizer = job.optimizer.state_dict()
    tensors = {
        f"{name}::{key}": torch.as_tensor(value).clone()
        for name, items in optimizer["state"].items()
        for key, value in items.items()
    }
    return {key: value.clone() for key, value in job.model.state_dict().items()}, tensors


def differences(found, expected):
    """Keys at which two states, or parts of them, differ in a bit."""
    wrong = sorted(found.keys() ^ expected.keys())
    return wrong + [key for key in found.keys() & expected.keys() if not torch.equal(found[key], expected[key])]
