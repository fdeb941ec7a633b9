"""Functions of torch.compile that a script calls with such tensors run as Python: their classes decide by who calls them, and what is known
of a value is in no graph.
"""

from __future__ import annotations

from torch import Tensor


def leave_to_python(package: str, *kinds: type[Tensor]) -> None:
    """For tensors of these classes, and the code of a package."""
    from torch._dynamo import config, trace_rules

    config.nontraceable_tensor_subclasses = {*config.nontraceable_tensor_subclasses, *kinds}
    trace_rules.add(package)
