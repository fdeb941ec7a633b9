"""Watches how large the tensors are that code makes in memory."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LargestTensor(TorchDispatchMode):
    """The most elements that a tensor in memory had."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(found) if isinstance(leaf, torch.Tensor) and not leaf.is_meta]
        self.largest = max([self.largest, *sizes])
        return found
