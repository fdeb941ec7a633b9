"""Activation checkpointing: `smp.checkpoint`, `smp.checkpoint_sequential` and `smp.set_activation_checkpointing`.

    class Model(nn.Module):
        def forward(self, x):
            x = smp.checkpoint(self.encoder, x)                                  # a module call
            return smp.checkpoint_sequential(self.layers, x, strategy="group_2")

    smp.set_activation_checkpointing(model.transformer.h[3])                     # for models that someone else wrote

The intermediate results of a checkpointed module are dropped after the forward pass and computed again for the backward pass. With a
pipeline, the calls are found when the model is recorded; without one they run at once. docs/activation_checkpointing.md has the details.

Source: public SMP v1 API (activation checkpointing), whose checkpoint functions are also in `smp.patches.checkpoint`.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from smpc.codegen.recompute import run_checkpointed
from smpc.config import Config
from smpc.errors import ConfigError, ConfigTypeError, UsageError
from smpc.tracer.recording.recorder import current_recorder
from smpc.tracer.regions import EACH, CheckpointMark, checkpoint_mark, group_size, mark_checkpoint
from smpc.tracer.structure import flatten
from smpc.v1.session.process_state import state


def checkpoint(module: nn.Module, *args: Any, preserve_rng_state: bool = True) -> Any:
    """`module(*args)`, computed again for the backward pass.

    With a manual partition, the module must be on one partition; an automatic one may split it, and then warns and does not checkpoint
    it. `preserve_rng_state`: whether the second run draws the same random numbers as the first. Raises ConfigTypeError for a function.
    """
    _check_module("smp.checkpoint", module)
    recorder = current_recorder()
    if recorder is not None:
        with recorder.region(preserve_rng_state, own=True):
            return module(*args)
    return _run_checkpointed((module,), module, args, {}, preserve_rng_state)


def checkpoint_sequential(
    sequential_module: nn.Sequential,
    input: Any,
    strategy: str = EACH,
    preserve_rng_state: bool = True,
    pack_args_as_tuple: bool = False,
) -> Any:
    """`sequential_module(input)`, with its layers checkpointed in groups.

    `strategy`: "each" layer alone, all consecutive layers of one partition ("contiguous"), or at most N of them ("group_N").
    `preserve_rng_state`: whether the second run draws the same random numbers as the first. `pack_args_as_tuple`: layers take tuples of
    tensors as their one argument. Raises ConfigTypeError for another module, ConfigError for another strategy, UsageError for a tuple
    without `pack_args_as_tuple`.
    """
    where = "smp.checkpoint_sequential"
    if not isinstance(sequential_module, nn.Sequential):
        raise ConfigTypeError(
            f"{where}: expected a torch.nn.Sequential, found {type(sequential_module).__name__}; use smp.checkpoint for other modules"
        )
    size = group_size(strategy)
    layers = list(sequential_module)
    recorder = current_recorder()
    if recorder is not None:
        sequence = recorder.regions.new_sequence()
        for layer in layers:
            _check_input(where, layer, input, pack_args_as_tuple)
            with recorder.region(preserve_rng_state, sequence, strategy, own=True):
                input = layer(input)
        return input
    size = size or max(1, len(layers))
    for start in range(0, len(layers), size):
        group = layers[start : start + size]
        run = functools.partial(_run_layers, group, where=where, pack_args_as_tuple=pack_args_as_tuple)
        input = _run_checkpointed(group, run, (input,), {}, preserve_rng_state)
    return input


def set_activation_checkpointing(
    module: nn.Module,
    preserve_rng_state: bool = True,
    pack_args_as_tuple: bool = False,
    strategy: str = EACH,
) -> None:
    """Checkpoint every call of a module, or the layers of an nn.Sequential in groups, as `checkpoint_sequential` does.

    `preserve_rng_state`: whether the second run draws the same random numbers as the first. `strategy`, `pack_args_as_tuple`: see
    `checkpoint_sequential`. In an nn.ModuleList, such as `seq_layers`, each member is checkpointed, or members that the model calls one
    after another in groups; the model passes their arguments, so `pack_args_as_tuple` has no effect. Call it before the first step, or
    at any time without a pipeline, where members of a list are checkpointed one by one. Raises ConfigError for a strategy or
    `pack_args_as_tuple` given for another module, UsageError once the model is cut, and for a module outside the model.
    """
    where = "smp.set_activation_checkpointing"
    _check_module(where, module)
    group_size(strategy)  # raises for an unknown one
    is_sequential, is_list = isinstance(module, nn.Sequential), isinstance(module, nn.ModuleList)
    if not is_sequential and not is_list and (strategy != EACH or pack_args_as_tuple):
        given = f"strategy={strategy!r}" if strategy != EACH else "pack_args_as_tuple=True"
        raise ConfigError(
            f"{where}: {given} is for torch.nn.Sequential and torch.nn.ModuleList alone, found {type(module).__name__}; leave it out"
        )
    model = state.model
    if model is not None and model.has_cut:
        raise UsageError(f"{where}: the model has been partitioned by its first step; call it before")
    if model is not None and all(module is not part for part in model.modules()):
        raise UsageError(
            f"{where}: the {type(module).__name__} is no part of the DistributedModel; pass a part of model.get_module(), in which "
            "tensor parallelism may have put a distributed module in its place"
        )
    if is_list:
        for member in module.children():
            mark_checkpoint(member, CheckpointMark(preserve_rng_state, strategy, is_member=True))
    else:
        mark_checkpoint(
            module, CheckpointMark(preserve_rng_state, strategy if is_sequential else "", pack_args_as_tuple)
        )
    if model is not None and model.partitioned:
        make_checkpointing(model.get_module())


def apply_marks(model: nn.Module, config: Config) -> None:
    """Without a pipeline, nothing is recorded: have the marked modules of the model checkpoint by themselves."""
    if config.offload_activations:
        warnings.warn(
            "offload_activations has no effect: there is no pipeline (pipeline_parallel_degree is 1), and it is counted in its tasks",
            stacklevel=3,
        )
    if config.kernels not in ("auto", "off"):
        warnings.warn(
            "kernels has no effect: there is no pipeline (pipeline_parallel_degree is 1), so the model runs as it is; use the modules "
            "of smpc.nn",
            stacklevel=3,
        )
    make_checkpointing(model)


def make_checkpointing(model: nn.Module) -> None:
    """Have the marked modules of a model that is not recorded checkpoint by themselves."""
    for module in model.modules():
        mark = checkpoint_mark(module)
        forward = module.forward
        if mark is None or (
            isinstance(forward, functools.partial) and forward.func in (_forward, checkpoint_sequential)
        ):
            continue
        if mark.strategy and not mark.is_member:
            assert isinstance(module, nn.Sequential), "set_activation_checkpointing has looked"
            replaced: Callable[..., Any] = functools.partial(
                checkpoint_sequential,
                module,
                strategy=mark.strategy,
                preserve_rng_state=mark.preserve_rng_state,
                pack_args_as_tuple=mark.pack_args_as_tuple,
            )
        else:
            replaced = functools.partial(_forward, module, forward, mark.preserve_rng_state)
        module.forward = replaced


def _forward(
    module: nn.Module, forward: Callable[..., Any], preserve_rng_state: bool, *args: Any, **kwargs: Any
) -> Any:
    return _run_checkpointed((module,), forward, args, kwargs, preserve_rng_state)


def _run_checkpointed(
    modules: Sequence[nn.Module],
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    preserve_rng_state: bool,
) -> Any:
    """`function(*args, **kwargs)`, checkpointed; the modules' buffers change in the first run only."""
    leaves, structure = flatten((args, kwargs))

    def run(*values: Any) -> Any:
        own_args, own_kwargs = structure.unflatten(values)
        return function(*own_args, **own_kwargs)

    owners = [(owner, name) for module in modules for owner in module.modules() for name in owner._buffers]
    owners = [(owner, name) for owner, name in owners if owner._buffers[name] is not None]
    return run_checkpointed(run, *leaves, preserve_rng_state=preserve_rng_state, buffers=owners, keep_values=False)


def _run_layers(layers: Sequence[nn.Module], input: Any, *, where: str, pack_args_as_tuple: bool) -> Any:
    for layer in layers:
        _check_input(where, layer, input, pack_args_as_tuple)
        input = layer(input)
    return input


def _check_module(where: str, module: Any) -> None:
    if not isinstance(module, nn.Module):
        found = getattr(module, "__name__", type(module).__name__)
        raise ConfigTypeError(
            f"{where}: expected a torch.nn.Module, found {found}; a function cannot be checkpointed: make it the forward of a module"
        )


def _check_input(where: str, layer: nn.Module, input: Any, pack_args_as_tuple: bool) -> None:
    if isinstance(input, tuple) and not pack_args_as_tuple:
        raise UsageError(
            f"{where}: the layer {type(layer).__name__} gets a tuple of {len(input)} values; pass pack_args_as_tuple=True"
        )
    if not isinstance(input, (tuple, torch.Tensor)):
        raise UsageError(
            f"{where}: expected a tensor or a tuple of tensors for the layer {type(layer).__name__}, found {type(input).__name__}"
        )
