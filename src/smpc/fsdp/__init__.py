"""FSDP as a dictionary says it: what to wrap, over which ranks, in which precision; on `smpc.sharding`, the one implementation below.

config = FSDPConfig.read({"sharding_strategy": "HYBRID_SHARD", "mixed_precision": "PURE"})
prepared = prepare(model, config, "amp_bf16", optimizer)        in place; the optimizer goes on with the parts

config            the fields, their defaults, and what each error says
wrapping          which modules are units, and which are recomputed: attributes and functions of the modules
meshes            'self', 'node', 'set4', 'mod2': ranks, as arithmetic
apply_config      applies all of it
buffer_dtypes     floating-point ones in the dtype of units; state dicts have them as they were
broadcast_values  rank 0's values, where layers are sliced
tensor_slices     layers that are sliced before, over groups of ranks
zero              the same out of a DeepSpeed configuration, which is only read
"""

from smpc.fsdp.apply_config import Prepared, prepare
from smpc.fsdp.config import FSDPConfig, MixedPrecision
from smpc.fsdp.meshes import partition
from smpc.fsdp.tensor_slices import TensorConfig
from smpc.fsdp.wrapping import units_of
from smpc.fsdp.zero import ZeroPlan, translate

__all__ = [
    "FSDPConfig",
    "MixedPrecision",
    "Prepared",
    "TensorConfig",
    "ZeroPlan",
    "partition",
    "prepare",
    "translate",
    "units_of",
]
