"""How large numbers may be: larger than any real job needs, small enough to be handled in finite time and memory.

Values from the command line, a file or the environment are checked against these before anything of that size is made.
"""

from __future__ import annotations

MAX_RANKS = 65_536  # of any degree
MAX_PIPELINE_RANKS = (
    4_096  # that a model is split over; with more, it takes long to find that the model has fewer pieces
)
MAX_LOCAL_RANKS = 1_024  # processes that one launcher starts
MAX_WORLD_SIZE = 1_048_576
MAX_PIECES = 1_024  # of the model on one rank
MAX_MICROBATCHES = 16_384
MAX_STEPS = 131_072  # stages x microbatches: a schedule has an action or three for each
MAX_SEARCHED_STEPS = 16_384  # ... that `list` searches for
MAX_SECONDS = 31_536_000.0  # a year
MAX_BYTES = 1 << 60
MAX_COUNT = (1 << 31) - 1  # of anything else
MAX_SEED = (1 << 62) - 1
MAX_INPUT_BYTES = 1 << 36  # of the sample inputs that are given by shape: they are allocated, though hardly written
MAX_MICROBATCH_BYTES = 1 << 31  # of one microbatch of them: a module that cannot be recorded is run on it
MAX_MASK_BYTES = 1 << 32  # of those among them that are filled with ones


def size_violation(num_stages: int, num_microbatches: int, *, searched: bool = False) -> str:
    """What is wrong with so many stages and microbatches, "" if nothing; `searched`: by the schedule `list`."""
    if num_microbatches > MAX_MICROBATCHES:
        return f"microbatches: expected at most {MAX_MICROBATCHES}, found {shown(num_microbatches)}"
    most = MAX_SEARCHED_STEPS if searched else MAX_STEPS
    if num_stages * num_microbatches > most:
        what = "the list schedule, which is searched for" if searched else "a schedule"
        return f"microbatches: expected at most {most} stages x microbatches for {what}, found {shown(num_stages)} x {num_microbatches}"
    return ""


def shown(value: object) -> str:
    """A value as messages show it, shortened. Python refuses to print numbers of more than 4300 digits."""
    if isinstance(value, int) and value.bit_length() > 200:
        return f"a number of about {int(value.bit_length() * 0.30103) + 1} digits"
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:150]}... ({len(text)} characters)"
