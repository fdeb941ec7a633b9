"""The SMP v1 programming interface: `import smpc.v1 as smp`."""

from smpc.nn.distribution.distribute import set_tensor_parallelism, tensor_parallelism
from smpc.nn.init.delayed import delay_param_initialization
from smpc.v1 import amp, model, nn, optimizers, patches, state_mod, utils
from smpc.v1.declare.creation import model_creation
from smpc.v1.declare.partition import partition, set_partition
from smpc.v1.declare.recompute import checkpoint, checkpoint_sequential, set_activation_checkpointing
from smpc.v1.layout.tensor_parallel import tp_register, tp_register_with_module
from smpc.v1.model.distributed_model import DistributedModel
from smpc.v1.optimization import clipping
from smpc.v1.optimization.distributed_optimizer import DistributedOptimizer
from smpc.v1.saving.saving import resume_from_checkpoint, save_checkpoint
from smpc.v1.saving.serialization import load, save
from smpc.v1.session.comm import (
    DP_GROUP,
    MP_GROUP,
    PP_GROUP,
    RDP_GROUP,
    TP_GROUP,
    WORLD,
    CommGroup,
    RankType,
    allgather,
    barrier,
    broadcast,
    dp_barrier,
    mp_barrier,
    pp_barrier,
    rdp_barrier,
    recv_from,
    send,
    tp_barrier,
)
from smpc.v1.session.init import init, shutdown
from smpc.v1.session.ranks import (
    dp_rank,
    dp_size,
    get_dp_group,
    get_dp_process_group,
    get_mp_group,
    get_mp_process_group,
    get_pp_group,
    get_pp_process_group,
    get_rdp_group,
    get_rdp_process_group,
    get_tp_group,
    get_tp_process_group,
    get_world_process_group,
    is_initialized,
    is_tracing,
    local_rank,
    local_size,
    mp_rank,
    mp_size,
    pp_rank,
    pp_size,
    rank,
    rdp_rank,
    rdp_size,
    size,
    tp_rank,
    tp_size,
)
from smpc.v1.session.state import state
from smpc.v1.steps.results import StepOutput
from smpc.v1.steps.step import step

__all__ = [
    "DP_GROUP",
    "MP_GROUP",
    "PP_GROUP",
    "RDP_GROUP",
    "TP_GROUP",
    "WORLD",
    "CommGroup",
    "DistributedModel",
    "DistributedOptimizer",
    "RankType",
    "StepOutput",
    "allgather",
    "amp",
    "barrier",
    "broadcast",
    "checkpoint",
    "checkpoint_sequential",
    "delay_param_initialization",
    "delayed_parameter_initialization",
    "dp_barrier",
    "dp_rank",
    "dp_size",
    "get_dp_group",
    "get_dp_process_group",
    "get_mp_group",
    "get_mp_process_group",
    "get_pp_group",
    "get_pp_process_group",
    "get_rdp_group",
    "get_rdp_process_group",
    "get_tp_group",
    "get_tp_process_group",
    "get_world_process_group",
    "init",
    "is_initialized",
    "is_tracing",
    "load",
    "local_rank",
    "local_size",
    "model",
    "model_creation",
    "mp_barrier",
    "mp_rank",
    "mp_size",
    "nn",
    "optimizers",
    "partition",
    "patches",
    "pp_barrier",
    "pp_rank",
    "pp_size",
    "rank",
    "rdp_barrier",
    "rdp_rank",
    "rdp_size",
    "recv_from",
    "resume_from_checkpoint",
    "save",
    "save_checkpoint",
    "send",
    "set_activation_checkpointing",
    "set_partition",
    "set_tensor_parallelism",
    "shutdown",
    "size",
    "state",
    "state_mod",
    "step",
    "tensor_parallelism",
    "tp_barrier",
    "tp_rank",
    "tp_register",
    "tp_register_with_module",
    "tp_size",
    "utils",
]

delayed_parameter_initialization = delay_param_initialization  # scripts know it by both names

state.at_model.append(clipping.install)  # a model knows no optimizer, so it is told here what begins with it
