"""Sharded data parallelism on torch's `fully_shard`, below everything that trains: one implementation for programs, scripts and FSDP code.

    units = find_units(model)                                    which modules are gathered together: the repeated blocks
    sharded = shard(model, units, mesh, ShardingOptions(keep=Keep.NEVER))
    optimizer = AdamW(model.parameters())                        parts: DTensors of which a rank has its rows

    sharded.begin_step()                                         a step of several microbatches
    for microbatch in batch[:-1]: model(microbatch).backward()
    sharded.last_backward(); model(batch[-1]).backward()
    sharded.end_step()
    optimizer.step()                                             the gradients are averaged over the mesh

    units             `smpc.sharding.units`         by repetition, by size, by classes, by name; what several share goes to whoever has all
    shard             `smpc.sharding.shard`         parameters in parts, how long whole ones stay, when gradients are reduced
    dtensors          `smpc.sharding.dtensors`      DTensors and ordinary tensors alike
    Incoming          `smpc.sharding.shard`         tensors that one rank has, to all, with room for one
    in_step           ranks whose batches take other ways through a model, or differentiate other units of it
    OutsideUses       `smpc.sharding.outside_uses`  parameters that code uses without calling their block
    used_parameters   which parameters a step has used on any rank
    wide_gradients    gradients of half-precision parameters in fp32

`mesh` is a DeviceMesh of (shard) or (replica, shard), as `smpc.mesh.device_mesh.device_mesh` makes it. Tensor parallelism goes with it: a
parameter is then a slice, and its parts are parts of the slice. A unit may have a mesh and a divisor of its own, as experts need.
Without steps, a sharded model is trained as any model of `fully_shard`: every backward averages its gradients.
"""

from smpc.config.keep import Keep
from smpc.sharding.outside_uses import OutsideUses
from smpc.sharding.shard import Sharded, ShardingOptions, Unit, exchange, shard, undivided
from smpc.sharding.units import find_units, units_of_classes

__all__ = [
    "Keep",
    "OutsideUses",
    "Sharded",
    "ShardingOptions",
    "Unit",
    "exchange",
    "find_units",
    "shard",
    "undivided",
    "units_of_classes",
]
