"""Manual partitioning: `smp.partition` and `smp.set_partition`, for configurations with `auto_partition: false`.

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            with smp.partition(1):
                self.child0 = Child0()            # on partition 1
                with smp.partition(2):
                    self.child1 = Child1()        # on partition 2
                self.child2 = Child2()            # on partition 1
            self.child3 = Child3()                # on default_partition

    smp.set_partition(model.child3, 2)            # also for models that someone else wrote

A partition is a pipeline rank; it may have any number of modules, next to each other or not. `smpc.partitioner.manual` says how modules
without a mark are placed. The marks are attributes of the modules themselves, so they are copied and pickled with them.

Source: public SMP v1 API (`smp.partition`); `smp.set_partition` is used by SMP scripts.

`smp.model_creation` and `smp.delay_param_initialization`: how a training script creates its model.

    with smp.model_creation(tensor_parallelism=smp.tp_size() > 1, dtype=torch.bfloat16, attention_dropout_prob=0.0):
        model = MyModel()

is `smp.tensor_parallelism` with the keyword arguments given, `smp.delay_param_initialization` if the configuration says
`delayed_parameter_initialization: true`, and a default dtype, in one.

Source: public SMP v1 API ("Context Managers and Util Functions").
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from smpc.config import Config
from smpc.errors import ConfigError, ConfigTypeError, UsageError
from smpc.nn.distribution.distribute import tensor_parallelism as distributed
from smpc.nn.init.delayed import delay_param_initialization
from smpc.partitioner.manual import ManualPartition, check_marks
from smpc.v1.session.process_state import state

_SET = "_smpc_partition"  # set by set_partition for the module itself
_AROUND = "_smpc_partition_around"  # of the context or list that it was created in; counts less


@contextmanager
def partition(index: int) -> Iterator[None]:
    """Place the modules that are created in this context on partition `index`; the innermost of nested contexts wins.

    Copies (`copy.deepcopy`) are not created anew: they have the mark of their original. Without effect under `auto_partition: true`.
    Raises ConfigError for an index that is not a pipeline rank: here if `smp.init` has been called, otherwise when the model is
    wrapped.
    """
    _check_index("smp.partition", index)
    construct = nn.Module.__init__  # the outer context's, if there is one

    @functools.wraps(construct)
    def construct_marked(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        vars(self)[_AROUND] = index

    nn.Module.__init__ = construct_marked  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__init__ = construct  # type: ignore[method-assign]


def set_partition(module: nn.Module, index: int) -> None:
    """Place a module on partition `index`, with all its submodules except those that `set_partition` places elsewhere.

    Without effect under `auto_partition: true`. Raises ConfigError as `partition` does, UsageError once the model is partitioned.
    """
    if not isinstance(module, nn.Module):
        raise ConfigTypeError(f"smp.set_partition: expected a torch.nn.Module, found {type(module).__name__}")
    _check_index("smp.set_partition", index)
    model = state.model
    by_hand = model is not None and not state.cfg.auto_partition and state.cfg.pipeline_parallel_degree > 1
    if by_hand and model.partitioned:
        raise UsageError(
            "smp.set_partition: the model has been partitioned by its first step, and modules do not move any more; call it before"
        )
    vars(module)[_SET] = index
    for inner in module.modules():
        vars(inner).pop(_AROUND, None)
    _hand_down(module, index)


def read_marks(model: nn.Module) -> dict[str, int]:
    """Partition of each marked module, by canonical name."""
    found: dict[str, int] = {}
    handed_down: dict[str, int] = {}  # marks of modules that are never called themselves, by their names as prefixes
    for name, module in model.named_modules():
        own: int | None = vars(module).get(_SET, vars(module).get(_AROUND))
        if own is None:
            own = handed_down.get(name.rpartition(".")[0])
        if own is None:
            continue
        found[name] = own
        if _has_no_call(module):
            handed_down[name] = own
    return found


def manual_partition(model: nn.Module, config: Config) -> ManualPartition | None:
    """The partition of each module from marks and configuration; None under `auto_partition: true`.

    Raises ConfigError, naming the modules, for partitions that do not exist.
    """
    if config.auto_partition:
        return None
    marks = read_marks(model)
    check_marks(marks, config.default_partition, config.pipeline_parallel_degree)
    return ManualPartition(tuple(marks.items()), config.default_partition)


def _hand_down(module: nn.Module, index: int) -> None:
    """Mark the members of a list: the list itself may be a slice, which is not in the model."""
    if _has_no_call(module):
        for child in module.children():
            vars(child)[_AROUND] = index
            _hand_down(child, index)


def _has_no_call(module: nn.Module) -> bool:
    """Whether a module only holds others, as nn.ModuleList does."""
    return type(module).forward is nn.Module.forward


def _check_index(what: str, index: Any) -> None:
    if not isinstance(index, int) or isinstance(index, bool):
        raise ConfigTypeError(f"{what}: expected an int, found {type(index).__name__} {index!r}")
    if index < 0:
        raise ConfigError(f"{what}: expected a partition from 0 up, found {index}")
    if state.initialized and not state.cfg.auto_partition and index >= state.cfg.pipeline_parallel_degree:
        raise ConfigError(
            f"{what}: expected a partition from 0 to pipeline_parallel_degree - 1 = {state.cfg.pipeline_parallel_degree - 1}, "
            f"found {index}"
        )


_FUSED = "torch chooses the kernels"
# Arguments of SMP v1 scripts, and why they change nothing here.
_NO_EFFECT = {
    "attention_in_fp32": "attention computes its softmax in float32 anyway",
    "query_key_layer_scaling": "it guards scores in float16 against overflow, and they are computed in float32",
    "fused_softmax": _FUSED,
    "fused_dropout": _FUSED,
    "fused_bias_gelu": _FUSED,
    "flash_attention": _FUSED,
    "distribute_embedding": "embeddings are distributed unless they share their weights",
    "fp32_residual_addition": "residuals have the dtype of the model",
    "zero_init": "weights are taken over from the module that is replaced, or drawn",
    "use_alibi": "give the biases as attention_mask, in floating point",
}


@contextmanager
def model_creation(
    tensor_parallelism: bool = False, dtype: torch.dtype | None = None, **tensor_parallel_config: Any
) -> Iterator[None]:
    """Creates a model; also decorates a function.

    `tensor_parallelism`: whether supported modules that are created here are distributed. `dtype`: of parameters; None for the default
    one. `tensor_parallel_config`: arguments of the distributed modules, as for `smp.tensor_parallelism`; no effect without it. Raises
    ConfigTypeError for arguments of other types, ConfigError for a dtype that is not floating-point.
    """
    _check_creation(tensor_parallelism, dtype, tensor_parallel_config)
    before = torch.get_default_dtype()
    with ExitStack() as stack:
        if dtype is not None:
            stack.callback(torch.set_default_dtype, before)
            torch.set_default_dtype(dtype)
        if tensor_parallelism:
            used = {key: value for key, value in tensor_parallel_config.items() if key not in _NO_EFFECT}
            stack.enter_context(distributed(True, **used))
        stack.enter_context(
            delay_param_initialization(state.initialized and state.cfg.delayed_parameter_initialization)
        )
        yield


def _check_creation(tensor_parallelism: Any, dtype: Any, config: dict[str, Any]) -> None:
    """Raises an error for arguments of `model_creation` that cannot be."""
    if not isinstance(tensor_parallelism, bool):
        raise ConfigTypeError(
            f"model_creation: expected tensor_parallelism to be a bool, found {type(tensor_parallelism).__name__} {tensor_parallelism!r}"
        )
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise ConfigTypeError(f"model_creation: expected dtype to be a torch.dtype or None, found {dtype!r}")
    if dtype is not None and not dtype.is_floating_point:
        raise ConfigError(f"model_creation: expected a floating-point dtype, found {dtype}")
    if state.initialized and state.session.rank != 0:
        return  # every rank creates the model
    if not tensor_parallelism and config:
        warnings.warn(f"model_creation: {', '.join(config)} have no effect: tensor_parallelism is False", stacklevel=4)
        return
    without = [f"{key} has no effect: {_NO_EFFECT[key]}" for key in config if key in _NO_EFFECT]
    if without:
        warnings.warn("model_creation: " + "; ".join(without), stacklevel=4)
