"""Tables whose lookups scale rows down (`nn.Embedding(max_norm=...)`, `F.embedding_bag(..., max_norm=...)`), on ranks that share a batch.

In one process a batch scales down each row that any of its samples looks up. Ranks have samples of their own, and scale the rows of these:

    looked up by rank 0, rank 1    rows 1 2, rows 2 5
    in one process                 rows 1 2 5

    rows = LookedUpRows(number_of_table, group)
    ...                                          lookups of this rank
    for lookup, codes in rows.exchanged(device).items(): ...    per row, 0 if no rank has looked it up; collective

Rows are noted where torch scales them down.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from smpc.errors import StepError


@dataclass(frozen=True, slots=True, order=True)
class Lookup:
    """How rows of a table are looked up: its number, how many rows it has, the norm that they may have, its kind, and whether ranks have
    slices of the rows."""

    table: int
    num_rows: int
    max_norm: float
    norm_type: float
    is_sliced: bool


Cut = Callable[[Tensor], Tensor]


class LookedUpRows:
    """See above. `number_of`: the number of the table that a tensor is, the same on all ranks of `group`; None: it is none of them."""

    def __init__(self, number_of: Callable[[Tensor], int | None], group: dist.ProcessGroup) -> None:
        self._number_of, self._group = number_of, group
        self._marks: dict[Lookup, Tensor] = {}  # by row, whether this rank has looked it up
        self._known: tuple[Lookup, ...] = ()  # on all ranks
        self._ever: dict[int, Tensor] = {}  # by table and row, whether some rank has looked it up
        self.is_closed = False  # no further tables are taken
        _patch_lookups()
        _watching.add(self)

    @property
    def are_there(self) -> bool:
        """Whether this rank has looked up rows since the last exchange."""
        return bool(self._marks)

    def notes(self, table: int) -> bool:
        """Whether this rank has looked up rows of a table since then."""
        return any(lookup.table == table for lookup in self._marks)

    @property
    def tables(self) -> frozenset[int]:
        """The tables whose rows some rank has scaled down."""
        return frozenset(lookup.table for lookup in (*self._known, *self._marks))

    def note(self, table: Tensor, ids: Tensor, max_norm: float, norm_type: float, is_sliced: bool) -> None:
        """This rank scales down rows. StepError if it is closed."""
        number = self._number_of(table)
        if number is None:
            return
        if self.is_closed:
            raise StepError(
                "expected tables whose rows have a max_norm to be looked up in the first training step, too, in which replicas agree on "
                f"what forward writes, found the first lookup in one of shape {list(table.shape)} later; look it up in the first step, "
                "or limit the norms between steps"
            )
        lookup = Lookup(number, table.shape[0], float(max_norm), float(norm_type), is_sliced)
        if lookup not in self._marks:
            self._marks[lookup] = torch.zeros(table.shape[0], dtype=torch.int32, device=table.device)
        self._marks[lookup][ids.detach().reshape(-1).long()] = 1

    def exchanged(self, device: torch.device) -> dict[Lookup, Tensor]:
        """By lookup and row, 0 if no rank has looked it up since the last time, else which rank is the first (see `is_first`). Collective,
        on `device`."""
        found = self._reduced(device)
        if int(found[0]):
            self._agree()
            found = self._reduced(device)
        self._marks.clear()
        rows = torch.split(found[1:], [lookup.num_rows for lookup in self._known])
        for lookup, codes in zip(self._known, rows, strict=True):
            self._ever[lookup.table] = self._ever.get(lookup.table, False) | codes.bool()
        return dict(zip(self._known, rows, strict=True))

    def check_use(self, table: int, name: str, others: list[str], grad: Tensor | None, part: Cut) -> None:
        """StepError if a table is used otherwise: as `others` of its names say, or as rows have gradients that no rank has looked up.
        `part`: what this rank has of a tensor with an element for each row."""
        ever = part(self._ever[table])
        if not others and grad is not None:
            rows = grad.coalesce().indices()[0] if grad.is_sparse else grad.reshape(grad.shape[0], -1).ne(0).any(1)
            rows = torch.zeros_like(ever).index_fill_(0, rows, True) if grad.is_sparse else rows.to(ever.device)
            others = ["part of a computation that reaches rows nobody looks up"] if bool((rows & ~ever).any()) else []
        if others:
            raise StepError(
                f"{name}: expected a table with max_norm to be used for lookups alone, as each rank scales down the rows of its own "
                f"samples before it uses them, found that it is {', '.join(others)}, too; untie it, or limit its norms between steps"
            )

    def pass_on(self, table: Tensor, rows: Tensor, lookup: Lookup) -> None:
        """Rows of a table have come from other ranks: ranks of other groups that this rank is in get them, too."""
        for other in list(_watching):
            if other is not self:
                other.note(table, rows, lookup.max_norm, lookup.norm_type, lookup.is_sliced)

    def is_first(self, codes: Tensor) -> Tensor:
        """Whether this rank is the first of those that have looked a row up."""
        return codes == self._code

    @property
    def _code(self) -> int:
        return self._group.size() - self._group.rank()

    def _reduced(self, device: torch.device) -> Tensor:
        """Whether some rank has a lookup that others do not know, and the codes of the known ones."""
        is_new = any(lookup not in self._known for lookup in self._marks)
        parts = [torch.tensor([int(is_new)], dtype=torch.int32)]
        for lookup in self._known:
            marks = self._marks.get(lookup)
            parts.append(torch.zeros(lookup.num_rows, dtype=torch.int32) if marks is None else marks * self._code)
        message = torch.cat([part.to(device) for part in parts])
        dist.all_reduce(message, dist.ReduceOp.MAX, group=self._group)
        return message

    def _agree(self) -> None:
        told: list[Any] = [None] * self._group.size()
        dist.all_gather_object(told, sorted(self._marks), group=self._group)
        self._known = tuple(sorted({*self._known, *(lookup for each in told for lookup in each)}))


_watching: weakref.WeakSet[LookedUpRows] = weakref.WeakSet()


def note_lookup(table: Tensor, ids: Tensor, max_norm: float, norm_type: float, *, is_sliced: bool = False) -> None:
    """Rows of a table are about to be scaled down. `is_sliced`: ranks have slices of each."""
    for rows in list(_watching):
        rows.note(table, ids, max_norm, norm_type, is_sliced)


@functools.cache
def _patch_lookups() -> None:
    """torch scales rows down in one function, for every kind of lookup."""
    original: Callable[..., Any] = vars(F)[_SCALE]

    @functools.wraps(original)
    def scale(weight: Tensor, input: Tensor, max_norm: float, norm_type: float) -> Any:
        note_lookup(weight, input, max_norm, norm_type)
        return original(weight, input, max_norm, norm_type)

    setattr(F, _SCALE, scale)


_SCALE = "_no_grad_embedding_renorm_"
