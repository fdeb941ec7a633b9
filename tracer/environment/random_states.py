"""The states of generators of random numbers, of Python and of numpy."""

from __future__ import annotations

import random
from typing import Any

import numpy

GENERATORS = (random.Random, numpy.random.Generator, numpy.random.RandomState)


def generator_state(generator: Any) -> Any:
    """The state of a generator of random numbers: Python's or numpy's."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, numpy.random.RandomState):
        name, keys, *rest = generator.get_state(legacy=True)
        return (name, numpy.asarray(keys).tolist(), *rest)
    return generator.bit_generator.state


def set_generator_state(generator: Any, state: Any) -> None:
    """Puts a generator back into a state."""
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, numpy.random.RandomState):
        generator.set_state(state)
    else:
        generator.bit_generator.state = state
