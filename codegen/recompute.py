"""How checkpointed regions run: with torch's non-reentrant checkpoint, in whatever way they were requested.

    run_checkpointed    what stage code calls for a region, and `smp.checkpoint` without a pipeline
    Checkpointing       a context in which the checkpoints that a module's own Python asks torch for become such regions too

Non-reentrant checkpoints leave the autograd graph as it is, so gradients are summed in the order of a run without checkpoints, bit for
bit; with reentrant ones the gradient of a parameter that is used inside and outside comes in two parts. The re-run has the random state
(CPU and device) and the autocast state of the first run, and the same checkpoints inside.

Buffers that a region changes, such as BatchNorm's running statistics, are changed by the first run alone, unlike in plain
PyTorch: the re-run gets copies with the values of before the first run, which are dropped. So checkpointing changes no value at all.

    >>> y = run_checkpointed(lambda x: torch.relu(x) * 2, torch.ones(3, requires_grad=True))
    >>> y.sum().backward()                          # computes relu again
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import checkpoint

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
Owner = tuple[nn.Module, str]  # a module and the name of its buffer


def run_checkpointed(
    function: Callable[..., Any],
    *args: Any,
    preserve_rng_state: bool = True,
    buffers: Sequence[Owner] = (),
    keep_values: bool = True,
) -> Any:
    """`function(*args)`, of which only `args` are kept for the backward pass; `buffers` are those that the function may change.

    With `keep_values` the second run finds the values that the buffers had before the first run. Without, it finds their present
    values, which saves memory and is enough for buffers that are only written. If gradients are off, the function is simply called.
    """
    if not torch.is_grad_enabled():
        return function(*args)
    return checkpoint.checkpoint(
        function,
        *args,
        use_reentrant=False,
        preserve_rng_state=preserve_rng_state,
        context_fn=lambda: _protecting_from_recompute(buffers, keep_values),
    )


def buffer_owners(module: nn.Module, names: Sequence[str]) -> list[Owner]:
    """Where a module holds the buffers of these names, under every name that they have."""
    wanted = {id(tensor) for name in names if (tensor := _find_buffer(module, name)) is not None}
    return [
        (owner, name)
        for owner in module.modules()
        for name, value in owner._buffers.items()
        if value is not None and id(value) in wanted
    ]


def _find_buffer(module: nn.Module, path: str) -> Tensor | None:
    owner, _, name = path.rpartition(".")
    return module.get_submodule(owner)._buffers.get(name)


def _protecting_from_recompute(buffers: Sequence[Owner], keep_values: bool) -> Contexts:
    before = _copies_of_buffers(buffers) if keep_values else None
    return nullcontext(), _in_place_of(buffers, before)


def _copies_of_buffers(buffers: Sequence[Owner]) -> list[Tensor]:
    """Copies of the buffers; two names of one buffer have one copy."""
    memo: dict[int, Tensor] = {}
    for owner, name in buffers:
        value = owner._buffers[name]
        assert value is not None, name
        if id(value) not in memo:
            memo[id(value)] = value.detach().clone()
    return [memo[id(owner._buffers[name])] for owner, name in buffers]


@contextmanager
def _in_place_of(buffers: Sequence[Owner], values: Sequence[Tensor] | None) -> Iterator[None]:
    """The buffers are tensors of these values (None: of their own), and afterwards again what they are now."""
    now = [owner._buffers[name] for owner, name in buffers]
    for (owner, name), value in zip(buffers, values or _copies_of_buffers(buffers), strict=True):
        owner._buffers[name] = value
    try:
        yield
    finally:
        for (owner, name), held in zip(buffers, now, strict=True):
            setattr(owner, name, held)  # the region may have rebound it, in the model too


class Checkpointing:
    """While it is entered, every checkpoint of torch's in this thread becomes a non-reentrant one; `inputs` are the tensors that they keep.

    Checkpoints inside others are not counted: what they keep is dropped with the rest.
    """

    def __init__(self, inputs: list[Tensor] | None = None) -> None:
        self.inputs = inputs
        self._depth = 0

    def __enter__(self) -> Checkpointing:
        with _TORCH.lock:
            _TORCH.users += 1
            if _TORCH.users == 1:
                _TORCH.reentrant = checkpoint.CheckpointFunction
                _TORCH.generator = checkpoint._checkpoint_without_reentrant_generator
                checkpoint.CheckpointFunction = _NonReentrant  # type: ignore[misc, assignment]
                checkpoint._checkpoint_without_reentrant_generator = _generator_to_recompute_with
        _ENTERED.stack.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        _ENTERED.stack.remove(self)
        with _TORCH.lock:
            _TORCH.users -= 1
            if not _TORCH.users:
                checkpoint.CheckpointFunction = _TORCH.reentrant  # type: ignore[misc]
                checkpoint._checkpoint_without_reentrant_generator = _TORCH.generator

    def around(
        self,
        function: Callable[..., Any],
        preserve_rng_state: bool = True,
        context_fn: Callable[[], Contexts] = checkpoint.noop_context_fn,
        *args: Any,
        **kwargs: Any,
    ) -> Iterator[None]:
        """In the place of torch's generator behind non-reentrant checkpoints."""

        def contexts() -> Contexts:
            forward, again = context_fn()
            return forward, _nested_contexts(Checkpointing(), again)

        if self.inputs is not None and not self._depth:
            self.inputs += [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        self._depth += 1
        try:
            yield from _TORCH.generator(function, preserve_rng_state, contexts, *args, **kwargs)
        finally:
            self._depth -= 1


def may_checkpoint(modules: Iterable[nn.Module], source: str) -> bool:
    """Whether stage code that calls these modules whole may ask torch for checkpoints: torch's own modules and functions do not."""
    inside = (module for each in modules for module in each.modules())
    return "function(" in source or not all(map(_is_torchs, inside))


def _is_torchs(module: nn.Module) -> bool:
    has_hooks = module._forward_pre_hooks or module._forward_hooks
    return type(module).__module__.startswith("torch.") and "forward" not in vars(module) and not has_hooks


class _Entered(threading.local):
    """The contexts that this thread is in, the innermost last."""

    def __init__(self) -> None:
        self.stack: list[Checkpointing] = []


class _TorchCheckpoints:
    """torch's own two functions, and how many contexts, in all threads, have others in their place: torch has one of each in a process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.users = 0
        self.reentrant: Any = checkpoint.CheckpointFunction
        self.generator: Any = checkpoint._checkpoint_without_reentrant_generator


_ENTERED = _Entered()
_TORCH = _TorchCheckpoints()


def _generator_to_recompute_with(*args: Any, **kwargs: Any) -> Iterator[None]:
    """torch's generator, as the innermost context of this thread has it."""
    found: Iterator[None] = (_ENTERED.stack[-1].around if _ENTERED.stack else _TORCH.generator)(*args, **kwargs)
    return found


@contextmanager
def _nested_contexts(*contexts: AbstractContextManager[Any]) -> Iterator[None]:
    """The contexts of a checkpointed region, one inside the other."""
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


class _NonReentrant:
    """Replaces torch's reentrant checkpoint. Like it, it makes no gradients if no argument wants one."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        if not _ENTERED.stack:
            return _TORCH.reentrant.apply(function, preserve_rng_state, *args)
        wanted = any(isinstance(value, Tensor) and value.requires_grad for value in args)
        if not (torch.is_grad_enabled() and wanted):
            with torch.no_grad():
                return function(*args)
        return run_checkpointed(function, *args, preserve_rng_state=preserve_rng_state)
