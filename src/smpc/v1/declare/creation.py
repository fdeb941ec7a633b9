"""`smp.model_creation` and `smp.delay_param_initialization`: how a training script creates its model.

    with smp.model_creation(tensor_parallelism=smp.tp_size() > 1, dtype=torch.bfloat16, attention_dropout_prob=0.0):
        model = MyModel()

is `smp.tensor_parallelism` with the keyword arguments given, `smp.delay_param_initialization` if the configuration says
`delayed_parameter_initialization: true`, and a default dtype, in one.

Source: public SMP v1 API ("Context Managers and Util Functions").
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from smpc.errors import ConfigError, ConfigTypeError
from smpc.nn.distribution.distribute import tensor_parallelism as distributed
from smpc.nn.init.delayed import delay_param_initialization
from smpc.v1.session.process_state import state

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
