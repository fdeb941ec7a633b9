"""What each op of `smpc.kernels` replaces: one pattern a file."""
