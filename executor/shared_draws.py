"""Random numbers of operations that several ranks share.

draw_apart             the operation on a slice: equal draws where data is equal, different ones where it is split
dropout_noise          what dropout multiplies a whole value by, as one process draws it; every rank draws it, and takes its slice
attention_with_noise   attention with the noise of its dropout given
draw_as_first          has all ranks of a group go on from the first one's random state
seed_of                the seed of draws that have a name
StageDraws             what the stages of one pipeline rank draw: nothing that other ranks' stages draw
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from smpc.executor.collectives import TensorGroup
from smpc.tracer.targets import function


def seed_of(seed: int, name: str) -> int:
    """The seed of the draws under a name."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=7).digest())


def draw_apart(name: str, group: TensorGroup, *args: Any, **kwargs: Any) -> Any:
    """Calls the torch function `name` (dropout, say) on slices: what it draws differs between the ranks.

    They go on alike from there: one draw of the default CPU generator, in which they agree, seeds all that the call draws.
    """
    seed = int(torch.randint(2**62, ()).item()) + group.rank
    with _seeded(seed, next((arg.device for arg in args if isinstance(arg, Tensor) and arg.is_cuda), None)):
        return function(name)(*args, **kwargs)


@contextmanager
def _seeded(seed: int, cuda: torch.device | None) -> Iterator[None]:
    """In this context the default generators start from `seed`; afterwards they go on from where they were."""
    with torch.random.fork_rng([] if cuda is None else [cuda]):
        torch.default_generator.manual_seed(seed)
        if cuda is not None:
            with torch.cuda.device(cuda):
                torch.cuda.manual_seed(seed)
        yield


def dropout_noise(
    shape: tuple[int, ...], stride: tuple[int, ...], p: float, *, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """0 with probability `p`, else 1 / (1 - p): dropout of a tensor of this shape and stride draws, and multiplies by, the same."""
    return F.dropout(torch.empty_strided(shape, stride, dtype=dtype, device=device).fill_(1), p)


def attention_with_noise(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    noise: Tensor,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention` `[..., queries, value size]`, its weights times `noise` `[..., queries, keys]`.

    It computes as torch's math backend does: in fp32 for half precision, each factor scaled by the root.
    """
    wide = torch.float32 if query.dtype in (torch.float16, torch.bfloat16) else query.dtype
    root = math.sqrt(1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if enable_gqa:
        key, value = (each.repeat_interleave(query.shape[-3] // each.shape[-3], -3) for each in (key, value))
    scores = (query.to(wide) * root) @ (key.to(wide) * root).transpose(-2, -1)
    if attn_mask is not None:
        masked = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, -math.inf) if masked else scores + attn_mask.to(wide)
    weights: Tensor = torch.ops.aten._safe_softmax(scores, -1)
    return (weights * noise @ value.to(wide)).to(query.dtype)


def draw_as_first(group: TensorGroup, device: torch.device) -> None:
    """Gives the default generators, of the CPU and of `device`, the states that they have on the group's first rank. Collective."""
    if group.size == 1:
        return
    cpu = torch.get_rng_state()
    both = torch.cat((cpu, torch.cuda.get_rng_state(device))) if device.type == "cuda" else cpu
    sent = both.to(device, copy=True)
    dist.broadcast(sent, group=group.process_group, group_src=0)
    if not torch.equal(sent.cpu(), both):
        both = sent.cpu()
        torch.set_rng_state(both[: len(cpu)])
        if device.type == "cuda":
            torch.cuda.set_rng_state(both[len(cpu) :], device)


class StageDraws:
    """Random numbers of the stages of one pipeline rank, beside another rank that draws from the default generators as they are.

    Scripts seed all ranks alike, so that they build the same model. The generators of two ranks are then the same, and equal layers on two
    ranks would drop the same elements, where one process drops others in each. So each call of a stage is seeded by one draw of the
    default CPU generator, and by the rank: it follows `torch.manual_seed`, and the ranks of a tensor-parallel group still agree.
    """

    def __init__(self, rank: int, device: torch.device) -> None:
        self._rank = rank
        self._cuda = device if device.type == "cuda" else None

    def around(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        """A stage, or what computes a loss of its outputs, with numbers of this rank's own."""

        def call(*arguments: Any) -> Any:
            with _seeded(seed_of(int(torch.randint(2**62, ()).item()), str(self._rank)), self._cuda):
                return compute(*arguments)

        return call
