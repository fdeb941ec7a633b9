"""What scripts write into parameters and gradients between steps, where ranks have parts of them.

parts         DTensors, as `fully_shard` makes them: torch's own writes, and what one process writes where torch has none
data_aliases  writes through `parameter.data`, which torch does not count
"""
