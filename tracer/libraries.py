"""Libraries that ask whether they are being traced, and take another way then.

Hugging Face's masks do. Run, they look at the positions, find one sequence in each row, and leave the mask to `is_causal`; traced,
they cannot look, and write the mask out: attention then has other kernels (no flash attention), repeats the heads of keys and
values, and the mask travels with the activations. A recording can look where a value depends on sizes alone.

It could look at the model's inputs, too, but then its program would hold only for some: an `attention_mask` of ones is left out,
one with zeros is not. So it looks only at inputs that the caller names (`record`'s `shown`), and a guard says on what that rests.
Training scripts name the masks that are ones in all microbatches of a step. All others are written out, in one program for all.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_ASKED = "transformers.utils.import_utils", "is_fake_tensor"


@contextmanager
def looking(is_shown: Callable[[torch.Tensor], bool]) -> Iterator[None]:
    """In this context such libraries take a fake tensor for a real one if it is shown."""
    library = sys.modules.get(_ASKED[0])
    original = getattr(library, _ASKED[1], None)
    if original is None:
        yield
        return

    def is_fake_tensor(value: Any) -> bool:
        return bool(original(value)) and not is_shown(value)

    setattr(library, _ASKED[1], is_fake_tensor)
    try:
        yield
    finally:
        setattr(library, _ASKED[1], original)
