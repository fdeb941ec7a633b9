"""`torch.cond`, `while_loop`, `scan`, `associative_scan` and `map`: what their Python does once is recorded, as that of `if` and `for` is.

These operators take functions, which a trace cannot hold. Run by themselves they call their functions one after another, and so they do
while a model is recorded: a branch is taken, a loop runs. What decides is a question about values (see
`smpc.tracer.guards`): known where it depends on inputs and buffers alone, and guarded; otherwise the module around the
operator is called whole.

    torch.cond(lengths.max() > 4, long, short, (x,))        the nodes of `long(x)`, and a guard
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch._higher_order_ops import utils
from torch._higher_order_ops.associative_scan import associative_scan_op, generic_associative_scan
from torch._higher_order_ops.cond import cond_op
from torch._higher_order_ops.map import map_dense, map_impl
from torch._higher_order_ops.scan import generic_scan, scan_op
from torch._higher_order_ops.while_loop import while_loop_dense, while_loop_op

if TYPE_CHECKING:
    from smpc.tracer.recording.recorder import Recorder


def _cond(pred: Any, true_fn: Callable[..., Any], false_fn: Callable[..., Any], operands: Any) -> Any:
    return true_fn(*operands) if pred else false_fn(*operands)


def _scan(combine_fn: Callable[..., Any], init: Any, xs: Any, additional_inputs: Any = ()) -> Any:
    return generic_scan(combine_fn, init, xs, additional_inputs=additional_inputs)  # type: ignore[no-untyped-call]


def _associative_scan(combine_fn: Callable[..., Any], xs: Any, additional_inputs: Any = ()) -> Any:
    return generic_associative_scan(combine_fn, xs, additional_inputs=additional_inputs)  # type: ignore[no-untyped-call]


_WAY_OUT = (
    "what to do: take an implementation without it (attn_implementation='sdpa' in place of 'flex_attention'), "
    "or have the module called whole that makes these functions (leaf_modules=[...], smpc.mark_leaf)"
)

_DIRECTLY: dict[Any, Callable[..., Any]] = {
    cond_op: _cond,
    while_loop_op: while_loop_dense,
    scan_op: _scan,
    associative_scan_op: _associative_scan,
    map_impl: map_dense,
}


def is_higher_order(func: Callable[..., Any]) -> bool:
    """Whether the call is that of an operator which takes functions."""
    return isinstance(func, torch._ops.HigherOrderOperator)


def run(recorder: Recorder, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """What the operator returns; what its functions call is recorded. Raises UntraceableError for other operators."""
    if func not in _DIRECTLY:
        what = f"torch.ops.higher_order.{func.__name__} takes Python functions, which a trace cannot hold"
        raise recorder.error(what, way_out=_WAY_OUT)
    with recorder:
        return _DIRECTLY[func](*args, **kwargs)


@contextmanager
def without_compiling() -> Iterator[None]:
    """In this context these operators are not compiled before they run, which they are otherwise, if only by Dynamo."""
    original = utils._hop_compile_and_call

    def call(function: Callable[..., Any], args: Any, kwargs: Mapping[str, Any] | None = None) -> Any:
        return function(*args, **(kwargs or {}))

    utils._hop_compile_and_call = call
    try:
        yield
    finally:
        utils._hop_compile_and_call = original
