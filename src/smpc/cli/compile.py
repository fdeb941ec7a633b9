"""`smpc compile`: plan a model, print the report, write the programs."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smpc.cli import compile_options as opt
from smpc.cli.inputs import InputSpec, parse_inputs
from smpc.cli.progress import Show, progress
from smpc.cli.targets import load_target
from smpc.config import Config
from smpc.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

    from smpc.auto import Search
    from smpc.compile import Compilation

_OURS = re.compile(r"rank_\d+\.py|search\.json|tensor_parallel\.txt|smp_config\.json")


def compile_command(
    target: opt.Target,
    pipeline_parallel_degree: opt.PipelineParallelDegree = None,
    tensor_parallel_degree: opt.TensorParallelDegree = None,
    tensor_parallel_plan: opt.TensorParallelPlan = None,
    tensor_parallel_outputs: opt.TensorParallelOutputs = None,
    microbatches: opt.Microbatches = None,
    pipeline: opt.Pipeline = None,
    schedule: opt.Schedule = None,
    virtual_pipeline_degree: opt.VirtualPipelineDegree = None,
    memory_weight: opt.MemoryWeight = None,
    active_microbatches: opt.ActiveMicrobatches = None,
    device: opt.Device = None,
    optimizer: opt.Optimizer = None,
    trace_execution_times: opt.TraceExecutionTimes = False,
    trace_memory_usage: opt.TraceMemoryUsage = False,
    skip_tracing: opt.SkipTracing = False,
    memory_limit: opt.MemoryLimit = None,
    data_parallel_degree: opt.DataParallelDegree = 1,
    shard_optimizer_state: opt.ShardOptimizerState = False,
    fully_shard: opt.FullyShard = False,
    recompute: opt.Recompute = None,
    offload_activations: opt.OffloadActivations = False,
    activation_loading_horizon: opt.ActivationLoadingHorizon = None,
    kernels: opt.Kernels = None,
    auto: opt.Auto = False,
    world_size: opt.WorldSize = None,
    config: opt.Config = None,
    inputs: opt.Inputs = None,
    json_only: opt.JsonOnly = False,
    out: opt.Out = None,
    plot: opt.Plot = None,
) -> None:
    """Split a model into pipeline stages and report what each will cost.

    Nothing is trained, and no process group is needed. The same input gives the same plan, byte for byte.
    """
    flags = {
        "pipeline_parallel_degree": pipeline_parallel_degree,
        "microbatches": microbatches,
        "pipeline": pipeline,
        "schedule": schedule,
        "virtual_pipeline_degree": virtual_pipeline_degree,
        "memory_weight": memory_weight,
        "active_microbatches": active_microbatches,
        "skip_tracing": skip_tracing or None,
        "offload_activations": offload_activations or None,
        "activation_loading_horizon": activation_loading_horizon,
        "kernels": kernels,
        "fully_shard": fully_shard or None,
    }
    planner: dict[str, Any] = {
        "device": device or "h100",
        "optimizer": optimizer or "adam",
        "memory_limit": memory_limit,
        "shard_optimizer_state": shard_optimizer_state,
    }
    measured: dict[str, Any] = {
        "tensor_parallel_degree": tensor_parallel_degree,
        "tensor_parallel_plan": tensor_parallel_plan,
        "tensor_parallel_outputs": tensor_parallel_outputs or None,
        "data_parallel_degree": data_parallel_degree,
        "trace_execution_times": trace_execution_times,
        "trace_memory_usage": trace_memory_usage,
        "recompute": tuple(recompute or ()),
    }
    if auto or world_size is not None:
        if len(device or []) > 1:
            raise ConfigError("--auto: --device is given more than once, but the search is for devices of one kind")
        planner["device"] = device[0] if device else "h100"
        _check_auto(auto, world_size, {**flags, "config": config, **measured})
        settings = None
    else:
        settings = _settings(config, {**flags, "ddp": True if fully_shard else None})
        measured |= _tensor_parallelism(settings, {k: v for k, v in measured.items() if v is not None})
        planner["shard_optimizer_state"] |= settings.shard_optimizer_state
        planner["optimizer"] = optimizer or _planned_optimizer(settings)
    specs = parse_inputs(inputs or [])
    folder = None if out is None else _writable_folder(out)
    if plot is not None:
        _check_plot(plot)
    if settings is None:
        found, compilation = _search(target, specs, {**planner, "world_size": world_size})
    else:
        found, compilation = None, _compile(target, specs, settings, {**planner, **measured})
    if plot is not None:
        _write_plot(compilation, plot)
    if folder is not None:
        _write(compilation, folder, found)
    _print(compilation, found, json_only=json_only)


def _print(compilation: Compilation, found: Search | None, *, json_only: bool) -> None:
    """The plan as JSON, or the reports of the search, the plan and the sharding."""
    if json_only:
        sys.stdout.write(compilation.plan.to_json())
        return
    from smpc.report import print_report

    if found is not None:
        from smpc.report.search import print_search

        print_search(found)
        print()
    print_report(compilation.plan, compilation.timeline())
    if compilation.sharded is not None:
        from smpc.codegen.rewrite.tensor_parallel import describe

        print(f"\n{describe(compilation.sharded)}")


@contextlib.contextmanager
def _loaded(target: str, specs: tuple[InputSpec, ...]) -> Iterator[tuple[nn.Module, Any, Show]]:
    """The target's model and sample inputs, and what shows the phase of what is done with them in the block.

    stdout is for the result alone: whatever the user's code prints goes to stderr. torch logs the traceback of an operation that cannot
    run on these shapes; that is silenced, for the error raised says it in a line.
    """
    import torch._subclasses.fake_tensor  # noqa: F401  (torch sets the levels of its loggers when it is imported)

    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with progress() as show, contextlib.redirect_stdout(sys.stderr):
            show("Making the model")
            yield *load_target(target, specs), show
    finally:
        logger.setLevel(before)


def _compile(target: str, specs: tuple[InputSpec, ...], settings: Config, planner: dict[str, Any]) -> Compilation:
    """The target's compilation, with the phases shown; modules are marked by smp.partition where auto_partition is off.

    In half precision the model is cast as `smp.DistributedModel` casts it.
    """
    from smpc.compile import compile_model, plan_warnings
    from smpc.v1.models.partition import manual_partition
    from smpc.v1.optimization.precision import cast_inputs, cast_module, half_dtype

    with _loaded(target, specs) as (model, sample_inputs, show):
        half = half_dtype(settings)
        cast_module(model, half)
        sample_inputs = cast_inputs(sample_inputs, half)
        compilation = compile_model(
            model,
            sample_inputs,
            pipeline_parallel_degree=settings.pipeline_parallel_degree,
            microbatches=settings.microbatches,
            pipeline=settings.pipeline,
            schedule=settings.schedule or None,
            virtual_pipeline_degree=settings.virtual_pipeline_degree or None,
            memory_weight=settings.memory_weight,
            active_microbatches=settings.active_microbatches,
            skip_tracing=settings.skip_tracing,
            offload_activations=settings.offload_activations,
            activation_loading_horizon=settings.activation_loading_horizon,
            kernels=settings.kernels,
            fully_shard=settings.fully_shard,
            manual=manual_partition(model, settings),
            show_phase=show,
            warn=False,
            **planner,
        )
    for line in plan_warnings(compilation.plan):
        print(f"smpc: warning: {line}", file=sys.stderr)
    return compilation


def _search(target: str, specs: tuple[InputSpec, ...], planner: dict[str, Any]) -> tuple[Search, Compilation]:
    """The search for the fastest way to train the target, and the compilation of what it found."""
    from smpc.auto import search
    from smpc.compile import compile_plan

    with _loaded(target, specs) as (model, sample_inputs, show):
        found = search(model, sample_inputs, show_progress=show, **planner)
        show("Writing and checking the programs")
        return found, dataclasses.replace(compile_plan(found.trace, found.plan), sharded=found.sharded)


def _check_auto(auto: bool, world_size: int | None, chosen: dict[str, Any]) -> None:
    """Raise ConfigError for options that do not go together."""
    if not auto:
        raise ConfigError(
            f"--world-size {world_size}: only with --auto; otherwise -p and -d say how many ranks there are"
        )
    if world_size is None:
        raise ConfigError("--auto: --world-size is required, the number of ranks in all; try --world-size 8")
    untouched = {
        "data_parallel_degree": 1,
        "trace_execution_times": False,
        "trace_memory_usage": False,
        "recompute": (),
    }
    given = [name for name, value in chosen.items() if value is not None and value != untouched.get(name)]
    if given:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ConfigError(f"--auto: chooses these itself or does without: {options}; leave them out")


def _tensor_parallelism(settings: Config, given: dict[str, Any]) -> dict[str, Any]:
    """The degree, plan and outputs that are given, or that the settings have; `auto` for `modules`, which only a script can declare."""
    plan = given.get("tensor_parallel_plan", settings.tensor_parallel_plan)
    if isinstance(plan, str) and plan.endswith(".json"):
        from smpc.codegen.rewrite.plan import read_styles

        plan = read_styles(plan, "--tensor-parallel-plan")
    outputs = [name.strip() for name in settings.tensor_parallel_outputs.split(",") if name.strip()]
    return {
        "tensor_parallel_degree": given.get("tensor_parallel_degree", settings.tensor_parallel_degree),
        "tensor_parallel_plan": "auto" if plan == "modules" else plan,
        "tensor_parallel_outputs": given.get("tensor_parallel_outputs", outputs or None),
    }


def _planned_optimizer(settings: Config) -> str:
    """What a script with these settings is planned for."""
    from smpc.v1.optimization.precision import planned_optimizer

    return planned_optimizer(settings)


def _settings(path: str | None, flags: dict[str, Any]) -> Config:
    """The settings of the file, if any, overridden by the options that are not None; warnings go to stderr, a line each."""
    flags = {name: value for name, value in flags.items() if value is not None}
    if path is None and "pipeline_parallel_degree" not in flags:
        raise ConfigError(
            "-p/--pipeline-parallel-degree: required, the number of ranks to split the model over; try -p 2"
        )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        settings = Config.from_file(path, overrides=flags) if path else Config.parse(flags, origin="command line")
    for line in [line for warning in caught for line in str(warning.message).splitlines()]:
        print(f"smpc: warning: {line}", file=sys.stderr)
    return settings


def _writable_folder(out: str) -> Path:
    """The folder, checked before the model is compiled as far as it can be without creating it."""
    folder = Path(out)
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise ConfigError(f"--out {out!r}: {str(existing)!r} is not a folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"--out {out!r}: {str(existing)!r} is not writable")
    return folder


def _write(compilation: Compilation, folder: Path, found: Search | None) -> None:
    """The plan, its report, a program for every rank, and the search; what is left of an earlier, larger plan is removed."""
    from smpc.codegen.rewrite.tensor_parallel import describe
    from smpc.report.page import render_page
    from smpc.report.perfetto import perfetto_json

    timeline = compilation.timeline()
    files = {f"rank_{rank}.py": compilation.rank_source(rank) for rank in range(len(compilation.programs))}
    files["schedule.txt"] = compilation.schedule_text()
    files["timeline.json"] = perfetto_json(compilation.plan, timeline)
    files["report.html"] = render_page(compilation.trace, compilation.plan, timeline)
    files["plan.json"] = compilation.plan.to_json()
    if compilation.sharded is not None:
        files["tensor_parallel.txt"] = describe(compilation.sharded) + "\n"
    if found is not None:
        files["search.json"] = found.to_json()
        files["smp_config.json"] = json.dumps(found.config(), indent=2) + "\n"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / "plan.json").exists():  # a folder that this command wrote
            for stale in sorted(folder.iterdir()):
                if _OURS.fullmatch(stale.name) and stale.name not in files:
                    stale.unlink()
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out {str(folder)!r}: cannot write {error.filename!r}: {error.strerror}") from error


def _check_plot(plot: str) -> None:
    """Raises ConfigError, before the model is compiled, for a picture that could not be written."""
    from smpc.report.plot import require_matplotlib

    path = Path(plot)
    if path.suffix.lower() != ".png":
        raise ConfigError(f"--plot {plot!r}: expected a file name that ends in .png")
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ConfigError(f"--plot {plot!r}: expected a file in a folder that exists")
    require_matplotlib()


def _write_plot(compilation: Compilation, plot: str) -> None:
    from smpc.report.plot import render_plot

    picture = render_plot(compilation.plan, compilation.timeline())
    try:
        Path(plot).write_bytes(picture)
    except OSError as error:
        raise ConfigError(f"--plot {plot!r}: cannot write it: {error.strerror}") from error
