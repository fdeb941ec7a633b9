"""What forwards write into parameters that every replica holds whole: the same on all of them, or an error.

A weight that is clamped, a momentum encoder: every replica writes the same. What depends on a replica's samples (a codebook that follows
them) would make other models of the replicas, which nothing makes equal again: gradients are averaged, parameters are not.

    writes = ForwardWrites(named, group)
    writes.begin()                       a training step begins
    ...                                  forwards and backwards
    writes.end()                         StepError on all ranks if a parameter has other values on another one

Rows that lookups scale down (`smpc.sharding.forward_writes.row_norms`) are exchanged, so that all replicas have them as one process has.

In the first step all parameters are compared, by one number for each: some ways to write count no version. From then on those are that
forwards have written into in it; a later write into another one, which its version tells, is a StepError on this rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from smpc.errors import StepError
from smpc.sharding.dtensors import digest, local
from smpc.sharding.forward_writes.row_norms import LookedUpRows

_NOTHING = torch.iinfo(torch.int64).min


class ForwardWrites:
    """See above. `named`: names and parameters, a parameter once for each name that it has; the same on all ranks of `group`."""

    def __init__(self, named: Iterable[tuple[str, Tensor]], group: dist.ProcessGroup) -> None:
        names: dict[int, list[str]] = {}
        self._parameters: list[Tensor] = []
        for name, parameter in named:
            if id(parameter) not in names and parameter.numel():
                self._parameters.append(parameter)
            names.setdefault(id(parameter), []).append(name)
        self._names = [list(dict.fromkeys(names[id(parameter)])) for parameter in self._parameters]
        self._numbers = {id(parameter): number for number, parameter in enumerate(self._parameters)}
        self._group = group
        self._rows = LookedUpRows(lambda tensor: self._numbers.get(id(tensor)), group)
        self._versions: list[int] = []
        self._written: list[int] | None = None  # what forwards write into; None: no step has ended

    def begin(self, *, compares: bool = True) -> None:
        """A training step begins. `compares`: what evaluations have written since the last one counts; collective if forwards write."""
        if self._written and compares:
            self._settle_rows()
            self._compare(self._written)
        self._versions = [local(parameter)._version for parameter in self._parameters]

    def end(self) -> None:
        """It ends, before the update. Collective in the first step, and if forwards write."""
        if not self._parameters:
            return
        pairs = zip(self._parameters, self._versions, strict=True)
        written = [number for number, (parameter, version) in enumerate(pairs) if local(parameter)._version != version]
        if self._written is not None and not self._written and not written:
            return
        new = [] if self._written is None else [self._names[n][0] for n in written if n not in self._written]
        if new:
            raise StepError(
                f"forward writes into {', '.join(new)}, and did not in the first training step, in which replicas agree on what they "
                "compare: write in the first step, too (the values that are there), or between steps"
            )
        self._end(written, counts=True)

    def follow(self) -> None:
        """In place of `end`, on a rank that takes part in a step of others: its values do not count. Collective as `end` is."""
        if self._parameters and (self._written is None or self._written):
            self._end((), counts=False)

    def _end(self, written: Sequence[int], *, counts: bool) -> None:
        self._settle_rows()
        if self._written is not None:
            self._compare(self._written, counts=counts)
            return
        self._written = self._compare(range(len(self._parameters)), written, counts=counts)
        self._rows.is_closed = not self._rows.tables

    @torch.no_grad()
    def _settle_rows(self) -> None:
        """Give all ranks the rows of the first that has scaled them down."""
        for lookup, codes in self._rows.exchanged(self._parameters[0].device).items():
            names, table = self._names[lookup.table], self._parameters[lookup.table]
            self._rows.check_use(lookup.table, names[0], names[1:], table.grad, lambda rows: rows)
            rows = codes.nonzero()[:, 0].to(table.device)
            is_own = self._rows.is_first(codes[rows.to(codes.device)]).to(table.device)
            values = torch.where(is_own[:, None], table[rows], 0)
            dist.all_reduce(values, group=self._group)
            table[rows] = values
            self._rows.pass_on(table, rows, lookup)

    @torch.no_grad()
    def _compare(self, numbers: Sequence[int], written: Sequence[int] = (), *, counts: bool = True) -> list[int]:
        """Which of these some rank has written into. StepError if one has other values on another rank."""
        device = self._parameters[0].device
        both = torch.full((2, len(numbers)), _NOTHING, dtype=torch.int64, device=device)
        if counts:
            own = torch.stack([digest(local(self._parameters[number])).to(device) for number in numbers])
            both = torch.stack([own, -own])
        flags = torch.tensor([int(number in {*written}) for number in numbers], dtype=torch.int64, device=device)
        message = torch.cat([both.reshape(-1), flags])
        dist.all_reduce(message, dist.ReduceOp.MAX, group=self._group)
        largest, smallest, found = message.reshape(3, -1).tolist()
        wrong = [self._names[n][0] for n, a, b in zip(numbers, largest, smallest, strict=True) if a != -b]
        if wrong:
            raise StepError(
                f"expected replicas to have equal parameters at the end of a step, found other values of {', '.join(wrong[:5])}"
                f"{' ...' if len(wrong) > 5 else ''} on some of them: forward, or the script, writes into them what depends on a replica's "
                "own samples; make it alike on all replicas (smpc.dist.all_reduce of what is written), or hold it in a buffer, of which "
                "replica 0's values count"
            )
        return [number for number, is_written in zip(numbers, found, strict=True) if is_written]
