"""Every tuple of degrees of a world, and what trains a tiny model on its ranks: through a plan with pipelines, as SMP v2 without.

plan    `compile_model` and `Runtime`; replicas are averaged by `StageReplicas`, parts by `StageShards`, experts beside them
v2      `tsm.transform` and `fully_shard`
"""

import functools
import gc
import itertools

import torch
import torch.distributed as dist
import transformers
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import smpc.v2 as tsm
from smpc import context_parallel, tensor_parallel
from smpc.codegen.rewrite.tensor_parallel.layouts import REPLICATED
from smpc.compile import compile_model
from smpc.errors import ConfigError
from smpc.executor.collectives import TensorGroup
from smpc.executor.parameter_slices import whole_of
from smpc.executor.replicas.data_parallel import StageReplicas
from smpc.executor.replicas.divided_modules import ExpertReplicas
from smpc.executor.replicas.fully_shard import StageShards
from smpc.executor.transport.gloo import GlooTransport
from smpc.expert_parallel import shard
from smpc.experts.stacked import take_role
from smpc.mesh import Axis, Mesh
from smpc.mesh.device_mesh import device_mesh, make_groups
from smpc.mesh.mesh import Degrees
from smpc.runtime import Runtime
from smpc.v2.tensor_parallel.transformer import TransformerLayer
from smpc.v2.transforming.transformed_slices import slices_of

STEPS, MICROBATCHES, BATCH, LENGTH, VOCABULARY = 4, 2, 4, 16, 64
SIZES = {
    "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 48,
    "vocab_size": VOCABULARY, "max_position_embeddings": 32, "use_cache": False, "attention_dropout": 0.0,
}  # fmt: skip


def dense():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))


def mixture():
    config = transformers.MixtralConfig(**SIZES, num_local_experts=8, num_experts_per_tok=2)
    config._experts_implementation = "eager"
    return transformers.MixtralForCausalLM(config)


def encoder_decoder():
    config = transformers.T5Config(
        num_layers=2, d_model=32, num_heads=8, d_kv=4, d_ff=48, vocab_size=VOCABULARY, dropout_rate=0, decoder_start_token_id=0,
        use_cache=False,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


MODELS = {make.__name__: make for make in (dense, mixture, encoder_decoder)}


def wide_loss(logits, labels, *_, **__):
    """The loss of causal models in the type of the logits: theirs is in float32."""
    targets = torch.nn.functional.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    return torch.nn.functional.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


class WideRouter(torch.nn.Module):
    """Mixtral's in the type of the hidden states: its own is in float32."""

    def forward(self, hidden):
        logits = torch.nn.functional.linear(hidden.reshape(-1, self.hidden_dim), self.weight)
        weights, index = logits.softmax(-1).topk(self.top_k, dim=-1)
        return logits, weights / weights.sum(-1, keepdim=True), index


class WideNorm(torch.nn.Module):
    """Models' own norms are in float32, whose sums depend on the order of their elements in memory."""

    def forward(self, hidden):
        return self.weight * hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + self.variance_epsilon)


WIDE = {"MixtralTopKRouter": WideRouter} | dict.fromkeys(("LlamaRMSNorm", "MixtralRMSNorm", "T5LayerNorm"), WideNorm)


def tuples(world, *, has_experts):
    """All degrees whose product is the world, and numbers of ranks that experts might be divided over, as they may be or not."""
    numbers = [n for n in range(1, world + 1) if world % n == 0]
    for pipeline, tensor, context, parts in itertools.product(numbers, repeat=4):
        if world % (pipeline * tensor * context * parts) == 0:
            for expert in numbers if has_experts else (1,):
                yield Degrees(world, pipeline, tensor, context, parts, expert)


def refusal(degrees):
    """What is said of degrees that do not fit each other; "" of those that do."""
    try:
        Mesh.of(degrees)
    except ConfigError as error:
        return str(error)
    return ""


def made(name, dtype):
    """The model in training mode, with parameters that differ from what they are initialised to."""
    torch.manual_seed(0)
    model = MODELS[name]()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    if dtype is torch.float64:
        model.loss_function = wide_loss
        for module in model.modules():
            role = WIDE.get(type(module).__name__)
            if role is not None:
                take_role(module, role)
    return model.to(dtype).train()


def batch(step, sample):
    """Tokens, with padding and labels that do not count: of every sample others."""
    generator = torch.Generator().manual_seed(100 * step + sample)
    ids, labels = torch.randint(3, VOCABULARY, (2, BATCH, LENGTH), generator=generator)
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    for row in range(BATCH):
        pad = (sample + row) % 4
        if pad:
            mask[row, -pad:], labels[row, -pad:] = 0, -100
        labels[row, : (3 * sample + row) % 7] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def microbatches(given, count):
    return [
        dict(zip(given, parts, strict=True)) for parts in zip(*(v.chunk(count) for v in given.values()), strict=True)
    ]


def optimizer_of(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3, eps=1e-3)


@functools.cache
def one_process(name, dtype, num_samples, count):
    """Losses by step; gradients of the first and of the last."""
    model = made(name, dtype)
    optimizer, losses, gradients = optimizer_of(model.parameters()), [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for sample in range(num_samples):
            for part in microbatches(batch(step, sample), count):
                loss = model(**part).loss
                (loss / count / num_samples).backward()
                total += loss.item() / count / num_samples
        losses.append(total)
        gradients.append({key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
    return losses, (gradients[0], gradients[-1])


def train(rank, degrees, name, dtype):
    """This rank's losses (None: it has none), and its whole gradients of the first and last step."""
    mesh = Mesh.of(degrees)
    steps = _on_plan if degrees.pipeline > 1 else _as_v2
    found = list(steps(rank, mesh, name, dtype))
    return [loss for loss, _ in found], (found[0][1], found[-1][1])


def count_of(degrees):
    """Microbatches of a step."""
    return MICROBATCHES if degrees.pipeline > 1 else 1


def _on_plan(rank, mesh, name, dtype):
    groups = make_groups(mesh, rank, dist.group.WORLD)
    try:
        yield from _steps_of_plan(rank, mesh, name, dtype, groups)
    finally:
        gc.collect()
        for group in {*groups.values()} - {dist.group.WORLD}:  # each has threads that wake up all the time
            dist.destroy_process_group(group)


def _steps_of_plan(rank, mesh, name, dtype, groups):
    model = made(name, dtype)
    sample = mesh.axis_rank(Axis.DATA, rank)
    experts = shard(model, groups[Axis.EP]) if mesh.ep_size > 1 else None
    compilation = compile_model(
        model, batch(0, sample), pipeline_parallel_degree=mesh.pp_size, microbatches=MICROBATCHES, warn=False,
        tensor_parallel_degree=mesh.tp_size, context_parallel_degree=mesh.cp_size,
    )  # fmt: skip
    tensor = TensorGroup.of(groups[Axis.TP])
    if mesh.tp_size > 1:
        tensor_parallel.place(model, compilation.sharded, tensor)
    if mesh.cp_size > 1:
        context_parallel.place(model, compilation.context, groups[Axis.CP])
    layouts = {} if compilation.sharded is None else dict(compilation.sharded.layouts)
    runtime = Runtime(
        model,
        rank=mesh.pp_rank(rank),
        transport=GlooTransport(groups[Axis.PP]),
        hooks=_hooks(mesh, rank, groups, experts),
    )
    of_experts = set() if experts is None else {key for key, _ in experts.expert_parameters()}
    program, optimizer = runtime.install(compilation), None
    for step in range(STEPS):
        losses = []

        def on_output(_, output, losses=losses):
            losses.append(output["loss"].detach())
            return [(output["loss"] / MICROBATCHES, None)]

        given = batch(step, sample)
        parts = [((), part) for part in microbatches(given, MICROBATCHES)] if mesh.pp_rank(rank) == 0 else None
        runtime.run(program, parts, on_output, training=True)
        own = {key: p for stage in runtime.stages.values() for key, p in stage.named_parameters()}
        gradients = _whole(own, layouts, tensor, of_experts, groups)
        optimizer = optimizer or optimizer_of(own.values())
        yield (sum(losses).item() / MICROBATCHES if losses else None), gradients
        optimizer.step()
        optimizer.zero_grad()


def _hooks(mesh, rank, groups, experts):
    def over(shards):
        axes = (Axis.REPLICA, shards) if mesh.size(Axis.REPLICA) > 1 else (shards,)
        return device_mesh(mesh, rank, "cpu", axes, groups, [f"{axis}_{groups[axis].group_name}" for axis in axes])

    def hooks(stages):
        if mesh.rdp_size == 1:
            return None
        if mesh.shard_size > 1:
            apart = None if experts is None else experts.apart(over(Axis.EXPERT_FSDP), groups[Axis.EXPERT_DATA])
            return StageShards(stages, groups[Axis.RDP], over(Axis.FSDP), apart=apart)
        own = {} if experts is None else {id(parameter) for _, parameter in experts.expert_parameters()}
        held = [p for stage in stages.values() for p in stage.parameters() if id(p) in own]
        replicas = StageReplicas(stages, groups[Axis.RDP], apart=held)
        return replicas if experts is None else ExpertReplicas(held, TensorGroup.of(groups[Axis.EXPERT_DATA]), replicas)

    return hooks


def _whole(own, layouts, tensor, of_experts, groups):
    found = {}
    for key, parameter in own.items():
        grad = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        if key in of_experts:
            parts = [torch.empty_like(grad) for _ in range(groups[Axis.EP].size())]
            dist.all_gather(parts, grad.contiguous(), group=groups[Axis.EP])
            grad = torch.cat(parts)
        found[key] = whole_of(grad, layouts.get(key, REPLICATED), tensor).clone()
    return found


def _as_v2(rank, mesh, name, dtype):
    tsm.init(
        {
            "hybrid_shard_degree": mesh.fsdp_size,
            "tensor_parallel_degree": mesh.tp_size,
            "context_parallel_degree": mesh.cp_size,
            "expert_parallel_degree": mesh.ep_size,
        }
    )
    try:
        yield from _steps_of_v2(rank, mesh, name, dtype)
    finally:
        tsm.state.reset()
        gc.collect()


def _steps_of_v2(rank, mesh, name, dtype):
    model = tsm.transform(made(name, dtype), config={"sample_inputs": batch(0, 0)})
    slices = slices_of(model) or {}
    for module in model.modules():
        if isinstance(module, TransformerLayer):
            fully_shard(module)
    fully_shard(model)
    optimizer = optimizer_of(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        given = {
            key: _own_chunks(value, mesh, rank) for key, value in batch(step, mesh.axis_rank(Axis.DATA, rank)).items()
        }
        loss = model(**given).loss
        loss.backward()
        gradients = {}
        for key, parameter in model.named_parameters():
            if parameter.grad is not None:
                grad = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
                is_part = key in slices and tuple(grad.shape) != slices[key].shape
                gradients[key] = (slices[key].whole(grad) if is_part else grad).clone()
        yield loss.item(), gradients
        optimizer.step()


def _own_chunks(value, mesh, rank):
    """What a script passes of a sequence that context-parallel ranks share."""
    if mesh.cp_size == 1:
        return value
    chunks, own = value.chunk(2 * mesh.cp_size, 1), mesh.axis_rank(Axis.CP, rank)
    return torch.cat([chunks[own], chunks[2 * mesh.cp_size - 1 - own]], 1)


LIMITS = {torch.float32: (1e-6, 1e-5), torch.float64: (1e-10, 1e-10)}  # of a loss, of a gradient


def errors(rank, degrees, name, dtype):
    """What is wrong on this rank, for people; empty: nothing."""
    mesh = Mesh.of(degrees)
    try:
        losses, gradients = train(rank, degrees, name, dtype)
    except Exception as error:
        return [f"{type(error).__name__}: {error}"]
    loss_limit, gradient_limit = LIMITS[dtype]
    wanted, whole = one_process(name, dtype, mesh.size(Axis.DATA), count_of(degrees))
    own = torch.tensor([0.0 if loss is None else loss for loss in losses], dtype=torch.float64)
    dist.all_reduce(own)
    own /= mesh.world_size // mesh.pp_size
    wrong = [
        f"step {step}: loss {a:.12g}, of one process {b:.12g}"
        for step, (a, b) in enumerate(zip(own.tolist(), wanted, strict=True))
        if not abs(a - b) <= loss_limit * abs(b)
    ]
    for step, found, expected in zip((0, STEPS - 1), gradients, whole, strict=True):
        largest = max(g.abs().max() for g in expected.values())
        for key, grad in found.items():
            error = (grad - expected[key]).abs().max() / max(expected[key].abs().max(), 0.01 * largest)
            if not error <= gradient_limit:
                wrong.append(f"step {step}: gradient of {key} off by {error:.2g}")
        if mesh.pp_size == 1 and found.keys() != expected.keys():
            wrong.append(f"step {step}: gradients of {sorted(found.keys() ^ expected.keys())}")
    return wrong


def run_cases(rank, folder, cases):
    """By case what is wrong on this rank."""
    found = {}
    for degrees, name, dtype in cases:
        found[degrees, name, dtype] = errors(rank, degrees, name, dtype)
        with open(folder / f"progress{rank}", "a") as log:
            print(degrees, name, dtype, found[degrees, name, dtype][:3], file=log)
        dist.barrier()
    return found
