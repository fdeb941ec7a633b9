"""Libraries that ask whether they are being traced, and take another way then.

Hugging Face's masks do. Run, they look at the positions, find one sequence in each row, and leave the mask to `is_causal`; traced,
they cannot look, and write the mask out: attention then has other kernels (no flash attention), repeats the heads of keys and
values, and the mask travels with the activations. A recording can look where a value depends on sizes alone. Where it depends on
the model's inputs (an `attention_mask`), the mask is written out, and one program holds for all that may be passed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_ASKED = "transformers.utils.import_utils", "is_fake_tensor"


@contextmanager
def looking(is_fixed: Callable[[torch.Tensor], bool]) -> Iterator[None]:
    """In this context such libraries take a fake tensor whose values are the same in every run for a real one."""
    library = sys.modules.get(_ASKED[0])
    original = getattr(library, _ASKED[1], None)
    if original is None:
        yield
        return

    def is_fake_tensor(value: Any) -> bool:
        return bool(original(value)) and not is_fixed(value)

    setattr(library, _ASKED[1], is_fake_tensor)
    try:
        yield
    finally:
        setattr(library, _ASKED[1], original)
