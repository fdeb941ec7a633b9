"""The queue of a search, and its remainder at the end."""

from __future__ import annotations

import math
from dataclasses import dataclass

from smpc.compile.search.estimate import Guess
from smpc.compile.search.space import Candidate, Shape
from smpc.compile.search.workloads import Load


@dataclass(frozen=True, slots=True)
class Waiting:
    """A shape, or one candidate of it, in the queue. `breaks_limit`: its best cut does.

    less: where that is so, the same with the least on the device that offloading leaves, and about how many bytes less that is.
    """

    shape: Shape
    bound: float  # seconds that it takes at least
    peak: int  # bytes that it holds at least
    guess: Guess
    candidate: Candidate | None = None
    breaks_limit: bool = False
    is_corrected: bool = False  # its place in the queue is, by what others of its kind turned out to be
    less: tuple[Candidate, int] | None = None
    without: int = 0  # of one that offloads: bytes that the same cut takes without
    basis: Load | None = None  # what a shape's guess was made from


@dataclass
class Rest:
    """What is left of a shape without a plan."""

    ways: int = 0
    bound: float = math.inf
    peak: int = 0
