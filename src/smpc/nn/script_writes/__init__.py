"""What scripts write into parameters and gradients between steps, where ranks have parts of them.

parts         DTensors, as `fully_shard` makes them: torch's own writes, and what one process writes where torch has none
slices        slices of tensor-parallel ranks: what one process writes, or an error (slice_values)
data_aliases  writes through `parameter.data`, which torch does not count
classes       parameters of their own classes between steps, ordinary ones in them
"""
