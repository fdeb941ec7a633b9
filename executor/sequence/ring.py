"""Ring attention: queries stay, keys and values go from rank to rank while each rank computes with those that it has.

`smpc.codegen.ring` has the order of the steps, `smpc.kernels.attention.blocks` a step's work. Every step posts the next exchange before
it computes, and waits for it after: the transfer is hidden where computing takes longer. Two buffers take turns. Keys and values travel
as they are, in one message, not repeated for the query heads that share them; their gradients in fp32 (fp64 for fp64), in which results
are summed up, too. The backward pass keeps q, k, v, the result and lse, and runs the ring again.

Messages of one step to one rank come in the order in which they are sent: keys and values of step i, gradients of step i, ...
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

from smpc.codegen.ring import Part, RingStep, ring_steps
from smpc.executor.collectives import TensorGroup, own_pieces
from smpc.executor.sequence.sliced import Cut
from smpc.kernels.attention.blocks import block_backward, block_forward, merge_attention_blocks

_KEYS, _GRADIENTS = 0, 1  # tags of messages


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
    if bias is not None:
        wide = bias.to(torch.promote_types(q.dtype, torch.float32))
        ranks = range(group.size)
        biases = tuple(own_pieces(wide, 3, rank, group.size, blocks, mirrored).contiguous() for rank in ranks)
    known = scale if scale is not None else 1.0 / math.sqrt(q.shape[-1])
    found: Tensor = _Ring.apply(q, k, v, biases, known, causal, mirrored, group)  # type: ignore[no-untyped-call]
    return found


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        biases: tuple[Tensor, ...],
        scale: float,
        causal: bool,
        mirrored: bool,
        group: TensorGroup,
    ) -> Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        out, lse = q.new_empty(q.shape, dtype=wide), q.new_empty(q.shape[:3], dtype=wide)
        for step, keys, values in _around_ring(torch.stack((k, v)), group, causal, mirrored):
            if step.queries is None:
                continue
            rows, own, bias = _rows(step, q), _own_keys(step, keys, values), _bias_of_step(step, biases)
            block = block_forward(q[:, :, rows], *own, bias, scale, step.causal)
            if step.source == group.rank:  # the first, of all queries
                out.copy_(block[0])
                lse.copy_(block[1])
            else:
                merge_attention_blocks(out[:, :, rows], lse[:, :, rows], *block)
        result = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, result, lse, *biases)
        ctx.scale, ctx.causal, ctx.mirrored, ctx.group = scale, causal, mirrored, group
        return result

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *biases = ctx.saved_tensors
        group, num_ranks = ctx.group, ctx.group.size
        dq = torch.zeros(q.shape, dtype=lse.dtype, device=q.device)
        travelling: Tensor | None = None  # gradients of the keys and values of the step, with the parts of ranks before
        incoming: _Exchange | None = None
        for step, keys, values in _around_ring(torch.stack((k, v)), group, ctx.causal, ctx.mirrored):
            part: Tensor | None = None  # None: nothing to add
            if step.queries is not None:
                rows, own, bias = _rows(step, q), _own_keys(step, keys, values), _bias_of_step(step, tuple(biases))
                dq_part, *parts = block_backward(
                    grad[:, :, rows],
                    q[:, :, rows],
                    *own,
                    bias,
                    out[:, :, rows],
                    lse[:, :, rows],
                    ctx.scale,
                    step.causal,
                )
                dq[:, :, rows] += dq_part
                part = torch.stack(parts).to(lse.dtype)
            if incoming is None:
                travelling = part
            else:
                travelling = incoming.wait()
                if part is not None:
                    travelling[:, :, :, : part.shape[3]] += part
            assert travelling is not None, "the first step is of a rank's own keys, all of them"
            incoming = _Exchange(travelling, group, _GRADIENTS)
        assert incoming is not None, "there is a step for every rank"
        home = incoming.wait() if num_ranks > 1 else travelling
        assert home is not None
        return dq.to(q.dtype), home[0].to(k.dtype), home[1].to(v.dtype), None, None, None, None, None


def _around_ring(
    pair: Tensor, group: TensorGroup, causal: bool, mirrored: bool
) -> Iterator[tuple[RingStep, Tensor, Tensor]]:
    """Every step with the keys and values of its source; the next are on their way while the caller computes."""
    held = pair.contiguous()
    for step in ring_steps(group.rank, group.size, causal=causal, mirrored=mirrored):
        exchange = None if step.sends_to is None else _Exchange(held, group, _KEYS)
        yield step, held[0], held[1]
        if exchange is not None:
            held = exchange.wait()


class _Exchange:
    """A tensor to the next rank, one of the same shape from the one before."""

    def __init__(self, tensor: Tensor, group: TensorGroup, tag: int) -> None:
        self._sent, self._received = tensor, torch.empty_like(tensor)
        self._works: list[dist.Work] = []
        pg = group.process_group
        if pg is None or group.size == 1 or is_fake(tensor):
            self._received = tensor
            return
        ahead, behind = (group.rank + 1) % group.size, (group.rank - 1) % group.size
        with _together(pg, tensor.device) as works:
            works.append(pg.send([tensor], ahead, tag))
            works.append(pg.recv([self._received], behind, tag))
        self._works = works

    def wait(self) -> Tensor:
        """What has come. What was sent may be written from then on."""
        for work in self._works:
            work.wait()
        return self._received


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
    return slice(half, None) if step.queries is Part.SECOND else slice(None)


def _own_keys(step: RingStep, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    if step.keys is Part.ALL:
        return keys, values
    half = keys.shape[2] // 2
    return keys[:, :, :half], values[:, :, :half]


def _bias_of_step(step: RingStep, biases: tuple[Tensor, ...]) -> Tensor | None:
    if not biases:
        return None
    whole = biases[step.source]
    return whole if step.keys is Part.ALL else whole[..., : whole.shape[3] // 2]
