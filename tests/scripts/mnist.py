"""A convolutional network on images, in the shape of SMP's first examples: a pipeline of two with `ddp`, and a plain optimizer."""

import argparse
import os

import data
import smdistributed.modelparallel.torch as smp
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import StepLR


class Features(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3, 1)
        self.second = nn.Conv2d(4, 8, 3, 1)

    def forward(self, x):
        x = F.relu(self.second(F.relu(self.first(x))))
        return torch.flatten(F.max_pool2d(x, 2), 1)


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(8 * 4 * 4, 16)
        self.out = nn.Linear(16, 10)

    def forward(self, x):
        return F.log_softmax(self.out(F.relu(self.hidden(x))), 1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = Features()
        self.head = Head()

    def forward(self, x):
        return self.head(self.features(x))


@smp.step
def train_step(model, images, labels):
    output = model(images)
    loss = F.nll_loss(output, labels, reduction="mean")
    model.backward(loss)
    return output, loss


@smp.step
def test_step(model, images, labels):
    output = model(images)
    correct = (output.argmax(1) == labels).sum()
    return F.nll_loss(output, labels, reduction="sum"), correct


def train(args, model, device, optimizer):
    model.train()
    for images, labels in data.images(args.steps, args.batch_size, smp.dp_rank(), smp.dp_size()):
        images, labels = images.to(device), labels.to(device)
        optimizer.zero_grad()
        _, loss_mb = train_step(model, images, labels)
        loss = loss_mb.reduce_mean()
        optimizer.step()
        if smp.dp_size() > 1:
            losses = smp.allgather(loss.item(), smp.DP_GROUP)
            loss = torch.tensor(sum(losses) / len(losses))
        data.report("loss", loss.item())


def test(args, model, device):
    model.eval()
    total, right = 0.0, 0
    with torch.no_grad():
        for images, labels in data.images(2, args.batch_size, 0, 1, seed=99):
            loss_mb, correct_mb = test_step(model, images.to(device), labels.to(device))
            total += loss_mb.reduce_sum().item()
            right += correct_mb.reduce_sum().item()
    data.report("test loss", total / (2 * args.batch_size))
    data.report("correct", right)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--lr", type=float, default=0.5)
    parser.add_argument("--num_microbatches", type=int, default=4)
    parser.add_argument("--save", type=str, default="")
    parser.add_argument("--load", type=str, default="")
    args = parser.parse_args()

    smp.init()
    torch.manual_seed(5)
    device = torch.device("cuda", smp.local_rank()) if torch.cuda.is_available() else torch.device("cpu")
    model = smp.DistributedModel(Net(), trace_device="gpu")
    scaler = smp.amp.GradScaler(enabled=False)
    assert not scaler.is_enabled()
    optimizer = smp.DistributedOptimizer(torch.optim.Adadelta(model.parameters(), lr=args.lr))
    scheduler = StepLR(optimizer.optimizer, step_size=1, gamma=0.7)
    wrapped = model.module.module if smp.state.cfg.ddp else model.module
    assert isinstance(wrapped, Net)
    if args.load:
        checkpoint = smp.load(os.path.join(args.load, "net.pt"), partial=True)
        model.load_state_dict(checkpoint["model_state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer_state_dict"])
    train(args, model, device, optimizer)
    scheduler.step()
    if args.save and smp.dp_rank() == 0:
        state = {"model_state_dict": model.local_state_dict(), "optimizer_state_dict": optimizer.local_state_dict()}
        smp.save(state, os.path.join(args.save, "net.pt"), partial=True)
    if args.save:
        smp.barrier()
    test(args, model, device)


if __name__ == "__main__":
    main()
