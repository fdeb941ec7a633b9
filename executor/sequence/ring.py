"""Ring attention: queries stay, keys and values go from rank to rank while each rank computes with those that it has.

`smpc.codegen.ring_order` has the order of the steps, `smpc.kernels.attention.blocks` a step's work. Every step posts the next exchange
before it computes, and waits for it after: the transfer is hidden where computing takes longer. Two buffers take turns. Keys and values
travel as they are, in a message each, not repeated for the query heads that share them; their gradients in fp32 (fp64 for fp64), in which
results are summed up, too. The backward pass keeps q, k, v, the result and lse, and runs the ring again.

Messages of one step to one rank come in the order in which they are sent: keys and values of step i, gradients of step i, ... They go over
the process group, which moves them while the ranks compute; between CPUs of one host through memory (`smpc.executor.transport.rings`):
copying in and out takes less of a core than the thread that would move them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from smpc.codegen.ring_order import RingStep, SlicePart, ring_steps
from smpc.executor.collectives import TensorGroup, own_pieces
from smpc.executor.sequence.sliced import Cut
from smpc.executor.transport.rings import LIMIT, Post, Rings
from smpc.kernels.attention.blocks import block_backward, block_forward, merge_attention_blocks
from smpc.kernels.attention.op import bias_shift, wide_bias

_KEYS, _GRADIENTS, _MAIL = 0, 1, 2  # tags of messages; the last is for those that memory has no room for
_Pair = tuple[Tensor, Tensor]  # of keys and values
_NAMES = {_KEYS: "keys and values", _GRADIENTS: "gradients of keys and values"}


def ring_attention(
    group: TensorGroup,
    cut: Cut,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    *,
    scale: float | None = None,
    causal: bool = False,
) -> Tensor:
    """`smpc.kernels.attention.flash_attention` of slices along the sequence of q, k and v; `bias` has all keys. Contiguous."""
    _, blocks, mirrored = cut
    biases: tuple[Tensor, ...] = ()
    shift: Tensor | None = None
    if bias is not None:
        wide = wide_bias(bias, q)
        ranks = range(group.size)
        biases = tuple(own_pieces(wide, 3, rank, group.size, blocks, mirrored).contiguous() for rank in ranks)
        shift = _shift(wide, q, cut, group, causal)
    known = scale if scale is not None else 1.0 / math.sqrt(q.shape[-1])
    found: Tensor = _Ring.apply(q, k, v, biases, shift, known, causal, mirrored, group)  # type: ignore[no-untyped-call]
    return found


def _shift(bias: Tensor, q: Tensor, cut: Cut, group: TensorGroup, causal: bool) -> Tensor:
    """The shift of the rank's own queries; a causal query sees the keys up to its own place in the whole sequence."""
    if not causal:
        return bias_shift(bias, q, False, 0)
    _, blocks, mirrored = cut
    all_queries = q.new_empty((), dtype=bias.dtype).expand(*q.shape[:2], bias.shape[3], 1)
    return own_pieces(bias_shift(bias, all_queries, True, 0), 2, group.rank, group.size, blocks, mirrored).contiguous()


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        biases: tuple[Tensor, ...],
        shift: Tensor | None,
        scale: float,
        causal: bool,
        mirrored: bool,
        group: TensorGroup,
    ) -> Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        out, lse = q.new_empty(q.shape, dtype=wide), q.new_empty(q.shape[:3], dtype=wide)
        with _Neighbours(group, q) as neighbours:
            for step, keys, values in _around_ring((k, v), neighbours, causal, mirrored):
                if step.queries is None:
                    continue
                rows, own, bias = _rows(step, q), _own_keys(step, keys, values), _bias_of_step(step, biases)
                block = block_forward(q[:, :, rows], *own, bias, _of_rows(shift, rows), scale, step.causal)
                if step.source == group.rank:  # the first, of all queries
                    out.copy_(block[0])
                    lse.copy_(block[1])
                else:
                    merge_attention_blocks(out[:, :, rows], lse[:, :, rows], *block)
        result = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, result, lse, shift, *biases)
        ctx.scale, ctx.causal, ctx.mirrored, ctx.group = scale, causal, mirrored, group
        return result

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # once: activation checkpointing computes the forward again to find them
        q, k, v, *_ = saved
        with _Neighbours(ctx.group, q) as neighbours:
            dq, (dk, dv) = _gradients(ctx, saved, grad, neighbours)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None, None, None, None


def _gradients(ctx: Any, saved: tuple[Any, ...], grad: Tensor, neighbours: _Neighbours) -> tuple[Tensor, _Pair]:
    """The gradients of q, and of this rank's keys and values."""
    q, k, v, out, lse, shift, *biases = saved
    dq: Tensor | None = None
    travelling: _Pair | None = None  # gradients of the keys and values of the step, with the parts of ranks before
    incoming: _RingExchange | None = None
    for step, keys, values in _around_ring((k, v), neighbours, ctx.causal, ctx.mirrored):
        parts: tuple[Tensor, ...] = ()
        if step.queries is not None:
            rows, own, bias = _rows(step, q), _own_keys(step, keys, values), _bias_of_step(step, tuple(biases))
            dq_part, *found = block_backward(
                grad[:, :, rows],
                q[:, :, rows],
                *own,
                bias,
                _of_rows(shift, rows),
                out[:, :, rows],
                lse[:, :, rows],
                ctx.scale,
                step.causal,
            )
            parts = tuple(part.to(lse.dtype) for part in found)
            if dq is None:
                dq = dq_part.to(lse.dtype)
            else:
                dq[:, :, rows] += dq_part
        if incoming is None:
            travelling = parts[0].contiguous(), parts[1].contiguous()
        else:
            travelling = incoming.wait()
            for whole, part in zip(travelling, parts, strict=bool(parts)):
                whole[:, :, : part.shape[2]] += part
        incoming = _RingExchange(travelling, neighbours, _GRADIENTS)
    assert incoming is not None, "there is a step for every rank"
    assert dq is not None, "the first step is of a rank's own keys, and of all its queries"
    return dq, incoming.wait()


def _around_ring(
    pair: _Pair, neighbours: _Neighbours, causal: bool, mirrored: bool
) -> Iterator[tuple[RingStep, Tensor, Tensor]]:
    """Every step with the keys and values of its source; the next are on their way while the caller computes."""
    held, group = (pair[0].contiguous(), pair[1].contiguous()), neighbours.group
    for step in ring_steps(group.rank, group.size, causal=causal, mirrored=mirrored):
        exchange = None if step.sends_to is None else _RingExchange(held, neighbours, _KEYS)
        yield step, *held
        if exchange is not None:
            held = exchange.wait()


class _Neighbours:
    """The ranks ahead and behind, and the connection to them for tensors like `like`. An error in the context closes the memory.

    The messages that are under way then would be taken for messages of the next ring. Over a group, the connections end with the process.
    """

    def __init__(self, group: TensorGroup, like: Tensor) -> None:
        self.group = group
        self.ahead, self.behind = (group.rank + 1) % group.size, (group.rank - 1) % group.size
        self.process_group = None if group.size == 1 or is_fake(like) else group.process_group
        self.rings = Rings.of(self.process_group) if self.process_group is not None and like.is_cpu else None

    def __enter__(self) -> _Neighbours:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and self.rings is not None:
            self.rings.close()


class _RingExchange:
    """Contiguous tensors to the next rank, some of the same shapes from the one before."""

    def __init__(self, pair: _Pair, neighbours: _Neighbours, tag: int) -> None:
        self._sent, self._received = pair, pair
        self._works: list[dist.Work] = []
        self._posts: list[Post] = []
        self._neighbours = neighbours
        pg = neighbours.process_group
        if pg is None:
            return
        self._received = torch.empty_like(pair[0]), torch.empty_like(pair[1])
        if neighbours.rings is not None:
            self._post_in_memory(neighbours.rings, pg, _NAMES[tag])
            return
        with _together(pg, pair[0].device) as works:
            for sent, received in zip(pair, self._received, strict=True):
                works.append(pg.send([sent], neighbours.ahead, tag))
                works.append(pg.recv([received], neighbours.behind, tag))
        self._works = works

    def _post_in_memory(self, rings: Rings, pg: dist.ProcessGroup, name: str) -> None:
        ahead, behind = self._neighbours.ahead, self._neighbours.behind
        for sent, received in zip(_messages(self._sent), _messages(self._received), strict=True):
            self._posts.append(rings.inbound[behind].post(received, name, lambda into: pg.recv([into], behind, _MAIL)))
            if not rings.outbound[ahead].send(sent):
                self._works.append(pg.send([sent], ahead, _MAIL))

    def wait(self) -> _Pair:
        """What has come. What was sent may be written from then on."""
        neighbours = self._neighbours
        for post in self._posts:
            assert neighbours.rings is not None, "who posted"
            neighbours.rings.inbound[neighbours.behind].complete(post)
        for post in self._posts:
            if post.mailed is not None:
                post.mailed.wait()
        for work in self._works:
            work.wait()
        return self._received


def _messages(pair: _Pair) -> Iterator[Tensor]:
    """The bytes of contiguous tensors, in messages of a ring in memory."""
    for tensor in pair:
        flat = tensor.view(-1).view(torch.uint8)
        for start in range(0, flat.numel(), LIMIT):
            yield flat[start : start + LIMIT]


@contextmanager
def _together(pg: dist.ProcessGroup, device: torch.device) -> Iterator[list[dist.Work]]:
    """On CUDA one operation of both: a send alone could wait for a receive that comes after it on every rank."""
    works: list[dist.Work] = []
    if device.type != "cuda":
        yield works
        return
    pg._start_coalescing(device)
    yield works
    joined = pg._end_coalescing(device)
    works[:] = [joined] if joined is not None else works


def _rows(step: RingStep, q: Tensor) -> slice:
    half = q.shape[2] // 2
    return slice(half, None) if step.queries is SlicePart.SECOND else slice(None)


def _of_rows(shift: Tensor | None, rows: slice) -> Tensor | None:
    return None if shift is None else shift[:, :, rows].contiguous()


def _own_keys(step: RingStep, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    if step.keys is SlicePart.ALL:
        return keys, values
    half = keys.shape[2] // 2
    return keys[:, :, :half], values[:, :, :half]


def _bias_of_step(step: RingStep, biases: tuple[Tensor, ...]) -> Tensor | None:
    if not biases:
        return None
    whole = biases[step.source]
    return whole if step.keys is SlicePart.ALL else whole[..., : whole.shape[3] // 2]
