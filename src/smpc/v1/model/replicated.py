"""`model.module` with `ddp`: a wrapper around the model, which scripts written for `ddp` expect.

    model = smp.DistributedModel(net)     # with ddp: true
    model.module                          # Replicated
    model.module.module                   # net

Names are the model's, without a prefix, and attributes that the wrapper does not have are the model's. Hooks on the wrapper are hooks
on the model, as steps call the model itself.
"""

from __future__ import annotations

from typing import Any

from torch import nn

_HOOKS = [name for name in dir(nn.Module) if name.startswith("register_") and name.endswith("_hook")]
# Names of nn.Module that the wrapper takes from the model.
_OF_THE_MODEL = frozenset(
    (*_HOOKS, "named_parameters", "named_buffers", "named_modules", "state_dict", "load_state_dict", "compile")
)


class Replicated(nn.Module):
    """A model, wrapped; see above."""

    module: nn.Module

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.training = module.training

    def __getattribute__(self, name: str) -> Any:
        return getattr(self.module, name) if name in _OF_THE_MODEL else super().__getattribute__(name)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's result."""
        return self.module(*args, **kwargs)
