"""`smp.DistributedModel`, and what a script declares of its model: partitions, tensor parallelism, activation checkpointing."""
