"""What several ops share: element-wise mathematics, norms, losses by token, tables of tensors."""
