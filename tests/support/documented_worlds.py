"""What the Python blocks of each page take for granted, and what is true after them.

A world is a generator over the names that blocks run in: it fills them, and yields where the page's next block runs. Pages are run on
the ranks that they name, and each begins without a session.
"""

from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
import zoo
from documented import blocks
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import smpc
import smpc.v1 as smp

WORLDS = {}  # page -> (ranks, world)
PIPELINE = {"pipeline_parallel_degree": 2, "microbatches": 4}


def on(ranks, page):
    def keep(world):
        WORLDS[page] = (ranks, world)
        return world

    return keep


def fresh():
    """A names of its own for each page."""
    return {"torch": torch, "nn": nn, "smp": smp, "smpc": smpc}


def gpt2(names):
    """A model, a batch, its ids and labels."""
    torch.manual_seed(0)
    names["model"], (_, names["batch"]) = zoo.gpt2()
    names["ids"] = names["labels"] = names["batch"]["input_ids"]


def restart(**config):
    """Another session."""
    smp.shutdown()
    smp.init({**PIPELINE, **config})


def train_step(names):
    """The step function of the pages that call one, over Hugging Face's GPT-2."""

    @smp.step
    def step(model, ids):
        loss = model(input_ids=ids, labels=ids).loss
        model.backward(loss)
        return loss

    names["train_step"] = step


def trained(names, **config):
    """A session with a model and an optimizer."""
    gpt2(names)
    restart(**config)
    names["model"] = smp.DistributedModel(names["model"])
    names["optimizer"] = smp.DistributedOptimizer(torch.optim.AdamW(names["model"].parameters(), lr=1e-3))
    train_step(names)


def has_gradients(module):
    return all(p.grad is not None for p in module.parameters() if p.requires_grad and p.numel())


@on(2, "README.md")
def readme(names):
    gpt2(names)
    yield
    assert len(names["plan"].stages) == 4
    names |= {"make_model": lambda: zoo.gpt2()[0], "batches": [names["ids"]] * 3}
    torch.manual_seed(0)
    yield
    assert names["loss"] < 5
    restart(auto_partition=False, default_partition=0)
    names |= {"self": nn.Module(), "Encoder": lambda: nn.Linear(4, 4), "model": nn.Module()}
    names["model"].decoder = nn.Linear(4, 4)
    yield
    names["self"].decoder = names["model"].decoder
    names["self"].forward = lambda x: names["self"].decoder(names["self"].encoder(x))


@on(1, "docs/activation_checkpointing.md")
def activation_checkpointing(names):
    smp.init({})
    yield
    net = names["Net"]()
    net.encoder, net.layers = nn.Linear(4, 4), nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    smp.DistributedModel(net)
    assert callable(names["train_step"])
    block = zoo.gpt2()[0].transformer

    def keep(function, *args):
        return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False)

    names |= {"self": SimpleNamespace(transformer=block, checkpoint=keep), "h_0": torch.ones(1, 3, 32)}
    yield
    assert names["h_1"][0].grad_fn is not None


@on(1, "docs/cannot_be_traced.md")
def cannot_be_traced(names):
    yield
    assert "torch.__bool__ needs the values of a tensor" in names["message"]
    yield
    assert [name for name in names["plan"].stages[1].modules if name.startswith("gate")] == ["gate"]
    yield
    yield
    yield
    assert "self.gate(" in names["compilation"].rank_source(1)
    yield


@on(2, "docs/checkpoints.md")
def checkpoints(names):
    gpt2(names)
    rows = torch.full((25128, 768), float(dist.get_rank()))
    group = dist.new_group()
    names |= {
        "plan": smpc.partition(names["model"], names["batch"], pipeline_parallel_degree=2),
        "group": group, "own_channel": None, "timeout": 60.0, "rows": rows, "mine": torch.empty(50256, 768),
        "rank": dist.get_rank(), "scaler": torch.amp.GradScaler("cpu"),
    }  # fmt: skip
    names["own_channel"] = smpc.checkpoint.GroupChannel(dist.new_group(), 60.0)
    yield
    assert names["mine"][0, 0] == 0
    assert names["mine"][-1, -1] == 1
    names["optimizer"] = torch.optim.AdamW(names["model"].parameters())
    yield
    trained(names)
    names["train_step"](names["model"], names["ids"])
    names["optimizer"].step()
    scheduler = torch.optim.lr_scheduler.ConstantLR(names["optimizer"].optimizer)
    names |= {"path": "scripts", "step": 7, "scheduler": scheduler}
    yield
    assert names["content"]["step"] == 7


@on(1, "docs/choosing.md")
def choosing(names):
    gpt2(names)
    yield
    assert names["settings"]["pipeline_parallel_degree"] >= 1
    yield
    assert names["step_times"]["zb-h1"] < names["step_times"]["gpipe"]
    yield


@on(2, "docs/context_parallelism.md")
def context_parallelism(names):
    gpt2(names)
    names["process_group"] = dist.group.WORLD
    yield
    assert has_gradients(names["module"])
    gpt2(names)
    names["context_group"] = dist.group.WORLD
    yield
    gpt2(names)
    names |= {"data": TensorDataset(names["ids"]), "DataLoader": DataLoader}
    yield
    assert names["loss"] > 0


@on(2, "docs/data_loading.md")
def data_loading(names):
    classifier = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 3))
    model = []  # made when smp.init has been called, which the block does

    @smp.step
    def step(model, x, labels):
        loss = nn.functional.cross_entropy(model(x), labels)
        model.backward(loss)
        return loss

    def train(_, x, labels):
        model or model.append(smp.DistributedModel(classifier))
        return step(model[0], x, labels)

    names |= {"train_step": train, "model": None}
    yield
    names |= {"model": model[0], "train_step": step}
    yield
    assert names["loss"] > 0
    yield


@on(2, "docs/data_parallel.md")
def data_parallel(names):
    gpt2(names)
    names["module"] = names["model"]
    yield
    smp.shutdown()
    names |= {"own_batches": [names["ids"]] * 2}
    yield
    trained(names, ddp=True)
    yield


@on(2, "docs/distributed_functions.md")
def distributed_functions(names):
    names["dataset"] = range(10)
    yield
    assert len(names["sampler"]) == 5


@on(2, "docs/expert_parallelism.md")
def expert_parallelism(names):
    from expert_models import hugging_face, tokens

    torch.manual_seed(0)
    model = hugging_face("MixtralForCausalLM", torch.float32)
    ids = tokens(dist.get_rank())["input_ids"]
    names |= {"model": model, "process_group": dist.group.WORLD, "ids": ids, "labels": ids}
    names["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1)
    yield
    assert names["loss"].isfinite()


@on(1, "docs/kernels.md")
def kernels(names):
    restart(pipeline_parallel_degree=1, microbatches=1)
    tokens, width = 6, 1024
    names |= {
        "qkv": torch.randn(1, tokens, 3, 2, 128), "alibi": torch.zeros(1, 2, 1, tokens),
    }  # fmt: skip
    yield
    names |= {name: torch.randn(1, 2, tokens, 16) for name in "qkv"}
    yield
    names |= {name: torch.randn(2, tokens, width) for name in ("x", "residual", "packed")}
    names |= {"weight": torch.ones(width), "bias": torch.zeros(width)}
    names |= {"cos": torch.ones(tokens, 8), "sin": torch.zeros(tokens, 8)}
    yield
    names |= {
        "logits": torch.randn(4, 10), "my_logits": torch.randn(4, 10), "labels": torch.arange(4),
        "hidden": torch.randn(4, 8), "lm_head": nn.Linear(8, 10), "group": dist.group.WORLD,
    }  # fmt: skip
    yield
    model = nn.Linear(4, 4)
    model(torch.ones(2, 4)).sum().backward()
    names["model"] = smp.DistributedModel(model)
    yield


@on(2, "docs/observability.md")
def observability(names):
    trained(names)
    names["batches"] = [names["ids"]] * 3
    yield
    yield
    names["train_step"](names["model"], names["ids"])
    yield
    names["train_step"](names["model"], names["ids"])


@on(1, "docs/planner.md")
def planner(names):
    names["model"], (_, names["batch"]) = zoo.gpt2()
    names["batch"] = {name: torch.cat([value, value]) for name, value in names["batch"].items()}
    yield
    assert len(names["plan"].stages) == 4
    yield
    assert names["found"].config()
    yield
    assert names["found"].bottleneck > 0
    Path("bert_l-3_inference.json").write_text(blocks("planner.md", "json")[0])
    yield
    assert max(names["found"].times) > 0


@on(2, "docs/precision.md")
def precision(names):
    from smpc.checkpoint import GroupChannel, Root, load_modules, module_content, save

    gpt2(names)
    train_step(names)
    names |= {"module": names["model"], "get_scheduler": torch.optim.lr_scheduler.ConstantLR}
    yield
    smp.shutdown()
    smp.init(PIPELINE)
    names["model"] = smp.DistributedModel(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)))
    names["optimizer"] = smp.DistributedOptimizer(torch.optim.AdamW(names["model"].parameters()))
    names |= {"inputs": torch.randn(8, 4), "targets": torch.randn(8, 4), "loss_function": nn.functional.mse_loss}
    yield
    trained(names, pipeline_parallel_degree=1, microbatches=1, ddp=True, bf16=True)
    names["train_step"](names["model"], names["ids"])
    names["optimizer"].step()
    channel, root = GroupChannel(dist.new_group(), 60.0), Root("plain")
    plain = zoo.gpt2()[0].bfloat16()
    plain_optimizer = torch.optim.AdamW(plain.parameters())
    plain(**names["batch"]).loss.backward()
    plain_optimizer.step()
    save(root, "step", module_content(plain, plain_optimizer), channel)
    names |= {"channel": channel, "folder": root.find("step"), "load_modules": load_modules}
    yield


@on(1, "docs/reports.md")
def reports(names):
    yield
    assert names["plan"].stages


@on(1, "docs/schedules.md")
def schedules(names):
    gpt2(names)
    names["compilation"] = smpc.compile_model(
        names["model"], names["batch"], pipeline_parallel_degree=2, microbatches=4
    )
    yield
    assert "0F0" in names["text"]


@on(4, "docs/sharded_data_parallelism.md")
def sharded_data_parallelism(names):
    gpt2(names)
    names["module"] = names["model"]
    yield
    train_step(names)
    assert names["train_step"](names["model"], names["ids"]).item() > 0


@on(4, "docs/smp_v2.md")
def smp_v2(names):
    yield
    model = nn.Linear(2, 2)
    names |= {"model": model, "step": 3, "state_dict": {"model": nn.Linear(2, 2).state_dict(), "step": 0}}
    dist.broadcast(model.weight.data, 0)
    dist.broadcast(model.bias.data, 0)
    yield
    assert torch.equal(names["state_dict"]["model"]["weight"], model.weight)


@on(4, "docs/tensor_parallel_compiler.md")
def tensor_parallel_compiler(names):
    from smpc.compile import compile_model
    from smpc.executor.collectives import TensorGroup
    from smpc.executor.transport import GlooTransport
    from smpc.runtime import Runtime
    from smpc.tensor_parallel import place

    gpt2(names)
    names["AnyModel"] = lambda: zoo.gpt2()[0]
    yield
    smp.shutdown()
    gpt2(names)
    names["process_group"] = dist.group.WORLD
    yield
    assert has_gradients(names["module"])
    gpt2(names)
    tensor = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    pipeline = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    rank = dist.get_rank()
    names |= {"compile_model": compile_model, "place": place, "Runtime": Runtime, "pipeline_rank": rank // 2}
    names |= {"group": TensorGroup.of(tensor[rank // 2]), "transport": GlooTransport(pipeline[rank % 2])}
    yield
    names |= {"dist": dist, "pipeline_group": pipeline[rank % 2]}
    yield
    assert names["model"].state_dict()


@on(4, "docs/tensor_parallelism.md")
def tensor_parallelism(names):
    from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, GPTNeoXConfig

    class MyModel(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return self.head(self.body(x))

    names["MyModel"] = MyModel
    yield
    hooks = dict.fromkeys(("init_hook", "forward_hook", "return_hook", "state_hook"))
    names |= {"MyLayer": type("MyLayer", (nn.Linear,), {}), **hooks}
    yield
    restart(tensor_parallel_degree=2, ddp=True)
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "vocab_size": 64,
    }
    names |= {
        "config": GPTNeoXConfig(**sizes, max_position_embeddings=16), "AutoModelForCausalLM": AutoModelForCausalLM,
    }  # fmt: skip
    yield
    yield
    assert any("query_key_value" in name for name in names["theirs"])
    smp.shutdown()
    drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    names |= {"GPT2LMHeadModel": GPT2LMHeadModel}
    names["config"] = GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=64, n_positions=16, **drops)
    yield
    trained(names, pipeline_parallel_degree=1, microbatches=1, tensor_parallel_degree=2, ddp=True)
    yield


@on(2, "docs/trainer.md")
def trainer(names):
    generator = torch.Generator().manual_seed(dist.get_rank())
    data = TensorDataset(torch.randn(32, 8, generator=generator), torch.arange(32) % 4)
    sampler = smpc.dist.get_sampler(data)
    names["loader"] = DataLoader(data, batch_size=4, sampler=sampler)
    yield
    assert names["trainer"].state.timestamp.batch == 4
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    names |= {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    yield
    yield
    assert names["parallelism_config"]["tp"]["layer_plan"] is names["layer_plan"]


@on(2, "docs/training_scripts.md")
def training_scripts(names):
    trained(names)
    names["train_step"](names["model"], names["ids"])
    yield
    assert names["norm"] > 0
    smp.shutdown()
    smp.init(PIPELINE)
    names |= {
        name: smp.DistributedModel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))) for name in ("teacher", "student")
    }

    @smp.step
    def teach(model, x):
        return model(x)

    @smp.step
    def learn(model, x, target):
        loss = nn.functional.mse_loss(model(x), target)
        model.backward(loss)
        return loss

    names |= {"teach": teach, "learn": learn, "ids": torch.randn(8, 4)}
    yield
    assert names["loss"] >= 0
