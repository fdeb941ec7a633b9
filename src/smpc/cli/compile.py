"""`smpc compile`: plan a model, print the report, write the programs."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smpc.cli import compile_options as opt
from smpc.cli.model_target import InputSpec, check_forms, check_target, load_target, parse_inputs
from smpc.cli.terminal import Show, clear_lines, progress
from smpc.cli.verify import verify_programs
from smpc.compile.keys import CompilationKeys
from smpc.config import Config
from smpc.config.key import keys_of
from smpc.config.numbers import MAX_MICROBATCHES, MAX_WORLD_SIZE, shown
from smpc.config.user_files import output_violation
from smpc.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

    from smpc.compile.options import PipelineOptions
    from smpc.compile.result import Compilation
    from smpc.compile.search import Search
    from smpc.report.advice import Outlook

_PLANS = ("auto", "off", "huggingface")
_OTHER_DEGREES = (
    "tensor_parallel_degree",
    "context_parallel_degree",
    "expert_parallel_degree",
    "data_parallel_degree",
    "sharded_data_parallel_degree",
)


@opt.takes_flags
def compile_command(
    target: opt.Target,
    *,
    verify: opt.Verify = False,
    auto: opt.Auto = False,
    world_size: opt.WorldSize = None,
    effort: opt.Effort = None,
    config: opt.Config = None,
    inputs: opt.Inputs = None,
    json_only: opt.JsonOnly = False,
    out: opt.Out = None,
    plot: opt.Plot = None,
    **flags: Any,
) -> None:
    """Split a model into pipeline stages and report what each will cost.

    Nothing is trained, and no process group is needed. The same input gives the same plan, byte for byte.
    """
    given = opt.given(flags)
    _check_counts({name: value for name, value in given.items() if not opt.is_setting(name)}, world_size)
    check_forms(inputs or [])
    settings = options = None
    if effort is not None and not auto:
        raise ConfigError(f"--effort {effort:g}: only with --auto, whose search it makes longer; leave it out")
    if auto or world_size is not None:
        given = _for_search(target, auto, world_size, given, {"config": config is not None, "verify": verify})
        given |= {} if effort is None else {"effort": effort}
    else:
        settings = _compile_settings(config, given)
        _check_names(target, settings, given)
        options = _compile_options(settings, given, is_script=config is not None)
    specs = parse_inputs(inputs or [], MAX_MICROBATCHES if settings is None else settings.microbatches)
    folder = None if out is None else _writable_folder(out)
    if plot is not None:
        _check_plot(plot)
    found = verified = None
    if settings is None or options is None:
        found, compilation = _search_target(target, specs, given)
    else:
        compilation, verified, options = _compile_target(target, specs, settings, options, verify=verify)
    if plot is not None:
        _write_plot(compilation, plot)
    outlook = _outlook_of_compile(compilation, options) if folder is not None or not json_only else None
    if folder is not None:
        _write_files(compilation, folder, found, outlook)
    _print_plan(compilation, found, outlook, json_only=json_only)
    if verified is not None:
        print(f"verified: {verified}", file=sys.stderr if json_only else sys.stdout)


def _print_plan(compilation: Compilation, found: Search | None, outlook: Outlook | None, *, json_only: bool) -> None:
    """The plan as JSON, or the reports of the search, the plan and the sharding."""
    if json_only:
        sys.stdout.write(compilation.plan.to_json())
        return
    from smpc.report import print_report
    from smpc.report.notebook import sharing_texts

    if found is not None:
        from smpc.report.search import print_search

        print_search(found)
        print()
    print_report(compilation.plan, compilation.timeline(), more=_more_lines(compilation, found, outlook))
    for text in sharing_texts(compilation).values():
        print(f"\n{text}", end="")


def _outlook_of_compile(compilation: Compilation, options: PipelineOptions | None) -> Outlook | None:
    """How the time of a step is spent, and what other settings would gain; None for the result of a search."""
    from smpc.report.advice import outlook

    planned = compilation.planned
    return None if options is None or planned is None or planned.traced is None else outlook(options, planned)


def _more_lines(compilation: Compilation, found: Search | None, outlook: Outlook | None) -> tuple[tuple[str, str], ...]:
    from smpc.report.tables import host_lines, step_lines

    if outlook is not None:
        return outlook.lines()
    if found is None or found.parts is None:
        return ()
    return (*step_lines(found.parts), *host_lines(found.plan, compilation.timeline()))


@contextlib.contextmanager
def _loaded_target(
    target: str, specs: tuple[InputSpec, ...], *, real: bool = False
) -> Iterator[tuple[nn.Module, Any, Show]]:
    """The target's model and sample inputs, and what shows the phase of what is done with them in the block.

    stdout is for the result alone: whatever the user's code prints goes to stderr. torch logs the traceback of an operation that cannot
    run on these shapes; that is silenced, for the error raised says it in a line. `real`: whether parameters must have values.
    """
    import torch._subclasses.fake_tensor  # noqa: F401  (torch sets the levels of its loggers when it is imported)

    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with progress() as show, contextlib.redirect_stdout(sys.stderr):
            show("Making the model")
            yield *load_target(target, specs, real=real), show
    finally:
        logger.setLevel(before)


def _compile_target(
    target: str, specs: tuple[InputSpec, ...], settings: Config, options: PipelineOptions, *, verify: bool
) -> tuple[Compilation, object, PipelineOptions]:
    """The target's compilation, with the phases shown, and what comparing it with the model has given, if it is to be verified;
    and the options with what the model's modules are marked with.

    Modules are marked by smp.partition where auto_partition is off.

    In half precision the model is cast as `smp.DistributedModel` casts it.
    """
    from smpc.compile.passes import compile_batch
    from smpc.partitioner.graph.plan import plan_warnings

    verified = None
    with _loaded_target(target, specs, real=verify) as (model, sample_inputs, show):
        if _is_half(settings):
            from smpc.v1.session.precision import cast_module, half_dtype
            from smpc.v1.steps.model_calls import cast_inputs

            cast_module(model, half_dtype(settings))
            sample_inputs = cast_inputs(sample_inputs, half_dtype(settings))
        if not settings.auto_partition:
            from smpc.v1.declare.partition import manual_partition

            options = dataclasses.replace(options, manual=manual_partition(model, settings))
        compilation = compile_batch(model, sample_inputs, options, show)
        if verify:
            show("Verifying the programs")
            verified = _verify_target(target, specs, (model, sample_inputs), settings, options, compilation)
    for line in plan_warnings(compilation.plan):
        _warn_of_compile(line)
    return compilation, verified, options


def _verify_target(
    target: str,
    specs: tuple[InputSpec, ...],
    loaded: tuple[nn.Module, Any],
    settings: Config,
    options: PipelineOptions,
    compilation: Compilation,
) -> object:
    """What comparing the programs with the model has given: in this process, or on ranks where one alone cannot run them."""
    if options.tensor_parallel_degree * options.context_parallel_degree * options.expert_parallel_degree == 1:
        return verify_programs(*loaded, compilation, settings.microbatches, is_drawn=bool(specs))
    from smpc.cli.verify.ranks import RanksJob, verify_ranks

    job = RanksJob.of(target, [str(spec) for spec in specs], settings, options)
    return verify_ranks(job, *loaded, is_drawn=bool(specs))


def _search_target(target: str, specs: tuple[InputSpec, ...], given: dict[str, Any]) -> tuple[Search, Compilation]:
    """The search for the fastest way to train the target, and the compilation of what it found."""
    from smpc.compile.passes import write_programs
    from smpc.compile.search import search

    with _loaded_target(target, specs) as (model, sample_inputs, show):
        found = search(model, sample_inputs, show_progress=show, **given)
        show("Writing and checking the programs")
        shared = {"sharded": found.sharded, "context": found.context, "divided": found.divided}
        return found, write_programs(found.planned, **shared)


def _check_counts(counts: dict[str, int], world_size: int | None) -> None:
    """Raise ConfigError for numbers of ranks, no settings of the configuration, that are beyond what anybody has."""
    most = {"world_size": MAX_WORLD_SIZE} | {name: known.limit for name, (known, _) in opt.FLAGS.items()}
    wrong = [
        f"--{name.replace('_', '-')}: expected at most {limit}, found {shown(count)}"
        for name, count in {**counts, "world_size": world_size or 0}.items()
        if (limit := most[name]) is not None and count > limit
    ]
    if wrong:
        raise ConfigError("\n".join(wrong))


def _check_names(target: str, settings: Config, given: dict[str, Any]) -> None:
    """Raise ConfigError for what is wrong whatever the model is, before torch is imported, which takes seconds."""
    from smpc.config.numbers import parse_bytes
    from smpc.partitioner.costs.device_file import find_devices
    from smpc.partitioner.costs.named_optimizers import find_optimizer

    wrong = [
        f"{field.name}: expected one of {', '.join(known.options)}, found {shown(value)}"
        for field, known in keys_of(CompilationKeys)
        if known.options and (value := given.get(field.name)) is not None and value not in known.options
    ]
    plan = given.get("tensor_parallel_plan", _PLANS[0])
    if plan not in _PLANS and not plan.endswith(".json"):
        wrong.append(f"tensor_parallel_plan: expected one of {', '.join(_PLANS)} or a .json file, found {shown(plan)}")
    if wrong:
        raise ConfigError("\n".join(wrong))
    find_devices(given.get("device") or settings.device_names or "h100", settings.pipeline_parallel_degree)
    find_optimizer(given.get("optimizer", "adam"))
    parse_bytes(given.get("memory_limit", 1), "memory_limit")
    check_target(target)


def _for_search(
    target: str, auto: bool, world_size: int | None, given: dict[str, Any], others: dict[str, bool]
) -> dict[str, Any]:
    """The arguments of the search. ConfigError for options that do not go together, and unknown devices, before anything takes long."""
    from smpc.partitioner.costs.device_file import find_device

    devices = given.get("device", ["h100"])
    if len(devices) > 1:
        raise ConfigError("--auto: --device is given more than once, but the search is for devices of one kind")
    if not auto:
        raise ConfigError(
            f"--world-size {world_size}: only with --auto; otherwise -p and -d say how many ranks there are"
        )
    if world_size is None:
        raise ConfigError("--auto: --world-size is required, the number of ranks in all; try --world-size 8")
    refused = [name for name in given if not opt.FLAGS[name][1].is_searched]
    refused += [name for name, is_given in others.items() if is_given]
    if refused:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in refused)
        raise ConfigError(f"--auto: chooses these itself or does without: {options}; leave them out")
    find_device(devices[0])
    check_target(target)
    return {**given, "device": devices[0], "world_size": world_size}


def _compile_options(settings: Config, given: dict[str, Any], *, is_script: bool) -> PipelineOptions:
    """The settings, overridden by the given options; planned for the optimizer that a script with these settings has.

    `is_script`: they are a script's, whose weight of memory is the configuration's, also by default.
    """
    from smpc.codegen.rewrite.tensor_parallel.styles import read_styles
    from smpc.compile.options import PipelineOptions

    apart = {name: value for name, value in given.items() if not opt.is_setting(name)}
    plan = apart.get("tensor_parallel_plan", settings.tensor_parallel_plan)
    if isinstance(plan, str) and plan.endswith(".json"):
        apart["tensor_parallel_plan"] = read_styles(plan, "--tensor-parallel-plan")
    if settings.device_names:
        apart.setdefault("device", settings.device_names)
    if _is_half(settings):
        from smpc.v1.session.precision import planned_optimizer  # with all of the API, which takes a second to import

        apart.setdefault("optimizer", planned_optimizer(settings))
    if not is_script:
        apart.setdefault("memory_weight", given.get("memory_weight"))
    return PipelineOptions.of(settings, **apart)


def _is_half(settings: Config) -> bool:
    return bool(settings.fp16 or settings.bf16)


def _compile_settings(path: str | None, given: dict[str, Any]) -> Config:
    """The settings of the file, if any, overridden by the options that are given; warnings go to stderr, a line each."""
    flags = {name: value for name, value in given.items() if opt.is_setting(name)}
    if "fully_shard" in flags:
        flags["ddp"] = True
    if path is None and any(given.get(name, 1) > 1 for name in _OTHER_DEGREES):
        flags.setdefault("pipeline_parallel_degree", 1)
    elif path is None and "pipeline_parallel_degree" not in flags:
        raise ConfigError(
            "-p/--pipeline-parallel-degree: required, the number of ranks to split the model over; try -p 2"
        )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        settings = Config.from_file(path, overrides=flags) if path else Config.parse(flags, origin="command line")
    for warning in caught:
        _warn_of_compile(str(warning.message))
    return settings


def _warn_of_compile(text: str) -> None:
    for line in clear_lines(text):
        print(f"smpc: warning: {line}", file=sys.stderr)


def _writable_folder(out: str) -> Path:
    """The folder, checked before the model is compiled as far as it can be without creating it."""
    violation = output_violation(os.path.join(out, "plan.json"), makes_folders=True) if out else "expected a folder"
    if violation:
        raise ConfigError(f"--out {shown(out)}: {violation}")
    return Path(out)


def _write_files(compilation: Compilation, folder: Path, found: Search | None, outlook: Outlook | None) -> None:
    """The plan, its report, a program for every rank, and the search."""
    from smpc.report.notebook import plan_files, write_files

    files = plan_files(compilation, outlook)
    if found is not None:
        files["search.json"] = found.to_json()
        files["smp_config.json"] = json.dumps(found.config(), indent=2) + "\n"
    write_files(folder, files, "--out")


def _check_plot(plot: str) -> None:
    """Raises ConfigError, before the model is compiled, for a picture that could not be written."""
    from smpc.report.plot import require_matplotlib

    if Path(plot).suffix.lower() != ".png":
        raise ConfigError(f"--plot {shown(plot)}: expected a file name that ends in .png")
    if violation := output_violation(plot):
        raise ConfigError(f"--plot {shown(plot)}: {violation}")
    require_matplotlib()


def _write_plot(compilation: Compilation, plot: str) -> None:
    from smpc.report.plot import render_plot

    picture = render_plot(compilation.plan, compilation.timeline())
    try:
        Path(plot).write_bytes(picture)
    except OSError as error:
        raise ConfigError(f"--plot {shown(plot)}: cannot write it: {error.strerror}") from error
