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

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from smpc.errors import UsageError
from smpc.executor.parameter_slices import replacement
from smpc.nn.init.delayed import draw_module, owners_of
from smpc.nn.init.module_initializers import Initializers, writes_of
from smpc.v2.logger import get_logger
from smpc.v2.session.config import SessionConfig
from smpc.v2.state_handler import state
from smpc.v2.transforming.transformed_slices import ParameterPart, slices_of
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
        self._modules = list(model.modules())  # kept, so that no other object gets one of the identities above
        self._numbers = {id(p): p.numel() for p in model.parameters()}
        # The present parameter of each name; names of shared weights have the same one. Where it is, and its first name.
        self._parameters = {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}
        self._first_names = {each: name for name, each in reversed(self._parameters.items())}
        self._places: dict[int, list[tuple[nn.Module, str]]] = {}
        for name, each in self._parameters.items():
            owner, _, own = name.rpartition(".")
            self._places.setdefault(each, []).append((model.get_submodule(owner), own))
        self._initializers = Initializers(model, owners_of(model))
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
        held = {each: p for each, p in module.named_parameters(recurse=False) if p.is_meta}
        buffers = [each for each, buffer in module.named_buffers(recurse=False) if buffer.is_meta]
        if name is None or not (held or buffers):
            return
        if any(isinstance(parameter, DTensor) for parameter in held.values()):
            raise UsageError(
                f"delayed initialization: expected modules that are whole, found {self._listed(name, [*held])} in the parts of "
                "fully_shard; call get_param_init_fn() of each module before fully_shard"
            )
        late = [each for each in held if not self._share(module, each, self._full(name, each))]
        written = {
            each: math.inf if self._is_shared(self._full(name, each)) else writes_of(held[each]) for each in late
        }
        ready = {each: p for each, p in module._parameters.items() if p is not None and not p.is_meta}
        slices = self._make_whole(module, name, late)
        if self._init is not None:
            self._init(module)
        elif late or buffers:
            self._draw(module, name, late, buffers, written)
        module._parameters.update(ready)  # they have values
        for each, part in slices.items():
            whole = module._parameters[each]
            assert whole is not None
            module._parameters[each] = replacement(whole, part.of(whole))
        self.count_num_params(module, *(getattr(module, each) for each in late))
        if self._verbose:
            get_logger().info("initialized %s: %s", name or type(module).__name__, ", ".join([*late, *buffers]))

    def _draw(
        self, module: nn.Module, name: str, late: list[str], buffers: list[str], written: Mapping[str, float]
    ) -> None:
        """Fills a module as its constructors did. AssertionError for what was filled by something else, or by nothing."""
        fills, strange = self._initializers.of(module, written)
        if strange:
            raise AssertionError(
                f"delayed initialization: expected {type(module).__name__} to have its values from reset_parameters, or from _init_weights "
                f"of a module around it, found that something else has written {self._listed(name, strange)}, of which the meta device "
                "keeps nothing; pass init_method_using_config, a function that gives a module its values"
            )
        device = default_device()
        empty_module_params(module, device)
        move_buffers_to_device(module, device)
        wanted = {each: self._first_names[self._parameters[self._full(name, each)]] for each in late}
        unfilled = draw_module(module, name, fills, _seed(), wanted, buffers)
        if unfilled:
            raise AssertionError(
                f"delayed initialization: nothing fills {self._listed(name, unfilled)}; give {type(module).__name__} a method "
                "reset_parameters, make it outside of torch.device('meta'), or pass init_method_using_config"
            )

    @staticmethod
    def _full(name: str | None, own: str) -> str:
        return f"{name}.{own}" if name else own

    def _listed(self, name: str, own: list[str]) -> str:
        return ", ".join(self._full(name, each) for each in own)

    def _is_shared(self, full: str) -> bool:
        return len(self._places[self._parameters[full]]) > 1

    def _share(self, module: nn.Module, own: str, full: str) -> bool:
        """Whether a parameter is another module's, too, and has been filled there: then it is the same one here."""
        first, at = self._places[self._parameters[full]][0]
        if first is module:
            return False
        self._fill(first)
        made = first._parameters.get(at)
        if made is None or made.is_meta or isinstance(made, DTensor):  # FSDP has taken it
            return False
        module._parameters[own] = made
        return True

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
