"""Data parallelism: replicas average or shard the gradients of their stages."""
