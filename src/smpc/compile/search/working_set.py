"""What an operation holds while it runs: a bound for searches, which no plan of the same memory model is below.

A microbatch of k times the size has k times the bytes of activations, and ranks that share it hold an equal part each at best. What does
not depend on the batch counts for nothing, as in `smpc.compile.search.least_times`.

Example: logits in bfloat16 [8192, 128256] that become float32 take 2.1 GB and 4.2 GB. A rank that computes the whole model holds 6.3 GB for
them; one that gets the former from another rank holds 4.2 GB at least.
"""

from __future__ import annotations

from smpc.compile.search.least_times import grows_with_batch
from smpc.tracer.ir import Trace


def largest_working_set(trace: Trace, *, is_whole: bool) -> int:
    """Bytes of the result of an operation, and where one stage computes the model as a whole, of the activations that it reads."""
    counted = grows_with_batch(trace)
    return max((_working_set(trace, name, counted, is_whole) for name in counted), default=0)


def _working_set(trace: Trace, name: str, counted: set[str], is_whole: bool) -> int:
    node, sizes = trace.node(name), dict[int, int]()
    for each in (node, *(trace.node(other) for other in node.inputs if is_whole and other in counted)):
        if each.storage >= 0 and each.spec is not None:
            size = min(each.spec.num_bytes, trace.storages[each.storage])
            sizes[each.storage] = max(size, sizes.get(each.storage, 0))
    return sum(sizes.values())
