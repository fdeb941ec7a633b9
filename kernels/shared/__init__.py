"""Common parts of several ops: element-wise mathematics, norms, losses by token, tables of tensors."""
