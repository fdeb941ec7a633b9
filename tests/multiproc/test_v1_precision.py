"""fp16 and bf16 training in scripts: compared with torch.amp.GradScaler over hand-written masters, and with fp32."""

import pytest
import torch
from executor_harness import run_workers
from precision_jobs import MB, Job, batch, differences, gain_at, make_model, optimizer_of, whole
from torch import nn
from v1_harness import make_model as make_gpt2

import smpc.v1 as smp
from smpc.errors import NonFiniteLossError, UsageError

STEPS, HUGE = 16, (5, 9, 10)
SCALER = {"init_scale": 2.0**24, "scale_factor": 4.0, "scale_window": 3, "min_scale": 2.0**-40}


def with_torch(dtype=torch.float16, steps=STEPS, huge=HUGE, max_norm=None):
    """Scales before each step, skipped steps, losses, and the parameters and masters in the end, with torch.amp.GradScaler."""
    smp.init({"pipeline_parallel_degree": 1})
    model = make_model().to(dtype)
    smp.shutdown()
    masters = [nn.Parameter(p.detach().float()) for p in model.parameters()]
    optimizer = optimizer_of(masters)
    scaler = torch.amp.GradScaler(
        "cpu", SCALER["init_scale"], SCALER["scale_factor"], 1 / SCALER["scale_factor"], SCALER["scale_window"]
    )
    scales, skipped, losses = [], [], []
    for step in range(steps):
        scales.append(scaler.get_scale())
        model.zero_grad()
        x, targets = batch(step)
        losses.append([])
        for part, gain, target in zip(x.chunk(MB), gain_at(step, huge).chunk(MB), targets.chunk(MB), strict=True):
            output = model(part.to(dtype), gain.to(dtype)).float()
            loss = nn.functional.cross_entropy(output, target)
            (scaler.scale(loss) / MB).backward()
            losses[-1].append(loss.detach())
        for parameter, master in zip(model.parameters(), masters, strict=True):
            master.grad = parameter.grad.float()
        before = [master.detach().clone() for master in masters]
        scaler.unscale_(optimizer)
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(masters, max_norm)
        scaler.step(optimizer)
        scaler.update()
        skipped.append(all(map(torch.equal, before, masters)))
        with torch.no_grad():
            for parameter, master in zip(model.parameters(), masters, strict=True):
                parameter.copy_(master)
    names = [name for name, _ in model.named_parameters()]
    return scales, skipped, losses, model.state_dict(), dict(zip(names, masters, strict=True))


def follow_overflows(rank, folder, topology, form):
    options = {"dynamic_loss_args": SCALER} if form == "dict" else SCALER
    job = Job(topology, {"fp16": True}, static_loss_scale=None, dynamic_loss_scale=True, **options)
    scales, skipped, losses = [], [], []
    for step in range(STEPS):
        scales.append(job.optimizer.loss_scale)
        loss, norm = job.step(step, HUGE, max_norm=1e9)
        losses.append(loss)
        skipped.append(job.optimizer.overflow)
        assert (norm == -1) == job.optimizer.overflow
    found = whole(job)
    smp.shutdown()
    return scales, skipped, losses, *found


@pytest.mark.parametrize(("topology", "form"), [((1, 1, 1), "dict"), ((2, 1, 1), "names")])
def test_scale_skipped_steps_and_weights_are_those_of_grad_scaler(tmp_path, topology, form):
    scales, skipped, losses, parameters, masters = with_torch()
    assert [sum(skipped[:5]) > 0, *(skipped[step] for step in HUGE)] == [True] * 4  # the scale is too high at first
    assert not all(skipped[:5])
    assert not any(skipped[step] for step in (6, 7, 8))
    assert len(set(scales)) > 4
    for found in run_workers(follow_overflows, topology[0], tmp_path, topology, form):
        assert found[0] == scales
        assert found[1] == skipped
        for own, expected in zip(found[2], losses, strict=True):
            assert torch.equal(own, torch.stack(expected).mean()) or not torch.isfinite(own)
        assert differences(found[3], parameters) == []
        assert all(torch.equal(found[4][f"{name}::master"], master) for name, master in masters.items())


def reference_norms(replicas, steps, max_norm):
    """Norms of the gradients averaged over replicas, in plain fp32 PyTorch, clipped in every step."""
    smp.init({"pipeline_parallel_degree": 1})
    model = make_model(distributed=True)
    smp.shutdown()
    optimizer = optimizer_of(model.parameters())
    norms = []
    for step in range(steps):
        optimizer.zero_grad()
        for replica in range(replicas):
            x, targets = batch(step, replica)
            loss = nn.functional.cross_entropy(model(x, gain_at(step)), targets)
            (loss / replicas).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)))
        optimizer.step()
    return norms


def clip(rank, folder, topology, configs, max_norm):
    found = []
    for config in configs:
        job = Job(topology, config, distributed=True)
        norms = []
        for step in range(3):
            job.forward_backward(step)
            norms.append(float(job.optimizer.clip_master_grads(max_norm)))
            again = float(job.optimizer.clip_master_grads(max_norm))
            assert again == pytest.approx(min(max_norm, norms[-1]), rel=1e-3)
            job.optimizer.step()
        found.append(norms)
        smp.shutdown()
    return found


@pytest.mark.long
@pytest.mark.parametrize(
    "topology",
    [
        (1, 2, 1),
        (2, 1, 1),
        pytest.param((2, 1, 2), marks=pytest.mark.slow),
        pytest.param((2, 2, 1), marks=pytest.mark.slow),
    ],
)
def test_the_norm_of_the_gradients_is_that_of_one_process(tmp_path, topology):
    pp, tp, rdp = topology
    expected = reference_norms(tp * rdp, 3, 0.5)
    assert min(expected) > 0.6  # so that clipping does something
    configs = [{}, {"fp16": True}, {"bf16": True}]
    configs += [{**config, "shard_optimizer_state": True} for config in configs] if tp * rdp > 1 else []
    for found in run_workers(clip, pp * tp * rdp, tmp_path, topology, configs, 0.5):
        for config, norms in zip(configs, found, strict=True):
            rel = (
                1e-5 if not config or list(config) == ["shard_optimizer_state"] else 0.01 if "fp16" in config else 0.03
            )
            assert norms == pytest.approx(expected, rel=rel), config


def curve(rank, folder, topology):
    """Losses of 100 steps of a small GPT-2 on a language with structure, in each precision."""
    found = {}
    # The scale fits from the start: a step that is skipped shifts a curve as steep as this one by more than any rounding.
    dynamic = {"static_loss_scale": None, "dynamic_loss_scale": True, "init_scale": 2.0**13}
    for name, config, options in (("fp32", {}, {}), ("fp16", {"fp16": True}, dynamic), ("bf16", {"bf16": True}, {})):
        pp, tp, rdp = topology
        smp.init(
            {
                "pipeline_parallel_degree": pp,
                "tensor_parallel_degree": tp,
                "ddp": tp * rdp > 1,
                "microbatches": MB,
                **config,
            }
        )
        model = smp.DistributedModel(make_gpt2()[0])
        inner = torch.optim.AdamW(model.parameters(), lr=3e-3)
        optimizer = smp.DistributedOptimizer(inner, **options)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer.optimizer, 0.1, 1.0, 20)
        generator = torch.Generator().manual_seed(3)
        losses, skipped = [], 0
        for _ in range(100):
            steps = torch.randint(0, 3, (8, 12), generator=generator).cumsum(1)
            optimizer.zero_grad()
            losses.append(float(language_step(model, 3 + steps % 17).reduce_mean()))
            optimizer.clip_master_grads(1.0)
            optimizer.step()
            skipped += optimizer.overflow
            if not optimizer.overflow:
                scheduler.step()
        found[name] = losses, skipped
        smp.shutdown()
    return found


@smp.step
def language_step(model, ids):
    loss = model(input_ids=ids, labels=ids).loss
    model.backward(loss)
    return loss


@pytest.mark.slow
@pytest.mark.parametrize("topology", [(2, 1, 1), (1, 2, 1)])
def test_curves_of_100_steps_are_within_2_percent_of_fp32(tmp_path, topology):
    found = run_workers(curve, topology[0] * topology[1], tmp_path, topology)[0]
    expected, _ = found["fp32"]
    assert expected[-1] < 0.6 * expected[0]
    for name in ("fp16", "bf16"):
        losses, skipped = found[name]
        worst = max(abs(own / other - 1) for own, other in zip(losses, expected, strict=True))
        print(
            f"{name} on {topology}: last loss {losses[-1]:.4f}, fp32 {expected[-1]:.4f}; furthest {worst:.2%}, {skipped} steps skipped"
        )
        assert worst <= 0.02
        assert losses != expected


def policy(rank, folder):
    """A loss that is not finite is an overflow as long as a smaller scale might help; then the policy counts."""
    options = {"static_loss_scale": None, "dynamic_loss_scale": True, "init_scale": 4.0}
    job = Job((2, 1, 1), {"fp16": True}, **options)
    for scale in (4.0, 2.0):
        assert job.optimizer.loss_scale == scale
        job.step(0, huge=(0,))
        assert job.optimizer.overflow
    with pytest.raises(NonFiniteLossError):
        job.step(0, huge=(0,))
    assert job.optimizer.loss_scale == 1.0
    job.step(1)
    assert not job.optimizer.overflow
    with pytest.raises(UsageError, match="closures are for fp32 training"):
        job.optimizer.step(lambda: 7)
    smp.shutdown()

    job = Job((2, 1, 1), {"fp16": True}, static_loss_scale=8.0)
    job.forward_backward(0)
    if smp.pp_rank() == 1:
        next(job.model.local_parameters()).grad.view(-1)[0] = torch.nan
    before = [parameter.detach().clone() for parameter in job.model.local_parameters()]
    job.optimizer.step()
    assert job.optimizer.overflow
    assert job.optimizer.loss_scale == 8.0
    assert all(map(torch.equal, before, job.model.local_parameters()))
    with pytest.raises(NonFiniteLossError):
        job.step(0, huge=(0,))
    follow_writes(job)
    smp.shutdown()


def follow_writes(job):
    """Masters follow what is written into parameters, and keep their bits elsewhere."""
    job.step(2)
    model, masters = job.model, {}
    for name, items in job.optimizer.local_state_dict()["state"].items():
        masters[name] = items["master"].clone()
    full = {key: value.clone() for key, value in model.state_dict().items()}
    model.load_state_dict(full)  # what is there already
    after = job.optimizer.local_state_dict()["state"]
    assert all(torch.equal(after[name]["master"], masters[name]) for name in masters)
    assert any(not torch.equal(masters[name].half().float(), masters[name]) for name in masters)
    full["last.bias"] = full["last.bias"].float() + 1 / 3  # fp32, as a full checkpoint of others may be
    model.load_state_dict(full)
    after = job.optimizer.local_state_dict()["state"]
    for name, master in masters.items():
        expected = full[name].half().float() if name == "last.bias" else master
        assert torch.equal(after[name]["master"], expected)
    job.step(3)
    for name, parameter in model.local_named_parameters():
        assert torch.equal(job.optimizer.local_state_dict()["state"][name]["master"].half(), parameter)


@pytest.mark.long
def test_overflows_nan_policy_and_writes_from_outside(tmp_path):
    assert run_workers(policy, 2, tmp_path) == [None] * 2


def join(rank, folder, config):
    """Replicas with 2 and 4 batches, the later ones with an overflow: in the end all have the same masters, state and loss scale."""
    options = {"static_loss_scale": None, "dynamic_loss_scale": True, "init_scale": 16.0, "scale_window": 2}
    job = Job((1, 1, 2), config, **(options if "fp16" in config else {}))
    with job.model.join():
        for step in range(2 + 2 * smp.rdp_rank()):
            job.step(step, huge=(3,) if "fp16" in config else (), max_norm=1.0)
    found = whole(job), job.optimizer.loss_scale
    job.step(9)
    smp.shutdown()
    return found, whole_after(job)


def whole_after(job):
    return {name: parameter.detach().clone() for name, parameter in job.model.get_module().named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize("config", [{"fp16": True}, {"bf16": True}, {"bf16": True, "_fp32_grad_accumulation": True}])
def test_join_leaves_all_replicas_alike(tmp_path, config):
    (first, after_first), (second, after_second) = run_workers(join, 2, tmp_path, config)
    assert [differences(a, b) for a, b in zip(first[0], second[0], strict=True)] == [[], []]
    assert first[1] == second[1] == (16.0 if "fp16" in config else 1.0)  # up after two steps, down in the fourth
    assert differences(after_first, after_second) == []
