"""`tsm.transform`: a model as it is to be wrapped with FSDP.

The model keeps its class, the names of its parameters, and so its state dict. Without tensor, context and expert parallelism only its
device and dtype change.

Source: "torch.sagemaker.transform" in the public reference of SMP v2.

`samples_of` is a batch to record a model with before there is one. Layouts of weights are chosen by it. It is made of `dummy_inputs`, which
Hugging Face's models have, with longer sequences and with labels; or given by the script, as `transform(model, config={"sample_inputs":
batch})`.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from smpc.errors import ConfigError, ConfigTypeError, ConfigUnsupportedError, UsageError
from smpc.executor.collectives import TensorGroup
from smpc.mesh import Axis
from smpc.nn.init.module_initializers import note_writes
from smpc.sample_inputs import Inputs, as_inputs
from smpc.v2.moe.moe_config import MoEConfig
from smpc.v2.state_handler import Session, state
from smpc.v2.tensor_parallel.transformer import mark_layers
from smpc.v2.transforming.sharing import share
from smpc.v2.transforming.transformed_experts import divide_experts
from smpc.v2.transforming.transformed_slices import FIRST_RANK

SAMPLE = "sample_inputs"
_LENGTH = 512


def samples_of(model: nn.Module, config: Any) -> list[Inputs]:
    """Batches to try in turn. UsageError if there is none."""
    if isinstance(config, dict) and SAMPLE in config:
        return [as_inputs(config[SAMPLE])]
    dummy = getattr(model, "dummy_inputs", None)
    if not isinstance(dummy, dict) or not all(isinstance(value, Tensor) for value in dummy.values()):
        raise UsageError(
            f"transform: expected a model with dummy_inputs, as Hugging Face's have, found {type(model).__name__}; pass one batch, as "
            f"config={{{SAMPLE!r}: batch}}"
        )
    longer = _longer(model, dummy)
    ids = longer.get("input_ids")
    accepts = "labels" in inspect.signature(type(model).forward).parameters
    with_labels = [{**longer, "labels": ids}] if accepts and ids is not None else []
    return [as_inputs(each) for each in (*with_labels, longer, dummy)]


def _longer(model: nn.Module, dummy: dict[str, Tensor]) -> dict[str, Tensor]:
    """Token ids of a length as models are trained with, one sequence."""
    limit = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    length = min(_LENGTH, limit if isinstance(limit, int) and limit > 0 else _LENGTH)
    return {
        name: torch.ones(1, length, dtype=value.dtype) if value.dim() == 2 and value.dtype is torch.int64 else value
        for name, value in dummy.items()
    }


_WAYS = ("p2p", "all_gather", "a2a", "auto")


def transform(
    model: nn.Module,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
    config: dict[str, Any] | MoEConfig | None = None,
    load_state_dict_from_rank0: bool = False,
    cp_comm_type: str = "p2p",
) -> nn.Module:
    """The model, to be wrapped with FSDP; it is changed in place.

    `device`, `dtype`: of its parameters; a model with parameters on the meta device stays there. `config`: a MoEConfig for expert
    parallelism, or a dict with `sample_inputs`, a batch from which the cut is chosen. `load_state_dict_from_rank0`: rank 0 keeps its
    weights, which FSDP's `sync_module_states` sends to the others; these may be on the meta device. `cp_comm_type`: p2p, all_gather,
    a2a or auto; ignored without context parallelism.

    Raises UsageError (a ValueError) for wrong arguments, and if `tsm.init` has not been called; TraceError for a model that cannot be
    recorded, ConfigError for one without experts to divide.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"transform: expected an nn.Module, found {type(model).__name__}")
    if cp_comm_type not in _WAYS:
        raise UsageError(f"cp_comm_type: expected one of {', '.join(_WAYS)}, found {cp_comm_type!r}")
    if config is not None and not isinstance(config, (dict, MoEConfig)):
        raise ConfigTypeError(f"config: expected None, a dict or a MoEConfig, found {type(config).__name__}")
    session = state.session
    _check_config(config, session)
    has_meta = any(parameter.is_meta for parameter in model.parameters())
    if load_state_dict_from_rank0 and session.rank == 0 and has_meta:
        left = [name for name, parameter in model.named_parameters() if parameter.is_meta]
        raise UsageError(
            f"load_state_dict_from_rank0: expected rank 0 to have all weights, found {', '.join(left[:5])} on the meta device; make the "
            "model outside of torch.device('meta') on rank 0"
        )
    if dtype is not None:
        _cast_parameters(model, dtype)
    note_writes(model)
    _share_model(model, session, config, cp_comm_type, load_state_dict_from_rank0)
    mark_layers(model)
    return model if has_meta or device is None else model.to(device)


def _share_model(
    model: nn.Module, session: Session, config: dict[str, Any] | MoEConfig | None, attention: str, from_rank0: bool
) -> None:
    """Has tensor-, context- and expert-parallel ranks share the model."""
    moe = config if isinstance(config, MoEConfig) and config.smp_moe else None
    experts, tensor, context = (
        TensorGroup.of(session.groups[axis]) if session.mesh.size(axis) > 1 else None
        for axis in (Axis.EP, Axis.TP, Axis.CP)
    )
    is_shared = tensor is not None or context is not None
    if experts is not None or moe is not None:
        sources = FIRST_RANK if from_rank0 else None
        divide_experts(model, experts, moe, sources, is_recorded=is_shared)
    if is_shared:
        samples = samples_of(model, config) if tensor is not None else []
        sources = session.mesh.first_group(Axis.EP) if from_rank0 else None
        share(model, samples, tensor, context, attention=attention, sources=sources)


def _check_config(config: dict[str, Any] | MoEConfig | None, session: Session) -> None:
    """Raise ConfigError for settings that contradict the degrees, or would have to change what the model is."""
    degree = session.config.expert_parallel_degree
    if isinstance(config, MoEConfig) and not config.smp_moe and degree > 1:
        raise ConfigError(
            f"config: expected MoEConfig(smp_moe=True) with expert_parallel_degree {degree}, found smp_moe=False, which leaves experts as "
            "they are; set expert_parallel_degree: 1, or leave smp_moe out"
        )
    if isinstance(config, dict) and set(config) - {SAMPLE}:
        raise ConfigUnsupportedError(
            f"config: expected None, an empty dict or a MoEConfig, found settings of {', '.join(map(str, config))}; models stay what "
            "they are here, so change their own configuration"
        )


def _cast_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Parameters become of a dtype; buffers keep theirs."""
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise UsageError(f"dtype: expected a floating-point dtype such as torch.bfloat16, found {dtype!r}")
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
