"""`smpc compile --verify` where ranks share operations, sequences or experts: a step of a real job on this machine, beside plain PyTorch.

    verified = verify_ranks(job, model, sample_inputs, is_drawn=False)

All ranks of the degrees are processes on the CPU that train the target for one step as a script does
(`smpc.cli.verify.rank`); the same batch goes through the model in one process. Compared are the loss and every gradient, put together
from all ranks, and buffers where there is one replica.

Sums over ranks are added in another order than in one process. A tensor within 1e-5 of its largest value (float32) is right. One that is
farther off is held against the same model in float64: it may differ by `_ROUNDING` times what plain PyTorch's own result does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from smpc.cli.compile_options import FLAGS, is_setting
from smpc.cli.verify import available_memory, drawn
from smpc.cli.verify.rank import verified_state_of
from smpc.compile.options import PipelineOptions
from smpc.config import KEYS, Config
from smpc.errors import ConfigError, VerificationError
from smpc.rank_models import copied_model
from smpc.sample_inputs import Inputs, as_inputs, microbatch
from smpc.tracer import flatten
from smpc.v1.session.precision import half_dtype
from smpc.verification.bounds import ARITHMETIC, difference
from smpc.verification.paired_runs import objective
from smpc.verification.random_state import RandomState

_CPU = torch.device("cpu")
_ROUNDING = 16.0
_PROCESS = 700_000_000  # bytes that a rank takes before it has a model
_COPIES = 4  # parameters, gradients, what is gathered, and what is sent
_SECONDS = 1800
_NOT_HERE = ("fp16", "bf16", "fp16_params", "_fp32_grad_accumulation", "verify", "partition_file", "load_partition")
_RUN = "import sys; from smpc.cli import main; sys.exit(main())"
_LINES = 12
_MOST_DIFFERENCES = 5


@dataclass(frozen=True)
class RanksJob:
    """What the ranks run: a target of `smpc compile`, its `--input` options and a configuration of `smp.init`.

    `dtype`: what the model is cast to, "" for nothing.
    """

    target: str
    inputs: tuple[str, ...]
    config: Mapping[str, Any]
    num_ranks: int
    dtype: str
    has_replicas: bool

    @classmethod
    def of(cls, target: str, inputs: Sequence[str], settings: Config, options: PipelineOptions) -> RanksJob:
        """What trains by the plan of these settings and options, in the dtype that the model is given: no loss is scaled."""
        defaults = {field.name: field.default for field in dataclasses.fields(settings)}
        apart = {name: getattr(options, name) for name in FLAGS if name in KEYS and not is_setting(name)}
        values = {name: getattr(settings, name) for name in KEYS} | apart
        values["tensor_parallel_outputs"] = ",".join(options.tensor_parallel_outputs or ())
        config = {name: value for name, value in values.items() if value != defaults[name] and name not in _NOT_HERE}
        num_ranks = options.pipeline_parallel_degree * options.data_parallel_degree * shared_degree(options)
        config |= {"microbatches": settings.microbatches, "ddp": num_ranks > options.pipeline_parallel_degree}
        if options.tensor_parallel_degree > 1:
            config["prescaled_batch"] = True
        else:
            config.pop("tensor_parallel_plan", None)
        if options.sharded_data_parallel_degree > 1:
            config["sdp_gradient_clipping"] = 0.0  # gradients are compared as they are
        half = half_dtype(settings)
        return cls(
            target,
            tuple(inputs),
            config,
            num_ranks,
            str(half or "").removeprefix("torch."),
            options.data_parallel_degree > 1,
        )


def shared_degree(options: PipelineOptions) -> int:
    """Ranks that share the operations and sequences of a stage."""
    return options.tensor_parallel_degree * options.context_parallel_degree


@dataclass(frozen=True)
class VerifiedRanks:
    """How many tensors were compared, and how many only float64 could tell."""

    num_compared: int
    num_ranks: int
    num_rounded: int

    def __str__(self) -> str:
        text = (
            f"the loss and {self.num_compared - 1} gradients and buffers of one step on {self.num_ranks} ranks are those of plain PyTorch, "
            f"within {ARITHMETIC[torch.float32]:g} of the largest value in float32"
        )
        return f"{text}; {self.num_rounded} within rounding, as float64 shows" if self.num_rounded else text


def verify_ranks(job: RanksJob, model: nn.Module, sample_inputs: Any, *, is_drawn: bool) -> VerifiedRanks:
    """Compare. `sample_inputs`: the batch of one replica; `is_drawn`: whether its values are drawn at random.

    Raises VerificationError if something differs or a rank fails, ConfigError for a model that draws random numbers, which each rank
    has its own of, and where memory lacks.
    """
    inputs = as_inputs(sample_inputs)
    inputs = drawn(model, inputs) if is_drawn else inputs
    _check_memory(job, model)
    expected = _of_one_process(model, inputs, job.config["microbatches"])
    found = _results_of_verified_ranks(job, model, inputs)
    kept = model.state_dict()
    apart = {
        name for name, _ in model.named_buffers() if job.has_replicas or name not in kept
    }  # replicas may have each its own
    names = [name for name in expected if name not in apart]
    if missing := [name for name in names if name not in found]:
        raise VerificationError(
            f"expected all parameters in the state dict of {job.num_ranks} ranks, found no {missing[0]}"
        )
    far = {name: text for name in names if (text := difference(expected[name], found[name], ARITHMETIC))}
    wrong = _beyond_rounding(far, expected, found, (model, inputs, job.config["microbatches"])) if far else {}
    if not wrong:
        return VerifiedRanks(len(names), job.num_ranks, len(far))
    shown = [f"{name}: {text}" for name, text in wrong.items()]
    lines = [
        f"expected {job.num_ranks} ranks to do what plain PyTorch does, found that {len(wrong)} of {len(names)} tensors differ",
        *shown[:_MOST_DIFFERENCES],
        *([f"and {len(shown) - _MOST_DIFFERENCES} more"] if len(shown) > _MOST_DIFFERENCES else []),
        "what to do: report the model, for this is a defect of smpc; other degrees may be right: verify them",
    ]
    raise VerificationError("\n".join(lines))


def _check_memory(job: RanksJob, model: nn.Module) -> None:
    """Raise ConfigError for ranks that this machine cannot hold."""
    whole = sum(p.numel() * p.element_size() for p in model.parameters())
    needed, free = job.num_ranks * (_PROCESS + _COPIES * whole), available_memory()
    if free is not None and needed > free:
        raise ConfigError(
            f"--verify: {job.num_ranks} ranks take about {needed / 1e9:.1f} GB, and this machine has {free / 1e9:.1f} GB left; verify "
            "lower degrees, or a configuration of fewer layers, which has the same modules"
        )


def _results_of_verified_ranks(job: RanksJob, model: nn.Module, inputs: Inputs) -> dict[str, Tensor]:
    """The loss, gradients and buffers of the ranks' step."""
    before = verified_state_of(model)
    with tempfile.TemporaryDirectory(prefix="smpc_verify_") as name:
        folder = Path(name)
        described = {"target": job.target, "inputs": list(job.inputs), "config": dict(job.config), "dtype": job.dtype}
        (folder / "job.json").write_text(json.dumps(described), encoding="utf-8")
        tensors = [leaf for leaf in flatten(inputs)[0] if isinstance(leaf, Tensor)]
        torch.save({"state": before, "inputs": tensors}, folder / "values.pt")
        with _ended_by_signal():
            _run_job(job.num_ranks, folder)
        found = torch.load(folder / "found.pt", weights_only=True)
    after = found["state"]
    moved = {name for name, p in model.named_parameters() if p.requires_grad}
    values = {name: -after[name] if name in moved else after[name] for name in before if name in after}
    return {"loss": found["loss"], **values}


@contextlib.contextmanager
def _ended_by_signal() -> Iterator[None]:
    """In this context SIGTERM ends the ranks and removes their folder, as Ctrl-C does."""

    def end(number: int, _: object) -> NoReturn:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():  # only that one may set what a signal does
        yield
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _run_job(num_ranks: int, folder: Path) -> None:
    """The job. Raises VerificationError with the last of what its ranks have said."""
    command = [sys.executable, "-c", _RUN, "run", "-n", str(num_ranks), "-m", "smpc.cli.verify.rank", str(folder)]
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONSAFEPATH": "1",  # modules come from where the command has them from
    }
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, errors="replace", timeout=_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise VerificationError(
            f"expected {num_ranks} ranks to train a step within {_SECONDS} s, found them still at it"
        ) from None
    if done.returncode:
        said = "\n".join(done.stderr.strip().splitlines()[-_LINES:])
        raise VerificationError(f"the plan was made, and its {num_ranks} ranks fail in a first step:\n{said}")


def _of_one_process(model: nn.Module, inputs: Inputs, microbatches: int) -> dict[str, Tensor]:
    """The loss, gradients and buffers of the same step in plain PyTorch. Raises ConfigError if it draws random numbers."""
    copied, before, losses = copied_model(model, {}), RandomState.now(_CPU), []
    for number in range(microbatches):
        args, kwargs = microbatch(inputs, microbatches, number)
        loss = objective(copied(*args, **kwargs)) / microbatches
        torch.autograd.backward([loss])
        losses.append(loss.detach())
    if RandomState.now(_CPU).parts() != before.parts():
        raise ConfigError(
            "--verify: expected a model that draws no random numbers, because each rank draws its own, found that it does; let the factory "
            "return it with dropout 0, or verify without -t, -c and -e"
        )
    trained = {name: p for name, p in copied.named_parameters() if p.requires_grad}
    gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in trained.items()}
    return {"loss": torch.stack(losses).sum(), **gradients, **dict(copied.named_buffers())}


def _beyond_rounding(
    far: Mapping[str, str],
    expected: Mapping[str, Tensor],
    found: Mapping[str, Tensor],
    run: tuple[nn.Module, Inputs, int],
) -> dict[str, str]:
    """Of the tensors that differ, those that float64 does not explain, with how they differ."""
    model, inputs, microbatches = run
    try:
        exact = _of_one_process(copied_model(model, {}).double(), _doubled_inputs_to_verify(inputs), microbatches)
    except Exception as error:
        return {name: f"{text} (float64 cannot tell: it raises {type(error).__name__})" for name, text in far.items()}
    wrong = {}
    for name, text in far.items():
        own, other = (float((value[name].double() - exact[name]).abs().max()) for value in (expected, found))
        if not other <= _ROUNDING * own:
            wrong[name] = text
    return wrong


def _doubled_inputs_to_verify(inputs: Inputs) -> Inputs:
    leaves, structure = flatten(inputs)
    wide = [leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf for leaf in leaves]
    args, kwargs = structure.unflatten(wide)
    return args, kwargs
