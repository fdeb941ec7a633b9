"""Memory that the ranks of one host share, for small CPU tensors."""
