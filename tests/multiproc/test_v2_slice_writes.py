"""What scripts write into slices of a transformed model: what one process writes, or an error, whatever wraps the model."""

import contextlib
from types import SimpleNamespace

import pytest
import test_expert_writes
import test_slice_writes
import torch
from checkpoint_harness import run_ranks, values_of
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from transformed import EXPERTS, SHARED, WITH_TENSOR, batch, build, loss_of_model, wrapped

import smpc.v2 as tsm
from smpc.errors import UsageError
from smpc.v2.transforming.transformed_slices import slices_of

LEFT_OUT = ("grad", "total(", 'f"', "for expert")
MATRIX = "gpt_neox", "gpt_neox.layers.1.mlp.dense_h_to_4h.weight", test_slice_writes
STACKED = "mixtral", "model.layers.1.mlp.experts.gate_up_proj", test_expert_writes
BY_TWO = """
p.data.mul_(0.9)
p.view(-1).mul_(0.5)
p[..., 3].sub_(p[..., 4])
p[p.abs() < 0.05] = 0
p.copy_(torch.nn.functional.normalize(p, dim=-1))
p.normal_()
""".strip().splitlines()
WRONG_BY_TWO = {
    "": "p.data[0] = 0\np.data[:, 2] = 0\np.div_(p.norm())\np.div_(p.flatten(1).norm(dim=1)[:, None, None])"
}
TWICE = (*STACKED[:2], SimpleNamespace(RIGHT=BY_TWO, REFUSED=WRONG_BY_TWO))
ALONE = {"tensor_parallel_degree": 2}


def lines_of(kind):
    wrong = "\n".join(kind.REFUSED.values()).splitlines()
    return [
        [line.strip() for line in lines if not any(each in line for each in LEFT_OUT)] for lines in (kind.RIGHT, wrong)
    ]


def run(line, parameter):
    torch.manual_seed(5)
    indices = torch.tensor([1, 4, 5])
    with torch.no_grad():
        exec(line, {"p": parameter, "torch": torch, "rows": indices, "cols": indices})


def writes(rank, channel, degrees, family, name, lines, fsdp):
    """Before the first step, and after it."""
    tsm.init(degrees)
    model = tsm.transform(build(family))
    part, (right, wrong) = slices_of(model)[name], lines
    model = wrapped(model, fsdp, use_orig_params=True) if fsdp else model
    for _ in range(2):
        with FullyShardedDataParallel.summon_full_params(model) if fsdp == 1 else contextlib.nullcontext():
            named = {key.replace("_fsdp_wrapped_module.", ""): each for key, each in model.named_parameters()}
            for line in filter(str.strip, wrong):
                with contextlib.suppress(UsageError):
                    run(line, named[name])
                    raise AssertionError(f"{line} is no error")
            for line in right:
                run(line, named[name])
            own = named[name].detach()
            whole = part.whole((own.full_tensor() if isinstance(own, DTensor) else own).contiguous())
        loss_of_model(model, batch(0, 0)).backward()
    return whole.numpy()


CASES = {
    "alone": (2, ALONE, MATRIX, 0),
    "fsdp1": (4, SHARED, MATRIX, 1),
    "experts": (2, EXPERTS, STACKED, 0),
    "experts in fsdp1": (4, EXPERTS, STACKED, 1),
    "experts in fsdp2": (4, EXPERTS, STACKED, 2),
    "experts and tensors": (4, WITH_TENSOR, TWICE, 0),
    "experts and tensors in fsdp2": (4, WITH_TENSOR, TWICE, 2),
}


LONG = ("fsdp1", "experts and tensors", "experts and tensors in fsdp2")


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.long] if case in LONG else []) for case in CASES]
)
def test_writes_are_those_of_one_process_or_errors(tmp_path, case):
    """Rows were those of each rank's slice, of DTensors of slices, too."""
    ranks, degrees, (family, name, kind), fsdp = CASES[case]
    lines = lines_of(kind)
    model = build(family)
    for line in lines[0] * 2:
        run(line, model.get_parameter(name))
    for found in values_of(run_ranks(ranks, writes, tmp_path, degrees, family, name, lines, fsdp)):
        torch.testing.assert_close(torch.from_numpy(found), model.get_parameter(name).detach(), rtol=1e-4, atol=1e-6)
