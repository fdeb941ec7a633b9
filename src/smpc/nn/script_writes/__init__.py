"""What scripts write into parameters and gradients between steps, where ranks have parts of them.

parts    DTensors, as `fully_shard` and parallelize_module make them: torch's own writes, and what one process writes where torch has none
"""
