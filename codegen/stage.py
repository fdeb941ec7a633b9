"""Stage modules: the part of a model that one stage runs, as an nn.Module.

A stage module holds the very parameters, buffers and submodules of the model, under their fully qualified names, and nothing that
other stages own. Submodules that the stage calls whole are the model's own objects, so their hooks, activation checkpointing and
compiled forms keep working; above them are `Container`s, which only hold.

    model.transformer.h.3 called whole by stage 1      stage.transformer.h[3] is model.transformer.h[3]
    lm_head.weight read by stage 1                      stage.lm_head.weight is model.lm_head.weight

`compile_stage`: what `torch.compile` was asked for in a model that is cut into stages.

    block.compile(), torch.compile(block)       the stage that calls the block whole calls the compiled one
    model.compile(), torch.compile(model)       each stage is compiled, with the options of the model
    a module that the cut separates             its parts run as they are; `compile_stage` says so
    schedules with split backwards              nothing is compiled, as the halves of a backward are ours; `compile_stage` says so

A recording sees none of it: it runs what was compiled from.
"""

from __future__ import annotations

import hashlib
import importlib
import linecache
import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from smpc.codegen.printer import uses_tensor_ops
from smpc.codegen.program import StageCode
from smpc.codegen.recompute import buffer_owners, run_checkpointed
from smpc.errors import CodegenError
from smpc.tracer.structure import split_item
from smpc.tracer.targets import TENSOR_OPS, function


class Container(nn.Module):
    """Holds parts of one module of the model. Buffers that are rebound here are rebound in the model too."""

    _origin: nn.Module

    def __init__(self, origin: nn.Module) -> None:
        super().__init__()
        # Not a submodule: the model must not appear among this module's own parts.
        object.__setattr__(self, "_origin", origin)
        self.training = origin.training

    def __getitem__(self, index: int) -> Any:
        """Member `index` of a list of modules or parameters."""
        return getattr(self, str(index))

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in self.__dict__.get("_buffers", ()):
            setattr(self._origin, name, value)
        elif isinstance(value, nn.Parameter):
            return  # FSDP puts whole parameters in the place of parts, and back: not the model's business
        elif isinstance(value, torch.Tensor) and name not in vars(self._origin):
            self._origin.register_buffer(name, value)  # as the model's own forward does


class StageModule(Container):
    """Base of the classes that code generation writes; `_device` stands for the device of the trace.

    `differentiates`: whether autograd runs in its forward. A split backward rearranges what autograd sees, so there it stays whole.
    """

    differentiates = False

    def __init__(self, origin: nn.Module, device: torch.device) -> None:
        super().__init__(origin)
        self._device = device
        self._held_buffers: list[tuple[dict[str, Any], str, dict[str, Any]]] = []  # (container's, name, model's)
        self._held_attributes: list[tuple[nn.Module, str, nn.Module]] = []  # (container, name, the model's module)

    def hold_buffer(self, owner: nn.Module, name: str, origin: nn.Module) -> None:
        """Registers a buffer of the module `origin` in the container `owner`."""
        owner.register_buffer(name, origin._buffers[name], name not in origin._non_persistent_buffers_set)
        self._held_buffers.append((owner._buffers, name, origin._buffers))

    def note_attribute(self, owner: nn.Module, name: str, origin: nn.Module) -> None:
        """The container `owner` holds a tensor, or a list of tensors, which is an attribute of the module `origin`."""
        self._held_attributes.append((owner, name, origin))

    def checkpoint(
        self,
        region: Callable[..., Any],
        *values: Any,
        preserve_rng_state: bool = True,
        buffers: tuple[str, ...] = (),
    ) -> Any:
        """`region(*values)`, computed again for the backward pass; `buffers` names those that it uses and that change."""
        owners = buffer_owners(self, buffers) if buffers else ()
        return run_checkpointed(region, *values, preserve_rng_state=preserve_rng_state, buffers=owners)

    @property
    def holds_tensors(self) -> bool:
        """Whether there is anything to `refresh`."""
        return bool(self._held_buffers or self._held_attributes)

    def refresh(self) -> None:
        """Takes over the tensors of buffers and attributes that the model, or another stage module over it, has replaced."""
        for held, name, model in self._held_buffers:
            held[name] = model[name]
        for owner, name, origin in self._held_attributes:
            vars(owner)[name] = vars(origin)[name]


def build_stage(code: StageCode, model: nn.Module, device: torch.device | str = "cpu") -> StageModule:
    """The stage's module over the parameters, buffers and submodules of `model`."""
    stage = stage_class(code)(model, torch.device(device))
    inside = tuple(f"{path}." for path in code.modules)
    held = [path for path in code.attributes if not path.startswith(inside)]
    # In the model's order, so that the first of several names for one parameter is the first here too.
    order = {name: i for i, (name, _) in enumerate(model.named_modules(remove_duplicate=False))}
    places = [(order[path], path, True) for path in _outermost_stage_paths(code.modules)]
    places += [(order[_stage_owner(path)], path, False) for path in held]
    for _, path, is_module in sorted(places, key=lambda place: place[0]):
        if is_module:
            owner, name = _stage_container(stage, model, path)
            _check_free(owner, name, path)
            owner.add_module(name, model.get_submodule(path))
        else:
            _hold_tensor(stage, model, path)
    return stage


def stage_class(code: StageCode) -> type[StageModule]:
    """The class that the code defines. Tracebacks show its source as long as it lives."""
    namespace: dict[str, Any] = {
        "F": F, "StageModule": StageModule, "function": function, "importlib": importlib, "torch": torch,
    }  # fmt: skip
    if uses_tensor_ops(code.source):
        namespace["tensor_ops"] = importlib.import_module(TENSOR_OPS)
    filename = f"<smpc stage {code.index} {hashlib.sha256(code.source.encode()).hexdigest()[:12]}>"
    lines = code.source.splitlines(keepends=True)
    linecache.cache[filename] = (len(code.source), None, lines, filename)
    exec(compile(code.source, filename, "exec"), namespace)
    made: type[StageModule] = namespace[code.class_name]
    weakref.finalize(made, _forget_source, filename, lines).atexit = False
    return made


def _forget_source(filename: str, lines: list[str]) -> None:
    """Drop what tracebacks show of a stage that is gone, unless a later stage has the same source."""
    entry: Any = linecache.cache.get(filename)
    if entry is not None and entry[-2] is lines:
        del linecache.cache[filename]


def _stage_owner(path: str) -> str:
    """The module that a parameter, buffer or tensor attribute belongs to."""
    return split_item(path)[0].rpartition(".")[0]


def _outermost_stage_paths(paths: Iterable[str]) -> list[str]:
    """The paths that are not inside another one."""
    found: list[str] = []
    for path in sorted(paths, key=lambda path: path.split(".")):
        if not found or not path.startswith(f"{found[-1]}."):
            found.append(path)
    return found


def _stage_container(stage: StageModule, model: nn.Module, path: str) -> tuple[nn.Module, str]:
    """The container that holds `path`, made where it does not exist, and the last part of the path."""
    *parents, name = split_item(path)[0].split(".")
    owner: nn.Module = stage
    origin = model
    for part in parents:
        origin = origin.get_submodule(part)
        if part not in owner._modules:
            _check_free(owner, part, path)
            owner.add_module(part, Container(origin))
        owner = owner.get_submodule(part)
    return owner, name


def _check_free(owner: nn.Module, name: str, path: str) -> None:
    """Raise CodegenError if the name is one that stage modules use themselves."""
    if name in vars(owner) or hasattr(type(owner), name):
        raise CodegenError(
            f"{path!r} of the model: {name!r} is what a stage calls something of its own; give the attribute another name"
        )


def _hold_tensor(stage: StageModule, model: nn.Module, path: str) -> None:
    """Gives a stage the parameter, buffer or attribute of the model at `path`."""
    owner, name = _stage_container(stage, model, path)
    origin = model.get_submodule(_stage_owner(path))
    if name in origin._parameters:
        owner.register_parameter(name, origin._parameters[name])
    elif name in origin._buffers:
        stage.hold_buffer(owner, name, origin)
    elif name in vars(origin):  # else a buffer that the model's own forward registers
        setattr(owner, name, getattr(origin, name))
        stage.note_attribute(owner, name, origin)


Compiler = Callable[[Callable[..., Any]], Callable[..., Any]]


def compiler_of(module: nn.Module) -> Compiler | None:
    """A function that compiles functions as the module was compiled; None if it was not."""
    found: Compiler | None = vars(module).get("dynamo_ctx")  # of an OptimizedModule
    if found is not None or module._compiled_call_impl is None:
        return found
    # module.compile() keeps a function, which has it as a free variable.
    cells: Any = getattr(module._compiled_call_impl, "__closure__", None) or ()
    contexts = sys.modules["torch._dynamo.eval_frame"].__dict__["_TorchDynamoContext"]
    return next((cell.cell_contents for cell in cells if isinstance(cell.cell_contents, contexts)), None)


def compile_stage(stage: nn.Module, code: StageCode, model: nn.Module, *, splits: bool) -> str:
    """Compiles the stage if the model is compiled. Returns the names of modules that stay uncompiled, for a warning; "" if none.

    `splits`: the schedule splits backwards.
    """
    if "torch._dynamo" not in sys.modules:
        return ""  # nothing can have been compiled
    whole = compiler_of(model)
    if whole is not None and not splits:
        stage._compiled_call_impl = whole(stage._call_impl)
        return ""
    compiled = [name for name, module in model.named_modules() if compiler_of(module) is not None]
    if compiled and splits:
        return (
            f"torch.compile has no effect on {_listed_cuts(compiled)}: the schedule splits backwards, which compiled code does not; use "
            "1f1b, interleaved-1f1b or gpipe"
        )
    cut = [name for name in compiled if _is_cut(name, code)]
    if not cut:
        return ""
    return (
        f"torch.compile has no effect on {_listed_cuts(cut)}: the cut separates what is inside, so stage {code.index} runs its part "
        "uncompiled; compile modules that stay whole (blocks), or the whole model, whose stages are then compiled"
    )


def _is_cut(name: str, code: StageCode) -> bool:
    """Whether a stage uses what is inside a module, but calls neither that one nor one around it."""
    parts = name.split(".")
    is_called = any(".".join(parts[: end + 1]) in code.modules for end in range(len(parts)))
    return not is_called and any(path.startswith(f"{name}.") for path in (*code.modules, *code.attributes))


def _listed_cuts(names: list[str]) -> str:
    shown = [repr(name) if name else "the model" for name in names[:3]]
    return ", ".join(shown) + (f" and {len(names) - 3} more modules" if len(names) > 3 else "")
