"""What the tests of training scripts share: a model, its data, its training in plain PyTorch, and step functions."""

import torch
import zoo
from torch import nn
from transformers.modeling_outputs import CausalLMOutput

import smpc.v1 as smp

MB = 4
STEPS = 3
# Where replicas hold parts of each block: gathered for a step, for each microbatch, or as each block runs.
FOR_THE_STEP = {"fully_shard": True}
FOR_A_MICROBATCH = {
    "sharded_data_parallel_degree": 2,
    "sdp_gradient_clipping": 0.0,
    "sdp_param_persistence_threshold": 0,
}
WHILE_RUNNING = FOR_A_MICROBATCH | {"sdp_max_live_parameters": 1}


class Block(nn.Module):
    """What replicas hold in parts."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


def make_model(name="gpt2"):
    model, (args, kwargs) = zoo.build(name)
    return model, args, kwargs


def batches(kwargs, replica=0):
    generator = torch.Generator().manual_seed(100 + replica)
    ids = kwargs["input_ids"]
    return [torch.randint(3, zoo.VOCABULARY, ids.shape, generator=generator) for _ in range(STEPS)]


def feed(ids):
    """What a script passes: data on pipeline rank 0, an empty tensor elsewhere."""
    return ids if smp.pp_rank() == 0 else torch.empty(0)


def reference(name, num_replicas=1):
    """Losses by replica, step and microbatch, and the state dict after the steps, in plain PyTorch."""
    model, _, kwargs = make_model(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = [batches(kwargs, replica) for replica in range(num_replicas)]
    losses = [[] for _ in range(num_replicas)]
    for step in range(STEPS):
        grads = []
        for replica in range(num_replicas):
            optimizer.zero_grad()
            losses[replica].append([])
            for ids in data[replica][step].chunk(MB):
                loss = model(input_ids=ids, labels=ids).loss
                (loss / MB).backward()
                losses[replica][-1].append(loss.detach())
            grads.append([p.grad for p in model.parameters()])
        for i, parameter in enumerate(model.parameters()):
            shares = [grad[i] / num_replicas for grad in grads]
            parameter.grad = sum(shares[1:], shares[0])
        optimizer.step()
    return losses, model.state_dict(), optimizer.state_dict()


@smp.step
def train_step(model, ids, scale):
    output = model(input_ids=ids, labels=ids)
    model.backward(output.loss * scale)
    return {"loss": output.loss, "pair": (ids.shape[0], None), "output": CausalLMOutput(logits=output.logits)}


@smp.step
def evaluate(model, ids):
    return model(input_ids=ids, labels=ids).loss


# Partitions by hand, the others by default on 0, and the placement that results.
LAST_FIRST = (("transformer.wte", "transformer.wpe", "transformer.drop", "transformer.h.0", "transformer.h.1"), (1, 0))
AROUND = (("transformer.h.1", "transformer.h.2"), (0, 1, 0))


def start(name="gpt2", world=2, by_hand=None, config=None, **options):
    config = {"pipeline_parallel_degree": 2, "microbatches": MB, "ddp": world > 2, **(config or {})}
    if by_hand is not None:
        config |= {"auto_partition": False, "default_partition": 0}
    smp.init(config)
    module, _, kwargs = make_model(name)
    for inner in by_hand[0] if by_hand is not None else ():
        smp.set_partition(module.get_submodule(inner), 1)
    model = smp.DistributedModel(module, **options)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    return module, model, optimizer, kwargs
