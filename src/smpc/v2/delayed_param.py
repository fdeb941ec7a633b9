"""`DelayedParamIniter`: models made on the meta device, whose parameters get memory and values when FSDP wraps them.

    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    initer = DelayedParamIniter(model)
    with initer.validate_params_and_buffers_inited():
        model = FSDP(model, param_init_fn=initer.get_param_init_fn(), post_param_init_fn=initer.get_post_param_init_fn(), ...)

Each module's own parameters (not its children's) are drawn by the model's own initializers: `_init_weights` of Hugging Face's models,
`reset_parameters` of other modules. A parameter's values depend only on the seed and its name, so they are the same on every rank,
whatever the degrees. They differ from the values that the model would have drawn without the delay.

Source: "torch.sagemaker.delayed_param.DelayedParamIniter" in the public reference of SMP v2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from smpc.executor.sharded_state import replacement
from smpc.nn.init.delayed import draw_module, owners_of
from smpc.v2.logger import get_logger
from smpc.v2.session.config import SessionConfig
from smpc.v2.state_handler import state
from smpc.v2.transforming.slices import ParameterPart, slices_of
from smpc.v2.utils.module_utils import default_device, empty_module_params, move_buffers_to_device

__all__ = ["DelayedParamIniter"]


class DelayedParamIniter:
    """See the module's docstring.

    `init_method_using_config`: a function of a module that gives its own parameters and buffers memory and values; None: found by itself.
    `verbose`: log every module that is initialized.
    """

    def __init__(
        self, model: nn.Module, init_method_using_config: Callable[..., Any] | None = None, verbose: bool = False
    ) -> None:
        self._model = model
        self._init = init_method_using_config
        self._verbose = verbose
        self._names = {id(module): name for name, module in model.named_modules()}
        self._owners = owners_of(model)
        self._modules = list(model.modules())  # kept, so that no other object gets one of the identities above
        self._numbers = {id(p): p.numel() for p in model.parameters()}
        # The present parameter of each name; names of shared weights have the same one.
        self._parameters = {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}
        self._done: set[int] = set()
        self._slices = slices_of(model)

    def get_param_init_fn(self) -> Callable[[nn.Module], None]:
        """For FSDP's `param_init_fn`: fills a module's own parameters and buffers, if any are on the meta device."""
        return self._fill

    def get_post_param_init_fn(self) -> Callable[..., None]:
        """For FSDP's `post_param_init_fn`: ties shared weights again. The model must have a method `tie_weights`."""
        tie = getattr(self._model, "tie_weights", None)
        if tie is None:
            raise AttributeError(
                f"get_post_param_init_fn: expected {type(self._model).__name__} to have a method tie_weights, which ties its shared weights"
            )

        def post(module: nn.Module | None = None) -> None:
            tie()

        return post

    def count_num_params(self, module: nn.Module, *args: nn.Parameter) -> None:
        """Counts parameters of a module as initialized: those that are given, or all of its own."""
        name = self._names.get(id(module), "")
        own = dict(module.named_parameters(recurse=False))
        for each, parameter in own.items():
            known = self._parameters.get(f"{name}.{each}" if name else each)
            if known is not None and (not args or any(parameter is given for given in args)):
                self._done.add(known)

    @contextmanager
    def validate_params_and_buffers_inited(self, enabled: bool = True) -> Iterator[None]:
        """Inside, everything is to be initialized: AssertionError at the end if a parameter is not, or anything is on the meta device."""
        self._done.clear()
        yield
        if not enabled:
            return
        found, expected = sum(self._numbers[each] for each in self._done), sum(self._numbers.values())
        missing = [name for name, each in self._parameters.items() if each not in self._done]
        if found != expected:
            raise AssertionError(
                f"expected {expected} initialized parameters, found {found}; nothing has initialized {', '.join(missing[:10])}"
            )
        named = [*self._model.named_parameters(), *self._model.named_buffers()]
        left = [name for name, tensor in named if tensor.is_meta]
        if left:
            raise AssertionError(f"expected nothing on the meta device, found {', '.join(left[:10])}")
        if self._verbose:
            get_logger().info("%d parameters are initialized", found)

    @torch.no_grad()
    def _fill(self, module: nn.Module) -> None:
        name = self._names.get(id(module))
        own = dict(module.named_parameters(recurse=False))
        late = [each for each, parameter in own.items() if parameter.is_meta]
        buffers = [each for each, buffer in module.named_buffers(recurse=False) if buffer.is_meta]
        if name is None or not (late or buffers):
            return
        slices = self._make_whole(module, name, late)
        if self._init is not None:
            self._init(module)
        else:
            device = default_device()
            empty_module_params(module, device)
            move_buffers_to_device(module, device)
            wanted = {each: f"{name}.{each}" if name else each for each in late}
            unfilled = draw_module(module, name, self._owners.get(id(module)), _seed(), wanted)
            if unfilled:
                raise AssertionError(
                    f"delayed initialization: nothing fills {', '.join(unfilled)}; give {type(module).__name__} a method "
                    "reset_parameters, or pass init_method_using_config"
                )
        for each, part in slices.items():
            whole = module._parameters[each]
            assert whole is not None
            module._parameters[each] = replacement(whole, part.of(whole))
        self.count_num_params(module, *(getattr(module, each) for each in late))
        if self._verbose:
            get_logger().info("initialized %s: %s", name or type(module).__name__, ", ".join([*late, *buffers]))

    def _make_whole(self, module: nn.Module, name: str, late: list[str]) -> dict[str, ParameterPart]:
        """Replaces slices by whole parameters, so that draws do not depend on the degree; returns how to cut them."""
        if self._slices is None:
            return {}
        full = {each: f"{name}.{each}" if name else each for each in late}
        found = {each: self._slices[full[each]] for each in late if full[each] in self._slices}
        for each, part in found.items():
            own = module._parameters[each]
            assert own is not None
            empty = torch.empty(part.shape, dtype=own.dtype, device="meta")
            module._parameters[each] = replacement(own, empty)
        return found


def _seed() -> int:
    return int(state.random_seed) if state.is_initialized else SessionConfig().random_seed
