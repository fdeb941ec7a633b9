"""A small model for the Trainer, its data, and what one process makes of it without any of smpc."""

import torch
from torch import distributed, nn
from torch.utils.data import DataLoader, TensorDataset

from smpc import dist
from smpc.composer import ComposerModel, Trainer
from smpc.sharding.dtensors import whole

NUM_SAMPLES, WIDTH, CLASSES = 16, 8, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def fsdp_wrap_fn(self, module):
        return isinstance(module, Block)

    def activation_checkpointing_fn(self, module):
        return isinstance(module, Block)


class Classifier(ComposerModel):
    def __init__(self):
        super().__init__()
        self.model = Net()

    def forward(self, batch):
        return self.model(batch[0])

    def loss(self, outputs, batch):
        return nn.functional.cross_entropy(outputs, batch[1])


class FullMemory:
    """Fails where more than `most` samples run, on one rank, in forward or in backward."""

    def __init__(self, where, most, rank):
        self.where, self.most, self.rank, self.failures = where, most, rank, 0

    def __call__(self, module, inputs, output):
        if len(output) <= self.most or distributed.get_rank() != self.rank:
            return
        if self.where == "forward":
            self._fail()
        output.register_hook(lambda gradient: self._fail())
        return

    def _fail(self):
        self.failures += 1
        if self.failures % 2:
            raise torch.OutOfMemoryError("CUDA out of memory (pretended)")
        raise RuntimeError("CUDA error: out of memory (pretended)")


def dataset(count=NUM_SAMPLES):
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(count, WIDTH, generator=generator)
    return TensorDataset(inputs, torch.randint(0, CLASSES, (count,), generator=generator))


def classifier():
    torch.manual_seed(0)
    return Classifier()


def trainer(batch_size, count=NUM_SAMPLES, model=None, **options):
    """A Trainer that reads the samples in order, `batch_size` of them on every rank."""
    model = model or classifier()
    data = dataset(count)
    loader = DataLoader(data, batch_size=batch_size, sampler=dist.get_sampler(data))
    options = {"max_duration": "4ba", "device": "cpu", "train_dataloader": loader, **options}
    return Trainer(model=model, optimizers=torch.optim.AdamW(model.parameters(), lr=0.01), **options)


def everything(made):
    """All parameters and the optimizer's moments, whole. Collective."""
    parameters = list(made.state.model.parameters())
    moments = _moments(made.state.optimizer, parameters)
    return torch.cat([whole(tensor).detach().reshape(-1).float() for tensor in (*parameters, *moments)])


def _moments(optimizer, parameters):
    return [value for parameter in parameters for _, value in sorted(optimizer.state[parameter].items())]


def eager(world, batch_size, num_batches=4, sizes=None, count=NUM_SAMPLES, model=None):
    """One process that sums over ranks and microbatches of these sizes, with the mean over all samples of a batch."""
    model, data = model or classifier(), dataset(count)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    per_rank = [list(range(rank, count, world)) for rank in range(world)]
    for index in range(num_batches):
        start = index % -(-len(per_rank[0]) // batch_size) * batch_size
        chosen = [own[start : start + batch_size] for own in per_rank]
        total = sum(map(len, chosen))
        optimizer.zero_grad()
        for own in chosen:
            for low in range(0, len(own), sizes or batch_size):
                part = own[low : low + (sizes or batch_size)]
                batch = (data.tensors[0][part], data.tensors[1][part])
                (model.loss(model(batch), batch) * (len(part) / total)).backward()
        optimizer.step()
    parameters = list(model.parameters())
    moments = _moments(optimizer, parameters)
    return torch.cat([tensor.detach().reshape(-1).float() for tensor in (*parameters, *moments)])
