"""Two models in one session: a teacher and a student that both train, each with its optimizer, as in one process."""

import pytest
import torch
import zoo
from executor_harness import run_workers
from torch import nn
from torch.nn import functional as F
from v1_harness import MB, STEPS, batches, feed

import smpc.v1 as smp
from smpc.errors import ConfigUnsupportedError, StepError, UsageError

CONFIG = {"pipeline_parallel_degree": 2, "microbatches": MB}


def make_models():
    teacher, (_, kwargs) = zoo.build("gpt2")
    student, _ = zoo.build("gpt2")
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.mul_(0.9)
    return (
        teacher.double(),
        student.double(),
        kwargs,
    )  # their distance cancels: in fp32 its last digits are the processor's


def make_optimizers(teacher, student):
    return torch.optim.SGD(teacher.parameters(), lr=0.1), torch.optim.SGD(student.parameters(), lr=0.1, momentum=0.9)


def distance(logits, target):
    return F.kl_div(logits.log_softmax(-1), target.log_softmax(-1), log_target=True, reduction="batchmean")


def in_one_process():
    """Losses, norms, and the weights of both models."""
    teacher, student, kwargs = make_models()
    optimizers = make_optimizers(teacher, student)
    found = []
    for ids in batches(kwargs):
        target = []
        for optimizer in optimizers:
            optimizer.zero_grad()
        losses = []
        for part in ids.chunk(MB):
            output = teacher(input_ids=part, labels=part)
            (output.loss / MB).backward()
            target.append(output.logits.detach())
        for part, logits in zip(ids.chunk(MB), target, strict=True):
            loss = distance(student(input_ids=part).logits, logits)
            (loss / MB).backward()
            losses.append(loss.detach())
        norms = [nn.utils.clip_grad_norm_(model.parameters(), 0.5) for model in (teacher, student)]
        for optimizer in optimizers:
            optimizer.step()
        found.append((losses, norms))
    return found, teacher.state_dict(), student.state_dict()


@smp.step
def teach(model, ids):
    output = model(input_ids=ids, labels=ids)
    model.backward(output.loss)
    return output.logits


@smp.step
def learn(student, ids, target):
    loss = distance(student(input_ids=ids).logits, target)
    student.backward(loss)
    return loss


@smp.step
def compare(student, teacher, ids):
    return distance(student(input_ids=ids).logits, teacher(input_ids=ids).logits)


def check_refusals(teacher, student, ids, folder):
    with pytest.raises(StepError, match="there are 2 models, so expected one of them among its arguments, found 2"):
        compare(student, teacher, ids)
    with pytest.raises(
        UsageError, match="clip_grad_norm_: expected parameters of one DistributedModel, found parameters of 2"
    ):
        nn.utils.clip_grad_norm_([*teacher.parameters(), *student.parameters()], 1.0)
    with pytest.raises(UsageError, match="DistributedOptimizer: expected parameters of one"):
        smp.DistributedOptimizer(torch.optim.SGD([*teacher.parameters(), *student.parameters()], lr=0.1))
    with pytest.raises(UsageError, match="shares parameters with another DistributedModel"):
        smp.DistributedModel(teacher.get_module())
    with pytest.raises(UsageError, match="there are 2 DistributedModels, and it resumes one"):
        smp.resume_from_checkpoint(folder)
    other = nn.Linear(2, 2)
    smp.DistributedOptimizer(torch.optim.SGD(other.parameters(), lr=0.1))
    with pytest.raises(UsageError, match=r"construct each smp.DistributedModel before its smp.DistributedOptimizer"):
        smp.DistributedModel(other)


def distil(rank, folder, config):
    smp.init({**CONFIG, **config})
    modules = make_models()
    teacher, student = (smp.DistributedModel(module) for module in modules[:2])
    optimizers = [smp.DistributedOptimizer(optimizer) for optimizer in make_optimizers(teacher, student)]
    found = []
    for ids in batches(modules[2]):
        for optimizer in optimizers:
            optimizer.zero_grad()
        target = teach(teacher, feed(ids)).concat()
        losses = learn(student, feed(ids), feed(target)).outputs
        norms = [nn.utils.clip_grad_norm_(model.parameters(), 0.5) for model in (teacher, student)]
        for optimizer in optimizers:
            optimizer.step()
        found.append((losses, norms))
    states = teacher.state_dict(), student.state_dict()
    moments = optimizers[1].state_dict()["state"]
    assert len(moments) == len(list(student.parameters()))
    assert not optimizers[0].state_dict()["state"]
    check_refusals(teacher, student, modules[2]["input_ids"], folder)
    return found, *states


@pytest.mark.long
def test_a_teacher_and_a_student_train_side_by_side(tmp_path):
    expected, *weights = in_one_process()
    for found, *states in run_workers(distil, 2, tmp_path, {}):
        for step in range(STEPS):
            torch.testing.assert_close(found[step], expected[step], rtol=1e-10, atol=0)
        for state, weight in zip(states, weights, strict=True):
            for name, value in weight.items():
                torch.testing.assert_close(state[name], value, rtol=1e-10, atol=1e-12)


def refuse(rank, folder, config, what):
    smp.init({"microbatches": 2, "ddp": True, **config})
    smp.DistributedModel(nn.Linear(2, 2))
    with pytest.raises(ConfigUnsupportedError, match=f"with several there can be no:\n{what}"):
        smp.DistributedModel(nn.Linear(2, 2))


CASES = [({"fp16": True}, "a loss scale"), ({"shard_optimizer_state": True}, "sharded parameters or optimizer state")]


@pytest.mark.parametrize(("config", "what"), CASES)
def test_what_belongs_to_one_model_is_refused_for_several(tmp_path, config, what):
    assert run_workers(refuse, 2, tmp_path, config, what) == [None, None]
