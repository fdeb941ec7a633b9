"""Predicted against living bytes of training scripts: every combination of degrees, sharding, precision and recomputation.

What the plan of a script predicts of each rank is compared with the bytes that live there in its second step and in the optimizer's step
after it: parameters, gradients, buckets of replicas, optimizer state, activations, messages.
"""

import itertools

import pytest
import torch
import torch.nn.functional as F
import transformers
from executor_harness import run_workers
from torch import nn

import smpc.v1 as smp

SAMPLES, LENGTH, VOCABULARY = 16, 64, 1024
MESSAGE = SAMPLES // 4 * LENGTH * 128 * 4  # bytes between two stages, of one microbatch in fp32
SHARDING = {
    "whole": {},
    "optimizer state": {"shard_optimizer_state": True},
    "all": {"fully_shard": True},
    "shards of 2": {"sharded_data_parallel_degree": 2},
}
BY_BLOCK = {"fully_shard": True, "sdp_param_persistence_threshold": 0}  # as models of large blocks
BY_USE = BY_BLOCK | {"sdp_max_live_parameters": 1}  # as models of over a billion parameters
WITHOUT_PIPELINE = {
    **SHARDING,
    "all, by block": BY_BLOCK,
    "all, by use": BY_USE,
    "tensor": {"tensor_parallel_degree": 2},
    "context": {"context_parallel_degree": 2},
    "context, all": {"context_parallel_degree": 2, "fully_shard": True},
    "expert": {"expert_parallel_degree": 2},
    "expert, all": {"expert_parallel_degree": 2, "fully_shard": True},
    "expert, by use": {"expert_parallel_degree": 2} | BY_USE,
}
AUTO = {"tensor_parallel_plan": "auto", "prescaled_batch": True}


def cases(world):
    """(pipeline degree, tensor degree, what replicas divide, dtype, whether blocks are computed again), with a pipeline."""
    for pipeline, tensor in itertools.product((2, 4), (1, 2)):
        if world % (pipeline * tensor) == 0:
            kinds = ("whole", "optimizer state", "all") if world > pipeline * tensor else ("whole",)
            yield from itertools.product((pipeline,), (tensor,), kinds, ("fp32", "bf16"), (False, True))


def settings(pipeline, tensor, sharding, dtype, _):
    found = {"pipeline_parallel_degree": pipeline, "tensor_parallel_degree": tensor, "microbatches": 4, "ddp": True}
    found |= {"bf16": True} if dtype == "bf16" else {}
    return found | (AUTO if tensor > 1 else {}) | SHARDING[sharding]


def make():
    torch.manual_seed(0)
    sizes = {"n_layer": 4, "n_embd": 128, "n_head": 4, "n_positions": LENGTH, "vocab_size": VOCABULARY}
    config = transformers.GPT2Config(**sizes, use_cache=False, bos_token_id=0, eos_token_id=0)
    return transformers.GPT2LMHeadModel(config).train()


@smp.step
def train_step(model, ids):
    loss = model(input_ids=ids, labels=ids).loss
    model.backward(loss)
    return loss


def make_mixture():
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 4, "num_attention_heads": 4}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 4}
    config = transformers.MixtralConfig(**sizes, **experts, vocab_size=VOCABULARY, use_cache=False)
    return transformers.MixtralForCausalLM(config).train()


def make_llama():
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=VOCABULARY, use_cache=False)
    return transformers.LlamaForCausalLM(config).train()


class Residual(nn.Module):
    """A block of a ResNet, with BatchNorm and activations in place."""

    def __init__(self, inputs, outputs):
        super().__init__()
        stride = outputs // inputs
        self.first, self.first_norm = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs)
        self.second, self.second_norm = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs)
        self.around = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if stride > 1 else nn.Identity()
        self.act = nn.ReLU(inplace=True)

    def forward(self, x):
        inside = self.second_norm(self.second(self.act(self.first_norm(self.first(x)))))
        return self.act(inside + self.around(x))


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True))
        self.layers = nn.ModuleList(Residual(a, b) for a, b in itertools.pairwise((16, 16, 16, 32, 32, 64, 64)))
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean((2, 3)))


class Attention(nn.Module):
    """Written by hand: nothing in it is fused."""

    def __init__(self, width=128):
        super().__init__()
        self.norm, self.three, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        three = self.three(self.norm(x)).chunk(3, -1)
        q, k, v = (part.view(batch, length, 4, width // 4).transpose(1, 2) for part in three)
        scores = q @ k.transpose(-1, -2) / (width // 4) ** 0.5
        later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        mixed = scores.masked_fill(later, float("-inf")).softmax(-1) @ v
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(x)))


class ByHand(nn.Module):
    def __init__(self, width=128):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Attention(width) for _ in range(4))
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, input_ids, labels):
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        return transformers.modeling_outputs.CausalLMOutput(
            F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())
        )


@smp.step
def image_step(model, images):
    loss = model(images).square().mean()
    model.backward(loss)
    return loss


MODELS = {"gpt2": make, "mixtral": make_mixture, "llama": make_llama, "resnet": ResNet, "by hand": ByHand}
SIZES = {"activations": (SAMPLES, LENGTH), "parameters": (4, 8)}  # what there is most of: samples, and their length


def run(rank, folder, chosen):
    """By case (rank, predicted bytes, measured bytes) of all ranks."""
    return [measured(*case) for case in chosen]


def measured(config, again, name=None, size="activations"):
    """(rank, predicted bytes, measured bytes) of all ranks."""
    smp.init(config)
    name = name or ("mixtral" if config.get("expert_parallel_degree", 1) > 1 else "gpt2")
    torch.manual_seed(0)
    module = MODELS[name]().train()
    model = smp.DistributedModel(module)
    inner = getattr(module, "model", module)
    for block in (module.transformer.h if name == "gpt2" else inner.layers) if again else ():
        smp.set_activation_checkpointing(block)
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters()))
    step = image_step if name == "resnet" else train_step
    for number in range(3):
        if number == 1:
            model.observe(1)  # memory in this step, times in the next one
        optimizer.zero_grad()
        step(model, batch_of(name, size) if smp.pp_rank() == 0 else torch.empty(0, dtype=torch.int64))
        optimizer.step()
    lines = [line for line in model.report().lines if line.what.endswith("peak")]
    smp.shutdown()
    return [(line.what, line.predicted, line.measured) for line in lines]


def batch_of(name, size):
    samples, length = SIZES[size]
    return torch.randn(samples, 3, 32, 32) if name == "resnet" else torch.randint(VOCABULARY, (samples, length))


def check(folder, world, chosen, above=0.05, message=MESSAGE):
    """All of `chosen` in one job: configurations, whether blocks are computed again, and perhaps the model, and what it has most of."""
    wrong = []
    for (config, again, *more), lines in zip(chosen, run_workers(run, world, folder, chosen)[0], strict=True):
        assert len(lines) == world
        for what, predicted, measured in evened(lines) if "expert_parallel_degree" in config else lines:
            # What has been sent is held until it has arrived: whether the last message has, by the peak, is chance.
            is_near = 0.95 * measured <= predicted <= (1 + above) * measured + message
            how = f"{' '.join(more)} {config}, {'with' if again else 'without'} recomputation, {what}"
            print(f"{predicted / measured - 1:+.1%} {how}")
            wrong += [] if is_near else [f"{how}: predicted {predicted:,}, measured {measured:,}"]
    assert not wrong, "\n".join(wrong)


def evened(lines):
    """With the average of the ranks of each stage: predictions take all experts to get as many tokens, and these routers are random."""
    stages = [what.partition("(")[2] for what, *_ in lines]
    for stage in dict.fromkeys(stages):
        rows = [line for line, own in zip(lines, stages, strict=True) if own == stage]
        assert len({predicted for _, predicted, _ in rows}) == 1
        yield f"ranks of ({stage}", rows[0][1], sum(measured for *_, measured in rows) / len(rows)


def tried(chosen):
    return [(settings(*case), case[-1]) for case in chosen]


@pytest.mark.long
@pytest.mark.parametrize(
    "case", [pytest.param((2, 1, "whole", "fp32", False), marks=pytest.mark.slow), (2, 2, "whole", "bf16", True)]
)
def test_replicas_and_tensor_ranks(tmp_path, case):
    """Both were 6 to 11% off: buckets were not predicted, and what ranks of a host share for small collectives was counted."""
    check(tmp_path, 4, tried([case]))


@pytest.mark.slow
@pytest.mark.parametrize("start", range(0, len(list(cases(4))), 6))
def test_four_ranks(tmp_path, start):
    check(tmp_path, 4, tried(list(cases(4))[start : start + 6]))


@pytest.mark.slow
def test_two_ranks(tmp_path):
    check(tmp_path, 2, tried(cases(2)))


@pytest.mark.long
@pytest.mark.matrix(3)
@pytest.mark.parametrize("again", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("sharding", SHARDING)
@pytest.mark.parametrize("kind", ["context", "expert", "replica"])
def test_ranks_that_share_sequences_or_experts(tmp_path, kind, sharding, dtype, again):
    """Of experts the plan counted a third of what they keep, and buckets that they do not have: -22%."""
    if kind == "context" and sharding == "shards of 2":
        pytest.skip("parts over 2 x 2 ranks of each stage take 8 ranks, and are those of `all`")
    config = settings(2, 1, sharding, dtype, None)
    if kind != "replica":
        config[f"{kind}_parallel_degree"] = 2
    check(tmp_path, 4, [(config, again)])


def alone(kind, name, dtype, again, size):
    """A case without a pipeline."""
    config = {"pipeline_parallel_degree": 1, "microbatches": 4, "ddp": True} | WITHOUT_PIPELINE[kind]
    config |= AUTO if "tensor" in kind else {}
    return (config | ({dtype: True} if dtype != "fp32" else {}), again, name, size)


@pytest.mark.long
def test_models_that_run_as_they_are(tmp_path):
    """Scripts without a pipeline had no prediction. Of blocks that gather their own parameters the plan had all whole: 24% too much.
    Buckets were left out of what was measured in the optimizer's step, and of predictions where ranks share sequences: 21% too little.
    Experts that one rank has for itself were measured as whole while they were not: 9% too much."""
    chosen = [
        ("all, by use", "gpt2", "fp32", True, "parameters"),
        ("expert, by use", "mixtral", "fp32", False, "parameters"),
        ("optimizer state", "by hand", "bf16", True, "parameters"),
    ]
    check(tmp_path, 2, [alone(*case) for case in chosen], message=0)


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", WITHOUT_PIPELINE)
def test_every_model_without_a_pipeline(tmp_path, kind, size):
    names = ["mixtral"] if "expert" in kind else [name for name in MODELS if "context" not in kind or name != "resnet"]
    cases = itertools.product((kind,), names, ("fp32", "bf16", "fp16"), (False, True), (size,))
    check(tmp_path, 2, [alone(*case) for case in cases], message=0)


@pytest.mark.slow
def test_parts_over_two_of_four_ranks(tmp_path):
    kinds = [{"tensor_parallel_degree": 2, "fully_shard": True} | AUTO, {"sharded_data_parallel_degree": 2}, BY_USE]
    chosen = itertools.product(kinds, (False, True), ("gpt2", "llama"), SIZES)
    config = {"pipeline_parallel_degree": 1, "microbatches": 4, "ddp": True}
    check(tmp_path, 4, [(config | kind, *case) for kind, *case in chosen], message=0)


@pytest.mark.long
@pytest.mark.parametrize("sharding", ["whole", "all"])
def test_experts_beside_sequences_without_a_pipeline(tmp_path, sharding):
    """Experts that two ranks have are summed at the end of a step, in messages; the plan had buckets of them all along, and copies of
    all of them were made in the end: 6% too much, or 5% too little."""
    degrees = {"context_parallel_degree": 2, "expert_parallel_degree": 2}
    chosen = [(settings(1, 1, sharding, "fp32", None) | degrees, False, "mixtral", size) for size in SIZES]
    check(tmp_path, 4, chosen, message=0)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("sharding", ["whole", "all"])
@pytest.mark.parametrize("degree", [2, 4])
def test_experts_beside_sequences_in_every_way(tmp_path, degree, sharding, dtype):
    """Of experts in parts the plan had them whole on each rank: 17% too much, 28% in bf16."""
    degrees = {"context_parallel_degree": 2, "expert_parallel_degree": degree}
    config = settings(1, 1, sharding, dtype, None) | degrees
    check(tmp_path, 4, [(config, again, "mixtral", size) for again in (False, True) for size in SIZES], message=0)


@pytest.mark.long
@pytest.mark.parametrize(
    ("schedule", "cases"),
    [
        ("interleaved-1f1b", [("llama", False), ("resnet", True)]),
        ("zb-v", [("resnet", False), ("resnet", True)]),
        pytest.param(
            "interleaved-1f1b",
            [
                ("llama", True),
                ("gpt2", False),
                ("gpt2", True),
                ("by hand", False),
                ("by hand", True),
                ("resnet", False),
            ],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "zb-v",
            [("llama", False), ("llama", True), ("gpt2", False), ("gpt2", True), ("by hand", False), ("by hand", True)],
            marks=pytest.mark.slow,
        ),
        pytest.param("list", [("gpt2", False), ("gpt2", True), ("llama", True)], marks=pytest.mark.slow),
    ],
)
def test_ranks_with_several_stages_or_a_searched_schedule(tmp_path, schedule, cases):
    """The sum of the stages' peaks was up to 50% too much; `list`, whose microbatches wait for W, was 24% off. Messages by stage were
    9% too few for Llama's last rank; tied embeddings counted for both stages of a rank. What zb-v's last rank hands from one of its stages
    to the other was left out until it was taken, and then counted twice: 9% too low, 5% too high."""
    config = settings(2, 1, "whole", "fp32", None) | {"schedule": schedule}
    if schedule == "interleaved-1f1b":
        config["virtual_pipeline_degree"] = 2
    check(tmp_path, 2, [(config, again, name) for name, again in cases], message=0)


@pytest.mark.long
def test_what_is_there_while_the_optimizer_works(tmp_path):
    """Receive buffers, which stay, were left out: 8% too low. What the updates of a rank's two stages take was added up: 6% too high."""
    config = settings(2, 1, "whole", "bf16", None)
    check(tmp_path, 2, [(config, True, "resnet"), (config | {"schedule": "zb-v"}, True, "llama")], message=0)


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    ["resnet", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt2", "llama", "by hand", "mixtral"))],
)
def test_stages_that_leave_nothing_to_the_second_part_of_a_backward(tmp_path, name):
    """What is computed again is not put off, and small calls on a CPU are not: a last rank was predicted 28% too high."""
    config = settings(2, 1, "whole", "fp32", None) | {"schedule": "zb-h1"}
    check(tmp_path, 2, [(config, True, name), (config, False, name)], message=10 * MESSAGE if name == "mixtral" else 0)


@pytest.mark.slow
def test_the_optimizer_of_large_parameters_in_half_precision(tmp_path):
    """Gradients of masters, and what Adam makes of the largest one, were left out: up to 34% too little."""
    config = settings(4, 1, "whole", "fp16", None) | {"fp16": True, "microbatches": 16}
    check(tmp_path, 4, [(config, True)])
