"""Experts run on invented values, to see that cutting them is right, before anything is cut.

What must hold for a module M of E experts, with hidden states h, experts i and weights w:

    mixture      M(h, i, w) = sum_j w_j M(h, i_j, 1): weights multiply what experts return, and slots add up
    alone        a module with some of the experts, numbered from 0, returns for them what M does
    local        it does so after the attributes that count experts have been set to the number that is there
    no places    all experts compute alike, whatever their numbers: not every other one, the last one, or those from a number on
    no more      it returns no tokens for numbers that it has no parameters for, as do some mixtures for tokens that need no expert
    rows apart   what M returns for a row does not depend on the other rows of the call: on their order, number, size or shape. One scale
                 of all activations, a capacity, or a sum over the sequence depend on them, and a rank serves other rows than one process
    no memory    what it keeps of a call, in attributes and buffers, does not depend on the rows (`smpc.experts.remembered_rows`)

The last two must hold for every expert that is a module of its own, and it may change no buffer. Hidden states of shape [2, 3, H] need
not be taken, as ranks pass rows.

The attributes that count experts are found by trying: none, then attributes of value E with `expert` in their name, then all of value E.
The numbers of experts are small in these runs, and large experts share memory: each has the values of the one before, moved on a little, or
all have the values of one of them. A module that takes no such tensors (`view`) gets tensors of its own.
"""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from smpc.experts.find_experts import Found, Listed, Stacked
from smpc.experts.remembered_rows import changed_buffers, kept_of_rows
from smpc.tracer.ir import contiguous_stride

_TOKENS = 6
_REPEATS = 43  # of these tokens, all for one expert: more than a small capacity
_LOUD = 100.0
_LARGE = 1 << 24  # elements: above, experts share memory
_APART = (
    4_100  # elements between the first ones of two experts that do: a multiple of 16 bytes, and no row of a usual size
)
_FEW = 4  # experts
_MORE = 3  # numbers of experts that there are not


@dataclass(frozen=True, slots=True)
class Confirmed:
    """Experts that may be cut. `counts`: the attributes that say how many there are; `hidden`: the size of hidden states.

    `may_share`: whether ranks that must draw the same random numbers, and have the same buffers, may divide them.
    """

    experts: Stacked
    counts: tuple[str, ...]
    hidden: int
    may_share: bool = True


def confirm(found: Found) -> Confirmed | Listed | str:
    """What is needed to cut these experts, or why they cannot be cut."""
    return _confirmed_stacked(found) if isinstance(found, Stacked) else (_tried_members(found) or found)


class Confirmations:
    """`confirm` for the experts of one model: experts of most layers are made alike, and tried once."""

    def __init__(self) -> None:
        self._known: list[tuple[object, Confirmed | str]] = []
        self._named: dict[str, Confirmed | Listed | str] = {}

    def of(self, found: Found) -> Confirmed | Listed | str:
        """As `confirm` says."""
        if found.name not in self._named:
            self._named[found.name] = self._tried(found)
        known = self._named[found.name]
        return replace(known, experts=found) if isinstance(known, Confirmed) and isinstance(found, Stacked) else known

    def _tried(self, found: Found) -> Confirmed | Listed | str:
        if not isinstance(found, Stacked) or any(True for _ in found.module.buffers()):
            return confirm(found)
        made = _stacked_as(found)
        known = next((result for other, result in self._known if other == made), None)
        if known is None:
            known = _confirmed_stacked(found)
            self._known.append((made, known))
        return known


def _stacked_as(found: Stacked) -> object:
    """What tells how experts in one module compute: their classes, hooks and attributes, and the shapes of their parameters."""
    usual = vars(nn.Module())
    own: list[object] = [found.num_experts, found.parameters]
    for name, module in found.module.named_modules():
        hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
        attributes = {
            key: (type(value), value if isinstance(value, bool | int | float | str | None) else id(value))
            for key, value in vars(module).items()
            if key not in usual
        }
        own.append((name, type(module), attributes, list(map(id, hooks))))
    own += [(name, p.shape, p.dtype) for name, p in found.module.named_parameters()]
    return own


def _confirmed_stacked(experts: Stacked) -> Confirmed | str:
    name, reasons = type(experts.module).__name__, []
    tries = list(itertools.product(counting_attributes(experts), _widths(experts)))
    for apart in (False, True):  # in memory of their own, large experts take several times as much
        raised = []
        for counts, hidden in tries:
            try:
                reason = _tried_split(experts, counts, hidden, apart=apart)
            except Exception as error:  # whatever its forward raises
                raised.append((counts, hidden))
                reason = f"{name} could not be run on hidden states of {hidden} and some of its experts: {error}"
            if reason is None:
                return Confirmed(experts, counts, hidden, _may_share(experts, counts, hidden))
            reasons.append(reason)
        if not _share_memory(experts, min(experts.num_experts, _FEW)):
            break
        tries = raised
    return _telling_reason(reasons)


def _telling_reason(reasons: list[str]) -> str:
    """The reason that tells most, out of the reasons for each width that was tried."""
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
    return _by_frequency(size for name in experts.parameters for size in experts.module.get_parameter(name).shape[1:])


def _by_frequency(found: Iterable[int]) -> list[int]:
    sizes = list(found)
    return sorted(dict.fromkeys(sizes), key=lambda size: -sizes.count(size))


def _tried_split(experts: Stacked, counts: tuple[str, ...], hidden: int, *, apart: bool = False) -> str | None:
    """None if all holds, else what does not; an error of its forward's. `apart`: no two experts share memory."""
    few = min(experts.num_experts, _FEW)
    first = few - few // 2  # of the experts that stand alone
    name = type(experts.module).__name__
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(_TOKENS, hidden, generator=generator)
    weights = torch.rand(_TOKENS, 2, generator=generator)
    index = torch.stack([torch.arange(_TOKENS) % few, (torch.arange(_TOKENS) + 1) % few], 1)
    values = invented_parameters(experts, few, generator, apart=apart)
    ones = torch.ones(_TOKENS, 1)
    with torch.no_grad(), torch.random.fork_rng():
        some = copy_with_experts(experts, values, counts)
        slots = [some(tokens, index[:, slot : slot + 1], ones) for slot in range(2)]
        if any(not isinstance(slot, Tensor) or slot.shape != tokens.shape for slot in slots):
            return f"{name} returned something else than a tensor of the hidden states' shape"
        both = some(tokens, index, weights)
        mixed = sum(slot * weights[:, [place]] for place, slot in enumerate(slots))
        if not _close(both, mixed):
            return f"{name} returned something else than the sum of weight times expert"
        if (reason := _unlike_alone(experts, values, counts, tokens, apart=apart)) is not None:
            return reason
        alone = copy_with_experts(experts, [value[first:] for value in values], counts)
        if (reason := _mixes_rows(name, alone, _with_ones(alone), hidden, few - first)) is not None:
            return reason
        make = partial(copy_with_experts, experts, values, counts)
        runs = [lambda run: run(tokens, index, weights), lambda run: run(tokens[1:3], index[2:4], weights[1:3])]
        if (reason := _remembers(name, make, runs)) is not None:
            return reason
        if counts and not _same_as_all(experts, counts, values, tokens):
            return f"{name} returned something else when {', '.join(counts)} said how many experts are there"
    return None


def _unlike_alone(
    experts: Stacked, values: list[Tensor], counts: tuple[str, ...], tokens: Tensor, *, apart: bool
) -> str | None:
    """None if experts return by themselves what they return among all, wherever they are, and none are there without parameters."""
    name, few = type(experts.module).__name__, len(values[0])
    some, ones = copy_with_experts(experts, values, counts), torch.ones(len(tokens), 1)
    for start, stop in dict.fromkeys(((few - few // 2, few), (1, few), (0, few - 1))):
        alone = copy_with_experts(experts, [value[start:stop] for value in values], counts)
        local = torch.arange(len(tokens)).remainder(stop - start).unsqueeze(1)
        if not _close(alone(tokens, local, ones), some(tokens, local + start, ones)):
            return f"{name} returned something else for some of its experts, without the others"
    if not _alike_everywhere(experts, values, counts if apart else None, tokens[:1]):
        return f"{name} returned something else for experts with the same parameters and other numbers"
    silent = copy_with_experts(experts, [_zeros_like(value) for value in values], counts)
    for number in (-1, *range(few, few + _MORE), *range(experts.num_experts, experts.num_experts + _MORE)):
        if _returns_tokens(silent, number, tokens):
            return f"{name} returned tokens for expert {number}, for which it has no parameters"
    return None


def _alike_everywhere(experts: Stacked, values: list[Tensor], counts: tuple[str, ...] | None, token: Tensor) -> bool:
    """Whether experts with the same values return the same: all, or as many of them as can be run soon.

    `counts`: large experts cannot share memory, so there are as many as there are values, and these attributes say how many.
    """
    count = experts.num_experts if counts is None else len(values[0])
    most = max(2, _LARGE * _FEW // max(1, sum(value[0].numel() for value in values)))
    index = torch.linspace(0, count - 1, min(count, most)).long().unsqueeze(1)
    every = [value[:1].expand(count, *value.shape[1:]) for value in values]
    if counts is not None or sum(value.numel() for value in every) <= _LARGE:
        every = [value.contiguous() for value in every]
    whole = copy_with_experts(experts, every, counts or ())
    found: Tensor = whole(token.expand(len(index), -1).contiguous(), index, torch.ones(len(index), 1))
    return _close(found, found[:1].expand_as(found))


def _returns_tokens(module: nn.Module, number: int, tokens: Tensor) -> bool:
    """Whether a number of no expert returns its tokens, by some factor: not nothing, an error, or memory that nobody has written."""
    index, ones = torch.full((len(tokens), 1), number), torch.ones(len(tokens), 1)
    try:
        with _unwritten_is_nan():
            found, other = module(tokens, index, ones), module(2 * tokens.flip(0), index, ones)
    except Exception:  # whatever its forward raises
        return False
    return not _close(found, torch.zeros_like(found)) and _close(other, 2 * found.flip(0))


@contextmanager
def _unwritten_is_nan() -> Iterator[None]:
    """Memory that nobody has written is NaN. It may have held a copy of the tokens before, and hold it still."""
    mode, fills = torch.get_deterministic_debug_mode(), torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
        try:
            yield
        finally:
            torch.set_deterministic_debug_mode(mode)
            torch.utils.deterministic.fill_uninitialized_memory = fills  # type: ignore[attr-defined]


def _remembers(name: str, make: Callable[[], nn.Module], runs: Sequence[Callable[[nn.Module], object]]) -> str | None:
    """None if what a module keeps of a call does not depend on the rows."""
    kept = kept_of_rows(lambda: make().train(), runs)
    if not kept:
        return None
    return (
        f"{name} keeps something of the rows that it is called with, in {', '.join(kept[:3])}: ranks call it with others; keep it outside "
        "of the experts"
    )


def _with_ones(module: nn.Module) -> Callable[[Tensor, Tensor], object]:
    """Calls stacked experts, one for each row, with a weight of one."""
    return lambda rows, index: module(rows, index.unsqueeze(-1), rows.new_ones(*index.shape, 1))


def _mixes_rows(
    name: str, module: nn.Module, run: Callable[[Tensor, Tensor], object], hidden: int, num_experts: int
) -> str | None:
    """None if a row's result depends on no other row, else on what. `run` gets rows [.., H] and the expert of each [..]."""
    rows = torch.randn(_TOKENS, hidden, generator=torch.Generator().manual_seed(1))
    index, one = torch.arange(_TOKENS) % num_experts, torch.zeros(_TOKENS, dtype=torch.int64)
    loud = torch.cat((rows[:-1], rows[-1:] * _LOUD)).flip(0)
    some = run(rows, index)
    if not isinstance(some, Tensor) or some.dim() != 2 or len(some) != len(rows):
        return f"{name} returned something else than a row for every row"
    unlike = f"{name} returned something else for the same rows"
    if not _same_rows(run(rows[1:3], index[1:3]), some[1:3]):
        return f"{unlike} in a call of fewer"
    if not _same_rows(run(loud, index.flip(0)), some.flip(0), 1):
        return f"{unlike} in another order, beside one that is larger"
    if not _same_rows(
        run(rows.repeat(_REPEATS, 1), one.repeat(_REPEATS)), _rows_of(run(rows, one)).repeat(_REPEATS, 1)
    ):
        return f"{unlike} in a call of {_TOKENS * _REPEATS} for one expert"
    try:
        shaped: object = run(rows.view(2, -1, hidden), index.view(2, -1))
    except Exception:  # its block passes rows
        shaped = some
    if not _same_rows(shaped, some):
        return f"{unlike} in two sequences"
    module.train()
    before = torch.get_rng_state()
    trained = run(rows, index)
    is_drawn = not torch.equal(before, torch.get_rng_state())
    is_same = is_drawn or _same_rows(run(loud, index.flip(0)), _rows_of(trained).flip(0), 1)
    module.eval()
    return None if is_same else f"{unlike} in training, in another order, beside one that is larger"


def _rows_of(found: object) -> Tensor:
    assert isinstance(found, Tensor)
    return found


def _same_rows(found: object, expected: Tensor, start: int = 0) -> bool:
    """Whether all rows from one on are the same, in any shape."""
    if not isinstance(found, Tensor) or found.numel() != expected.numel():
        return False
    first, second = found.reshape(expected.shape)[start:], expected[start:]
    scale = second.abs().max().clamp_min(torch.finfo(torch.float32).tiny)
    return _close(first / scale, second / scale)


def _tried_members(found: Listed) -> str | None:
    """None if a block has no other lists of experts and all of these treat every row alike, else why not."""
    if found.beside:
        return f"its block calls {', '.join(found.beside)}, too, and tokens of a block travel once; make one module of each expert"
    tried: list[object] = []
    for place, member in enumerate(found.members):
        made = _made_as(member, place)
        if made in tried:
            continue
        tried.append(made)
        reasons = []
        for width in _by_frequency(size for each in member.parameters() if each.dim() > 1 for size in each.shape):
            reason = _tried_member(member, width)
            if reason is None:
                break
            reasons.append(reason)
        else:
            return _telling_reason(reasons)
    return None


def _made_as(member: nn.Module, place: int) -> object:
    """What tells how an expert computes: the classes of its modules, and their numbers, words and functions but for its own place."""
    usual = vars(nn.Module())
    found = []
    for name, module in member.named_modules():
        own = {
            key: (type(value), value if isinstance(value, bool | int | float | str) or callable(value) else None)
            for key, value in vars(module).items()
            if key not in usual and not (type(value) is int and value == place)
        }
        found.append((name, type(module), own))
    return found


def _tried_member(member: nn.Module, width: int) -> str | None:
    """None if an expert that is a module of its own treats every row of this width alike, else why it does not."""
    name = type(member).__name__
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            copied = _copied_member(member)
            if (reason := _mixes_rows(name, copied, lambda rows, _: copied(rows), width, 1)) is not None:
                return reason
            rows = torch.randn(_TOKENS, width, generator=torch.Generator().manual_seed(2))
            runs = [lambda run: run(rows), lambda run: run(rows[1:3])]
            if (reason := _remembers(name, partial(_copied_member, member), runs)) is not None:
                return reason
            changed = changed_buffers(_copied_member(member).train(), runs[0])
            return f"{name} changes its buffer {changed[0]}, as often as a rank calls it" if changed else None
    except Exception as error:  # whatever its forward raises
        return f"{name} could not be run on rows of {width}: {error}"


def _copied_member(member: nn.Module) -> nn.Module:
    """A copy on the CPU with invented parameters, that calls no forward hooks."""
    memo: dict[int, object] = {}
    generator = torch.Generator().manual_seed(0)
    for module in member.modules():
        for value in vars(module).values():
            if isinstance(value, Tensor):  # made from parameters by a hook before the forward
                memo[id(value)] = value.detach()
    for parameter in member.parameters():
        own = torch.zeros(parameter.shape, dtype=parameter.dtype)
        if parameter.is_floating_point():
            own = _invented(parameter.shape, generator)
        memo[id(parameter)] = nn.Parameter(own, requires_grad=False)
    for buffer in member.buffers():
        memo[id(buffer)] = _copied_buffer(buffer)
    copied: nn.Module = copy.deepcopy(member, memo)
    for module in copied.modules():
        module._forward_hooks.clear()
    return copied.eval()


def _copied_buffer(buffer: Tensor) -> Tensor:
    """The buffer on the CPU, in fp32; where it has no values, filled with others than zero: zeros would hide what they multiply."""
    dtype = torch.float32 if buffer.is_floating_point() else buffer.dtype
    if buffer.is_meta:
        return torch.full(buffer.shape, 0.5 if buffer.is_floating_point() else 0, dtype=dtype)
    return buffer.detach().to("cpu", dtype, copy=True)


def _rising(buffer: Tensor) -> Tensor:
    """Another value in each row, on the CPU."""
    rows = 1 + torch.arange(len(buffer), dtype=torch.float32) / len(buffer)
    return rows.view(-1, *[1] * (buffer.dim() - 1)).expand(buffer.shape).contiguous()


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
        for apart in (False, True):
            values = invented_parameters(experts, few, generator, apart=apart)
            some, before = copy_with_experts(experts, values, counts).train(), torch.get_rng_state()
            try:
                some(torch.zeros(_TOKENS, hidden), index, torch.ones(_TOKENS, 1))
            except Exception:  # it takes no experts that share memory
                if apart:
                    raise
            else:
                return torch.equal(before, torch.get_rng_state())
    raise AssertionError("one of both has returned or raised")


def _same_as_all(experts: Stacked, counts: tuple[str, ...], values: list[Tensor], tokens: Tensor) -> bool:
    """Whether setting the counts changes nothing else: against all E experts, each with the values of the first."""
    count = experts.num_experts
    every = [value[:1].expand(count, *value.shape[1:]) for value in values]
    few = [value[:1].expand_as(value) for value in values]
    if sum(value.numel() for value in every) <= _LARGE:
        every = [value.contiguous() for value in every]
    if all(value.is_contiguous() for value in values):
        few = [value.contiguous() for value in few]
    whole, some = copy_with_experts(experts, every, ()), copy_with_experts(experts, few, counts)
    index = (torch.arange(len(tokens)) % len(values[0])).unsqueeze(1)
    ones = torch.ones(len(tokens), 1)
    return _close(whole(tokens, index, ones), some(tokens, index, ones))


def _close(found: Tensor, expected: Tensor) -> bool:
    return torch.allclose(found, expected, rtol=1e-4, atol=1e-5)


def invented_parameters(experts: Stacked, few: int, generator: torch.Generator, *, apart: bool = False) -> list[Tensor]:
    """Invented parameters of a few experts. Large ones repeat a short sequence, and share memory unless they are to be `apart`."""
    shapes = [experts.module.get_parameter(name).shape[1:] for name in experts.parameters]
    if apart or not _share_memory(experts, few):
        return [_invented((few, *shape), generator) for shape in shapes]
    found = []
    for shape in shapes:
        scale = shape[-1] ** -0.5 if shape else 1.0
        memory = _invented((shape.numel() + (few - 1) * _APART,), generator, scale)
        found.append(memory.as_strided((few, *shape), (_APART, *contiguous_stride(shape))))
    return found


def _share_memory(experts: Stacked, few: int) -> bool:
    """Whether so many invented experts do: they are large."""
    return few * sum(experts.module.get_parameter(name)[0].numel() for name in experts.parameters) > _LARGE


def _invented(shape: Sequence[int], generator: torch.Generator, scale: float | None = None) -> Tensor:
    count = max(1, torch.Size(shape).numel())
    if scale is None:
        scale = shape[-1] ** -0.5 if shape else 1.0
    short = torch.randn(min(count, 1_000_003), generator=generator) * scale
    return short.repeat(-(-count // len(short)))[:count].view(shape)


def _zeros_like(value: Tensor) -> Tensor:
    """Zeros that share memory as the value does."""
    return torch.zeros(value.untyped_storage().nbytes() // value.element_size()).as_strided(value.shape, value.stride())


def copy_with_experts(experts: Stacked, values: list[Tensor], counts: tuple[str, ...]) -> nn.Module:
    """The module with other parameters, on the CPU; attributes that count experts say how many these are.

    Buffers with a value for each expert have others, too: they may be alike now, and differ later.
    """
    module = experts.module
    invented = dict(zip(experts.parameters, values, strict=True))
    memo: dict[int, object] = {}
    for name, tensor in itertools.chain(module.named_parameters(), module.named_buffers()):
        own = invented.get(name)
        if isinstance(tensor, nn.Parameter):
            memo[id(tensor)] = nn.Parameter(torch.full(tensor.shape, 0.5) if own is None else own, requires_grad=False)
        elif tensor.is_floating_point() and tensor.shape[:1] == (
            experts.num_experts,
        ):  # a value for each expert, it seems
            memo[id(tensor)] = _rising(tensor)
        elif tensor.device.type != "cpu":
            memo[id(tensor)] = _copied_buffer(tensor)
    copied: nn.Module = copy.deepcopy(module, memo)
    copied.eval()
    for count in counts:
        setattr(copied, count, len(values[0]))
    return copied
