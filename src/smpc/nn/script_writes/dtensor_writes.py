"""Writes of scripts into tensors of which ranks have parts (DTensors): what one process would write.

    with torch.no_grad():
        weight[3].zero_()                  torch gathers row 3, and drops what is written into that copy: written into the parts
        weight[mask] = 0; weight.tril_()   torch has no way to do it in parts: done with the whole tensor, which is cut
        weight.normal_()                   torch draws for each part, alike on all ranks: drawn for the whole, which is cut
        weight.data = values               torch leaves the part as it is: written into it
        weight.mul_(0.9)                   torch's own: each rank writes into its part
        total.add_(weight.norm())          torch has no way to write a number of parts into an ordinary tensor: all ranks' number is written
    weight.norm().item()               torch gives this rank's number, but all ranks' for (weight.norm() ** 2).item(): all ranks' number

    rank 0    row 0  row 1                weight[3]     a copy on every rank
    rank 1    row 2  row 3                .zero_()      row 3 of a whole tensor, of which rank 1 takes its part

A view of a divided tensor is noted if torch has copied it; views of such copies are, too. All ranks must run the same line, as torch asks
of operations on DTensors: a rank that others leave alone with what they do together is told so (`_meet`). Ordinary tensors that take part
(a mask, new rows) must be the same on all ranks, which is compared.

What autograd records is left to torch. `_custom_op_handlers` of DTensor is the place where torch asks before each operation on one.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from smpc.errors import UsageError
from smpc.executor.collectives import TensorGroup
from smpc.executor.shared_draws import draw_as_first
from smpc.nn.script_writes.callers import line_of_script
from smpc.sharding.dtensors import digest

Arguments = tuple[Any, ...]
Handler = Callable[[Any, Arguments, Mapping[str, Any]], Any]
_ATEN = torch.ops.aten


@dataclass(frozen=True, slots=True)
class _CopiedView:
    """What a tensor would be a view of: `steps` of `root`, a divided tensor."""

    root: DTensor
    steps: tuple[Callable[[Tensor], Tensor], ...]

    def of(self, whole: Tensor) -> Tensor:
        for step in self.steps:
            whole = step(whole)
        return whole


_WARNED_AFTER, _LONGEST_WAIT = 30, 270  # seconds
_views: Any = WeakTensorKeyDictionary()  # tensor: _CopiedView
_handlers: Any = DTensor._op_dispatcher._custom_op_handlers


@functools.cache
def write_parts_as_wholes() -> None:
    """See above. torch is changed once, and stays so."""
    for schema in torch._C._jit_get_all_schemas():
        make = _handler_for(schema)
        if make is not None:
            operation = getattr(getattr(_ATEN, schema.name.removeprefix("aten::")), schema.overload_name or "default")
            _handlers[operation] = functools.partial(make, _handlers.get(operation))
    number = _ATEN._local_scalar_dense.default
    _handlers[number] = functools.partial(_number, _handlers.get(number))
    DTensor.data = property(Tensor.data.__get__, _assign_data)  # type: ignore[attr-defined, assignment]


def _handler_for(schema: Any) -> Callable[..., Any] | None:
    if not schema.name.startswith("aten::") or not schema.arguments:
        return None
    first = schema.arguments[0]
    writes = [each for each in schema.arguments if each.alias_info is not None and each.alias_info.is_write]
    if writes:
        is_own = writes == [first] or (writes[0].name == first.name and len(writes) == 1)
        return _write if is_own and str(first.type) == "Tensor" else _write_elsewhere
    if first.alias_info is not None and str(first.type) == "Tensor" and any(each.alias_info for each in schema.returns):
        return _view
    return _draw if schema.name.removeprefix("aten::") in _DRAWS else None


# -- handlers: (torch's own handler, operation, arguments, keyword arguments) -> what the operation returns ----------------------------


def _view(before: Handler | None, operation: Any, args: Arguments, kwargs: Mapping[str, Any]) -> Any:
    source = args[0]
    if not _is_untracked(source):
        return _as_torch_does(before, operation, args, kwargs)
    dim = args[1] if len(args) > 1 and isinstance(args[1], int) else 0
    if operation in _ALONG_A_DIM and any(place.is_shard(dim % source.ndim) for place in source.placements):
        _meet(source)
    result = _as_torch_does(before, operation, args, kwargs)
    view, several = _views.get(source), isinstance(result, (list, tuple))
    for number, made in enumerate(result if several else (result,)):
        if view is not None or not _have_one_memory(source, made):
            step = functools.partial(_seen, operation, args[1:], kwargs, number if several else None)
            root, steps = (source, ()) if view is None else (view.root, view.steps)
            _views[made] = _CopiedView(root, (*steps, step))
    return result


def _seen(operation: Any, args: Arguments, kwargs: Mapping[str, Any], number: int | None, whole: Tensor) -> Tensor:
    found = operation(whole, *args, **kwargs)
    view: Tensor = found if number is None else found[number]
    return view


def _write(before: Handler | None, operation: Any, args: Arguments, kwargs: Mapping[str, Any]) -> Any:
    target = args[0]
    if not isinstance(target, DTensor) and target.numel() == 1:
        return operation(target, *tree_map(_gathered, args[1:]), **tree_map(_gathered, dict(kwargs)))
    if not _is_untracked(target) or torch.Tag.inplace_view in operation.tags:
        return _as_torch_does(before, operation, args, kwargs)
    view = _views.get(target) if _views else None
    given = [each for each in tree_leaves((args[1:], kwargs)) if _is_ordinary(each)]
    draws = torch.Tag.nondeterministic_seeded in operation.tags
    if view is None and not draws and not given:
        try:
            return _as_torch_does(before, operation, args, kwargs)
        except RuntimeError as error:
            if not isinstance(error, NotImplementedError) and "Sharding propagation failed" not in str(error):
                raise
    _check_alike(target, given, operation)
    if view is None and not draws and (torch.Tag.pointwise in operation.tags or operation in _BY_ELEMENT):
        cut = functools.partial(_cut, target)
        operation(target._local_tensor, *tree_map(cut, args[1:]), **tree_map(cut, dict(kwargs)))
    else:
        _write_whole(view, operation, args, kwargs, draws=draws)
    return target


def _write_elsewhere(before: Handler | None, operation: Any, args: Arguments, kwargs: Mapping[str, Any]) -> Any:
    """Into several tensors, or into `out`."""
    if _views and any(isinstance(each, DTensor) and each in _views for each in tree_leaves((args, kwargs))):
        written = [each.name for each in operation._schema.arguments if each.alias_info and each.alias_info.is_write]
        raise UsageError(
            f"{operation}: expected whole tensors or parts of them as {' and '.join(written)}, found a view of a tensor that ranks have in "
            "parts, which torch has copied, so that what is written into it would be lost; write into each view with its own method "
            "(weight[3].zero_())"
        )
    return _as_torch_does(before, operation, args, kwargs)


def _draw(before: Handler | None, operation: Any, args: Arguments, kwargs: Mapping[str, Any]) -> Any:
    source = args[0]
    has_gradient = torch.is_grad_enabled() and not operation._schema.name.endswith("_like")  # of what is drawn
    with torch.set_grad_enabled(has_gradient):
        if not _is_untracked(source):
            return _as_torch_does(before, operation, args, kwargs)
        _draw_alike(source)
        result = operation(*tree_map(_whole, args), **tree_map(_whole, dict(kwargs)))
        return tree_map(lambda each: _divided_like(source, each) if isinstance(each, Tensor) else each, result)


def _number(before: Handler | None, operation: Any, args: Arguments, kwargs: Mapping[str, Any]) -> Any:
    return _as_torch_does(before, operation, tree_map(_of_all_ranks, args), kwargs)


def _of_all_ranks(value: Any) -> Any:
    """The same on all ranks. Collective where ranks have parts of a tensor, or of a sum."""
    if not isinstance(value, DTensor) or all(isinstance(place, Replicate) for place in value.placements):
        return value
    _meet(value)
    return value.full_tensor()


def _gathered(value: Any) -> Any:
    """The number of all ranks, as an ordinary tensor, to be written into one. Collective as `_of_all_ranks` is."""
    found = _of_all_ranks(value)
    return found.to_local() if isinstance(found, DTensor) else found


def _meet(tensor: DTensor) -> None:
    """Waits for the other ranks. UsageError if they do not come: scripts print numbers, or write, on one rank alone."""
    for dim in range(tensor.device_mesh.ndim):
        arrived = torch.zeros(1, device=tensor._local_tensor.device)
        work = dist.all_reduce(arrived, group=tensor.device_mesh.get_group(dim), async_op=True)
        if not _is_done(work, _WARNED_AFTER):
            warnings.warn(str(_is_alone(_WARNED_AFTER)), stacklevel=2)
            if not _is_done(work, _LONGEST_WAIT):
                raise _is_alone(_WARNED_AFTER + _LONGEST_WAIT)


def _is_done(work: Any, seconds: int) -> bool:
    try:
        work.wait(timedelta(seconds=seconds))
    except RuntimeError:
        if work.is_completed():
            raise  # not for want of time
        return False
    return True


def _is_alone(seconds: int) -> UsageError:
    return UsageError(
        f"{line_of_script()}: expected a number of a tensor that ranks have in parts, or a write into one, on all of them at once, found "
        f"others that have not come to this line in {seconds} s; run the line on every rank, and print a number on one"
    )


def _as_torch_does(before: Handler | None, operation: Any, args: Arguments, kwargs: Mapping[str, Any]) -> Any:
    if before is not None:
        return before(operation, args, kwargs)
    with _left_alone(operation):
        return operation(*args, **kwargs)


@contextlib.contextmanager
def _left_alone(operation: Any) -> Iterator[None]:
    own = _handlers.pop(operation, None)
    try:
        yield
    finally:
        if own is not None:
            _handlers[operation] = own


# -- whole tensors and their parts ---------------------------------------------------------------------------------------------------------


def _write_whole(
    view: _CopiedView | None, operation: Any, args: Arguments, kwargs: Mapping[str, Any], *, draws: bool
) -> None:
    """Collective over the ranks that have parts."""
    target: DTensor = args[0]
    root = target if view is None else view.root
    _meet(root)
    if draws:
        _draw_alike(root)
    rest, named = tree_map(_whole, args[1:]), tree_map(_whole, dict(kwargs))
    values = _whole(root).clone()
    place = values if view is None else view.of(values)
    operation(place, *rest, **named)
    root._local_tensor.copy_(_cut(root, values))
    if view is not None:
        torch.autograd.graph.increment_version(root)
        target._local_tensor.copy_(_cut(target, place))


def _whole(value: Any) -> Any:
    if not isinstance(value, DTensor):
        return value
    view = _views.get(value)
    return value.full_tensor() if view is None else view.of(view.root.full_tensor())


def _cut(like: DTensor, value: Any) -> Any:
    """This rank's part of a whole tensor, or of one that is expanded to the shape of `like`."""
    value = _whole(value)
    if not isinstance(value, Tensor) or not value.dim():
        return value
    everywhere = [Replicate()] * like.device_mesh.ndim
    spread = value.to(like.device).expand(like.shape).contiguous()
    found = DTensor.from_local(spread, like.device_mesh, everywhere, run_check=False)
    return found.redistribute(placements=like.placements)._local_tensor


def _divided_like(like: DTensor, value: Tensor) -> DTensor:
    mesh = like.device_mesh
    if value.shape != like.shape:
        return DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)
    part = _cut(like, value).clone()
    return DTensor.from_local(part, mesh, like.placements, run_check=False, shape=like.shape, stride=value.stride())


def _draw_alike(tensor: DTensor) -> None:
    """Ranks draw as the first of those that have the other parts. Collective."""
    mesh = tensor.device_mesh
    for dim in reversed(range(mesh.ndim)):
        draw_as_first(TensorGroup.of(mesh.get_group(dim)), tensor._local_tensor.device)


def _check_alike(tensor: DTensor, given: list[Tensor], operation: Any) -> None:
    """UsageError unless ranks give the same ordinary tensors. Collective."""
    if not given:
        return
    _meet(tensor)
    device, mesh = tensor._local_tensor.device, tensor.device_mesh
    own = torch.stack([digest(each).to(device) for each in given])
    told = torch.stack([own, -own])
    for dim in range(mesh.ndim):
        dist.all_reduce(told, dist.ReduceOp.MAX, mesh.get_group(dim))
    if bool((told[0] != -told[1]).any()):
        raise UsageError(
            f"{operation}: expected the same ordinary tensors on all ranks that have parts of a tensor of shape {list(tensor.shape)}, "
            "found different ones; seed ranks alike (torch.manual_seed), or send one rank's with torch.distributed.broadcast"
        )


def _assign_data(parameter: DTensor, value: Tensor) -> None:
    """`parameter.data = value`."""
    if parameter._local_tensor.is_meta or not isinstance(value, Tensor) or value.is_meta:
        Tensor.data.__set__(parameter, value)  # type: ignore[attr-defined]
    elif value.shape != parameter.shape or value.dtype != parameter.dtype:
        raise UsageError(
            f"weight.data = ...: expected values of shape {list(parameter.shape)} and {parameter.dtype}, as the parameter has them of "
            f"which this rank has a part, found {list(value.shape)} and {value.dtype}; convert the model before it is divided"
        )
    else:
        with torch.no_grad():
            parameter.copy_(value)


def _is_ordinary(value: Any) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, DTensor) and value.numel() > 1


def _is_untracked(tensor: Any) -> bool:
    """Whether a tensor is in parts with values, or whole on each rank, and autograd does not record what is done to it."""
    if not isinstance(tensor, DTensor) or (tensor.requires_grad and torch.is_grad_enabled()):
        return False
    if type(tensor._local_tensor) is not Tensor:
        return bool(tensor in _views)
    return not tensor._local_tensor.is_meta and not any(place.is_partial() for place in tensor.placements)


def _have_one_memory(tensor: DTensor, other: DTensor) -> bool:
    return bool(tensor._local_tensor.untyped_storage()._cdata == other._local_tensor.untyped_storage()._cdata)


_ALONG_A_DIM = (_ATEN.select.int, _ATEN.slice.Tensor, _ATEN.unbind.int)  # torch gathers what is divided along it
_BY_ELEMENT = (_ATEN.copy_.default, _ATEN.masked_fill_.Scalar, _ATEN.masked_fill_.Tensor)  # torch does not say so
_DRAWS = frozenset(
    schema.name.removeprefix("aten::")
    for schema in torch._C._jit_get_all_schemas()
    if schema.name in ("aten::bernoulli", "aten::native_dropout")
    or schema.name.endswith(("rand_like", "randn_like", "randint_like"))
)
