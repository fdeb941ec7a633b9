"""Models that run in place as they were recorded and rewritten: the same module, names and submodules, with wrappers around them.

    vars(model)["forward"] = InPlace(model, whole_parameters(model), rewrite)
    model(...)                            runs what `rewrite` makes of a recording of this call's inputs
    model = FullyShardedDataParallel(model, auto_wrap_policy=...)    or fully_shard, checkpoint_wrapper, ... on any of its modules

    before    model.layers[0](h)                   the layer's own Python
    after     model.layers[0](function, h, ...)    what the rewritten program does inside of the layer, run by calling the layer: whatever
                                                   is around it gathers parameters, checkpoints and offloads as if it ran its own

Modules that the rewriting leaves intact are called as they are. A recording belongs to one signature of the inputs; another is made when
it is needed, of a skeleton: the model as it is now, without wrappers, with whole parameters on the meta device.
"""

from smpc.in_place.forward import InPlace
from smpc.in_place.model_copy import WholeParameter, skeleton, whole_parameters

__all__ = ["InPlace", "WholeParameter", "skeleton", "whole_parameters"]
