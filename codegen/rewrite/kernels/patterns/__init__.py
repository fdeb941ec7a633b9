"""The patterns that ops of `smpc.kernels` replace: one op per file."""
