"""Tensor parallelism found by the compiler, architecture by architecture: right, refused or wrong, the share of parameters, the search.

Ranks are threads. A model is right if the loss and every gradient are those of one process: within 1e-4 of the tensor's largest entry in
fp32, or else within 1e-9 in fp64. Only there can rounding be told from a fault: gradients that cancel out, such as those of a bias before
a norm, are nothing but rounding in fp32. A model that computes in fp32 even then (norms, rotary tables) rounds there: within 1e-6.
Some models magnify rounding without bounds, such as batch norms over two values: what no precision tells is "right to rounding", if no
tensor is off by more than ten times what it changes by in one process when the last bit of every weight does, that of fp32 where the model
itself computes in fp32. What is off in fp32 and gives no numbers in fp64 is "undecided".
What draws random numbers is left out: threads share one generator.
"""

from __future__ import annotations

import copy
import math
import time
import warnings
from dataclasses import dataclass, replace

import survey
import torch
from tensor_ranks import run_ranks, tensor_groups

from smpc.codegen.rewrite.opened_attention import open_attention
from smpc.codegen.rewrite.tensor_parallel.choose_layouts import choose
from smpc.compile.divided_experts import find_sharing_plan
from smpc.errors import SmpcError
from smpc.recorded_module import record_modes
from smpc.tensor_parallel import ShardedModule

MICROBATCHES = 2
TOLERANCES = {torch.float32: 1e-4, torch.float64: 1e-9}
WITH_FLOAT32 = 1e-6  # in fp64, where the model itself computes in fp32 in between
TIMES_ROUNDING, CHANGES = 10, 3  # of the last bits


@dataclass
class Outcome:
    """What became of one architecture."""

    name: str
    verdict: str  # "left out", "right", "right in fp64", "right to rounding", "refused: why", "wrong: how" or "undecided: why"
    share: float = 0.0  # of the parameters that have gradients, on one rank
    share_of_all: float = 0.0  # ... of all parameters
    search_s: float = 0.0  # of one CPU core
    proven: bool = True
    has_numbers: bool = False  # whether the sharded model ran


@dataclass
class Comparison:
    """A sharded model beside the whole one."""

    name: str  # of what differs most
    error: float
    errors: dict[str, float]  # of all
    share: float
    share_of_all: float
    search_s: float
    proven: bool
    narrow: bool  # whether something is computed in fp32


def _as(value, dtype):
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _results(model, batch, seed=3):
    torch.manual_seed(seed)
    loss = survey.loss_of(model(**copy.deepcopy(batch)))
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def largest_error(found, wanted):
    """(name, difference as a part of the largest entry) of the loss or the gradient that is furthest off."""
    return _largest(all_errors(found, wanted))


def all_errors(found, wanted):
    """By name, the difference of the loss and of every gradient as a part of the largest entry."""
    errors = {"the loss": _error(found[0], wanted[0])}
    for name in {**found[1], **wanted[1]}:
        a, b = found[1].get(name), wanted[1].get(name)
        if a is None or b is None:
            only = a if b is None else b
            errors[name] = math.inf if only.any() else 0.0
        else:
            errors[name] = _error(a, b)
    return {name: math.inf if math.isnan(error) else error for name, error in errors.items()}


def _largest(errors):
    return max(errors.items(), key=lambda item: item[1])


def is_rounding(model, batch, errors, tolerance, dtype=torch.float64):
    """Whether every tensor that is off by more than `tolerance` is so in one process, too, when the last bits of the weights change.

    `dtype`: whose last bits.
    """
    wanted, own = _results(copy.deepcopy(model), batch), dict.fromkeys(errors, 0.0)
    generator = torch.Generator().manual_seed(0)
    for _ in range(CHANGES):
        changed = copy.deepcopy(model)
        for parameter in changed.parameters():
            up = torch.rand(parameter.shape, generator=generator) < 0.5
            limits = torch.where(up, math.inf, -math.inf).to(dtype)
            parameter.data = torch.nextafter(parameter.data.to(dtype), limits).to(parameter.dtype)
        for name, error in all_errors(_results(changed, batch), wanted).items():
            own[name] = max(own[name], error)
    allowed = {name: TIMES_ROUNDING * change if math.isfinite(change) else 0.0 for name, change in own.items()}
    return all(error <= max(tolerance, allowed[name]) for name, error in errors.items())


def _error(a, b):
    if not b.numel():
        return 0.0
    scale, difference = b.abs().max().item(), (a - b).abs().max().item()
    return difference / scale if scale > 1e-9 else difference


def _shares(sharded, model, with_gradient):
    own, whole = dict(sharded.model.named_parameters()), dict(model.named_parameters())

    def share(names):
        return sum(own[name].numel() for name in names) / max(1, sum(whole[name].numel() for name in names))

    return share(with_gradient), share(whole)


def _search(trace, degree):
    begun = time.process_time()
    choice = choose(open_attention(trace), degree)
    narrow = any(node.spec is not None and node.spec.dtype == "float32" for node in trace.nodes)
    return time.process_time() - begun, choice.proven, narrow


def compare(model, batch, degree):
    """A Comparison; None for a model that draws random numbers or adds up in another order every time."""
    wanted, again = (_results(copy.deepcopy(model), batch, seed) for seed in (3, 4))
    if largest_error(again, wanted)[1] > 0:
        return None
    recordings, plan = record_modes(model, batch), find_sharing_plan(model, "auto")  # of all ranks
    searched = _search(recordings[model.training].trace, degree)
    modules = [ShardedModule(copy.deepcopy(model), group, recordings, plan) for group in tensor_groups(degree)]

    def work(rank):
        loss = survey.loss_of(modules[rank](**copy.deepcopy(batch)))  # models write into their inputs
        loss.backward()
        return loss.detach(), modules[rank].whole_gradients()

    torch.manual_seed(3)
    of_ranks = [all_errors(found, wanted) for found in run_ranks(degree, work)]
    errors = {name: max(own[name] for own in of_ranks) for name in of_ranks[0]}
    return Comparison(*_largest(errors), errors, *_shares(modules[0], model, wanted[1]), *searched)


def outcome(name, degree):
    """What becomes of one architecture on `degree` ranks."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        chosen = survey.choose(name, MICROBATCHES)
        if chosen is None:
            return Outcome(name, "left out")

        def case(dtype):
            model = survey.build(name, chosen[0]).to(dtype)
            if dtype is torch.float64:
                model.set_experts_implementation("eager")  # grouped products are for shorter types alone
            parts = survey.split(survey.inputs(model, chosen[1]), MICROBATCHES)
            return model, {key: _as(value, dtype) for key, value in parts[0].items()}

        return judged(name, case, degree)


def judged(name, case, degree):
    """The Outcome of the model and batch that `case(dtype)` gives: that in fp32 if it is right or an error, else that in fp64."""
    found = _judged_in(torch.float32, name, case, degree)
    if not found.has_numbers or found.verdict == "right":
        return found
    exact = _judged_in(torch.float64, name, case, degree)
    if exact.has_numbers:
        return replace(exact, verdict="right in fp64") if exact.verdict == "right" else exact
    return replace(found, verdict=f"undecided: {found.verdict}; in fp64 {exact.verdict}")


def _judged_in(dtype, name, case, degree):
    model, batch = case(dtype)
    try:
        result = compare(model, batch, degree)
    except SmpcError as error:
        return Outcome(name, f"refused: {type(error).__name__}: {str(error)[:300]}")
    except Exception as error:  # whatever it is, it is no refusal
        return Outcome(name, f"wrong: {type(error).__name__}: {str(error)[:300]}")
    if result is None:
        return Outcome(name, "left out")
    tolerance = WITH_FLOAT32 if dtype is torch.float64 and result.narrow else TOLERANCES[dtype]
    if result.error <= tolerance:
        verdict = "right"
    elif dtype is torch.float64 and is_rounding(
        model, batch, result.errors, tolerance, torch.float32 if result.narrow else dtype
    ):
        verdict = "right to rounding"
    else:
        verdict = f"wrong: {result.name} by {result.error:.1e} in {dtype}"
    return Outcome(name, verdict, result.share, result.share_of_all, result.search_s, result.proven, has_numbers=True)
