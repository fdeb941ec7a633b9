"""Tensor parallelism as a rewrite: sharding rules, the choice of layouts, and the trace of one rank."""
