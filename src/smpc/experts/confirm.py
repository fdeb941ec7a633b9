"""Stacked experts run on invented values, to see that cutting them is right, before anything is cut.

What must hold for a module M of E experts, with hidden states h, experts i and weights w:

    mixture      M(h, i, w) = sum_j w_j M(h, i_j, 1): weights multiply what experts return, and slots add up
    alone        a module with some of the experts, numbered from 0, returns for them what M does
    local        it does so after the attributes that count experts have been set to the number that is there

Which attributes these are is found by trying: none, then those of value E with `expert` in their name, then all of value E. The numbers
of experts are small in these runs, and all experts have the values of one of them where E of them would be large.
"""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from smpc.experts.structure import Stacked

_TOKENS = 6
_LARGE = 1 << 24  # elements: above, all experts share the memory of one
_FEW = 4  # experts


@dataclass(frozen=True, slots=True)
class Confirmed:
    """Experts that may be cut. `counts`: the attributes that say how many there are; `hidden`: the size of hidden states.

    `may_share`: whether ranks that must draw the same random numbers, and have the same buffers, may divide them.
    """

    experts: Stacked
    counts: tuple[str, ...]
    hidden: int
    may_share: bool = True


def confirm(experts: Stacked) -> Confirmed | str:
    """What is needed to cut these experts, or why they cannot be cut."""
    reasons = []
    for counts in counting_attributes(experts):
        for hidden in _widths(experts):
            reason = _tried_split(experts, counts, hidden)
            if reason is None:
                return Confirmed(experts, counts, hidden, _may_share(experts, counts, hidden))
            reasons.append(reason)
    return next((reason for reason in reasons if "returned" in reason), reasons[-1])


def counting_attributes(experts: Stacked) -> list[tuple[str, ...]]:
    """Sets of attributes that may hold the number of experts."""
    numbers = [
        name
        for name, value in vars(experts.module).items()
        if type(value) is int and value == experts.num_experts and not name.startswith("_")
    ]
    named = [name for name in numbers if "expert" in name]
    return list(dict.fromkeys([(), tuple(named), tuple(numbers)]))


def _widths(experts: Stacked) -> list[int]:
    """What hidden states may have: the sizes in the parameters, the most frequent first."""
    sizes = [size for name in experts.parameters for size in experts.module.get_parameter(name).shape[1:]]
    return sorted(dict.fromkeys(sizes), key=lambda size: -sizes.count(size))


def _tried_split(experts: Stacked, counts: tuple[str, ...], hidden: int) -> str | None:
    """None if all holds, else what does not."""
    few = min(experts.num_experts, _FEW)
    first = few - few // 2  # of the experts that stand alone
    name = type(experts.module).__name__
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(_TOKENS, hidden, generator=generator)
    weights = torch.rand(_TOKENS, 2, generator=generator)
    index = torch.stack([torch.arange(_TOKENS) % few, (torch.arange(_TOKENS) + 1) % few], 1)
    values = invented_parameters(experts, few, generator)
    ones = torch.ones(_TOKENS, 1)
    try:
        with torch.no_grad(), torch.random.fork_rng():
            some = copy_with_experts(experts, values, counts)
            slots = [some(tokens, index[:, slot : slot + 1], ones) for slot in range(2)]
            if any(not isinstance(slot, Tensor) or slot.shape != tokens.shape for slot in slots):
                return f"{name} returned something else than a tensor of the hidden states' shape"
            both = some(tokens, index, weights)
            mixed = sum(slot * weights[:, [place]] for place, slot in enumerate(slots))
            if not _close(both, mixed):
                return f"{name} returned something else than the sum of weight times expert"
            alone = copy_with_experts(experts, [value[first:] for value in values], counts)
            local = torch.arange(_TOKENS).remainder(few - first).unsqueeze(1)
            if not _close(alone(tokens, local, ones), some(tokens, local + first, ones)):
                return f"{name} returned something else for some of its experts, without the others"
            if counts and not _same_as_all(experts, counts, values, tokens):
                return f"{name} returned something else when {', '.join(counts)} said how many experts are there"
    except Exception as error:  # whatever its forward raises
        return f"{name} could not be run on hidden states of {hidden} and some of its experts: {error}"
    return None


def _may_share(experts: Stacked, counts: tuple[str, ...], hidden: int) -> bool:
    """Whether it holds nothing but experts, and draws nothing in training."""
    module = experts.module
    if any(True for _ in module.buffers()) or set(experts.parameters) != {
        name for name, _ in module.named_parameters()
    }:
        return False
    generator = torch.Generator().manual_seed(0)
    few = min(experts.num_experts, _FEW)
    index = torch.arange(_TOKENS).remainder(few).unsqueeze(1)
    with torch.no_grad(), torch.random.fork_rng():
        some = copy_with_experts(experts, invented_parameters(experts, few, generator), counts).train()
        before = torch.get_rng_state()
        some(torch.zeros(_TOKENS, hidden), index, torch.ones(_TOKENS, 1))
        return torch.equal(before, torch.get_rng_state())


def _same_as_all(experts: Stacked, counts: tuple[str, ...], values: list[Tensor], tokens: Tensor) -> bool:
    """Whether setting the counts changes nothing else: against all E experts, each with the values of the first."""
    count = experts.num_experts
    every = [value[:1].expand(count, *value.shape[1:]) for value in values]
    if sum(value.numel() for value in every) <= _LARGE:
        every = [value.contiguous() for value in every]
    whole = copy_with_experts(experts, every, ())
    some = copy_with_experts(experts, [value[:1].expand_as(value).contiguous() for value in values], counts)
    index = (torch.arange(len(tokens)) % len(values[0])).unsqueeze(1)
    ones = torch.ones(len(tokens), 1)
    return _close(whole(tokens, index, ones), some(tokens, index, ones))


def _close(found: Tensor, expected: Tensor) -> bool:
    return torch.allclose(found, expected, rtol=1e-4, atol=1e-5)


def invented_parameters(experts: Stacked, few: int, generator: torch.Generator) -> list[Tensor]:
    """Invented parameters of a few experts. Large ones repeat a short sequence."""
    found = []
    for name in experts.parameters:
        shape = (few, *experts.module.get_parameter(name).shape[1:])
        count = torch.Size(shape).numel()
        scale = shape[-1] ** -0.5
        short = torch.randn(min(count, 1_000_003), generator=generator) * scale
        found.append(short.repeat(-(-count // len(short)))[:count].view(shape))
    return found


def copy_with_experts(experts: Stacked, values: list[Tensor], counts: tuple[str, ...]) -> nn.Module:
    """The module with other parameters, on the CPU; attributes that count experts say how many these are."""
    module = experts.module
    invented = dict(zip(experts.parameters, values, strict=True))
    memo: dict[int, object] = {}
    for name, tensor in itertools.chain(module.named_parameters(), module.named_buffers()):
        own = invented.get(name)
        if isinstance(tensor, nn.Parameter):
            memo[id(tensor)] = nn.Parameter(torch.full(tensor.shape, 0.5) if own is None else own, requires_grad=False)
        elif tensor.device.type != "cpu":
            memo[id(tensor)] = torch.zeros(tensor.shape, dtype=tensor.dtype)
    copied: nn.Module = copy.deepcopy(module, memo)
    copied.eval()
    for count in counts:
        setattr(copied, count, len(values[0]))
    return copied
