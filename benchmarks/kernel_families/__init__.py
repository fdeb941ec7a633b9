"""What `benchmarks/kernels.py` measures, one family of kernels a module; each has `rows(bench)`."""
